"""How many GPUs a job has on each node, where its steps do not get all of them by themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from optuna_fleet.executor.cluster.slurm.commands import ask, node_names

# A step has one task on each node, and gets what the job has asked for by task, or a part of what
# it has asked for in all.
_IS_SHARED_OUT = re.compile(r" TresPer(?:Task|Job)=\S*\bgpu\b")
_ON_NODES = re.compile(r" Nodes=(\S+) CPU_IDs=\S+ Mem=\S+ GRES=(\S*)")
_GPUS = re.compile(r"\bgpu(?::[^:,()]+)?:(\d+)(?![^(,])")


def ask_gpus(job: str) -> dict[str, int]:
    """The GPUs to ask for, by node; none where a step gets all. Waits for Slurm's answer."""
    return gpus_of(job, ask("scontrol", "--details", "--oneliner", "show", "job", job))


def gpus_of(job: str, text: str) -> dict[str, int]:
    """Likewise, from scontrol's answer, which may show others of its array."""
    line = next((line for line in text.splitlines() if line.startswith(f"JobId={job} ")), "")
    if not _IS_SHARED_OUT.search(line):
        return {}
    return {
        node: sum(map(int, _GPUS.findall(gres)))
        for nodes, gres in _ON_NODES.findall(line)
        for node in node_names(nodes)
    }


def in_steps(nodes: Sequence[str], gpus: Mapping[str, int]) -> list[Sequence[str]]:
    """The nodes by step: all in one, or each in its own where their numbers of GPUs differ."""
    return [nodes] if len({gpus.get(node) for node in nodes}) < 2 else [[node] for node in nodes]


def gpu_options(nodes: Sequence[str], gpus: Mapping[str, int]) -> list[str]:
    """What a step on these nodes asks for."""
    number = gpus.get(nodes[0])
    if number is None:
        return []
    # Of a job with unlike nodes a step gets more than the least of them only by its total.
    return [f"--gpus={number}" if len(nodes) == 1 else f"--gpus-per-node={number}"]
