"""Slurm's commands: how they are called, and what their answers mean."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from optuna_fleet.exceptions import LaunchError

# With its options in the environment, srun would ask for what its allocation's tasks were given.
# Those of squeue and scancel are the user's: they hide jobs, or ask back.
_OPTIONS = ("SLURM_", "SLURMD_", "SRUN_", "SQUEUE_", "SCANCEL_")
_NO_OPTIONS = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS")
_LIMIT_S = 600.0
_PASSING = (
    *("Unable to contact", "timed out", "Connection refused", "temporarily", "can't be run"),
    *("QOSMax", "AssocMax", "AssocGrp", "QOSGrp", "job submit limit"),
    "Memory required by task",  # of a step, until a new controller knows the nodes
)
_FORMAT = "%A|%T|%e|%N|%r"
_REFUSED = re.compile(
    r"srun: error: Unable to (?:confirm allocation|create step) for job \S+: (.+)"
)
_ON_NODES = re.compile(r" Nodes=(\S+) CPU_IDs=\S+ Mem=\S+ GRES=(\S*)")
_GPUS = re.compile(r"\bgpu(?::[^:,()]+)?:(\d+)(?![^(,])")
_NAMED = """exec "$@" --name "$SLURMD_NODENAME{suffix}" """


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What squeue says of a job.

    Attributes:
        number: Its own, also where it is one of an array.
        state: Slurm's word for it, as in "RUNNING".
        end: When its time limit ends it, or it has ended, in seconds since the epoch; None for
            never, or not known.
        nodes: Where it runs, or ran.
        reason: Why it waits, in Slurm's words.
    """

    number: str
    state: str
    end: float | None = None
    nodes: tuple[str, ...] = ()
    reason: str = ""


def ask_jobs(*which: str) -> list[Job]:
    """The jobs that these options of squeue choose; waits for its answer."""
    return jobs_of(ask("squeue", "--noheader", "--states=all", f"--format={_FORMAT}", *which))


def jobs_of(text: str) -> list[Job]:
    """The jobs in an answer of squeue."""
    lines = (line.strip().split("|", 4) for line in text.splitlines() if line.count("|") >= 4)
    return [
        Job(
            number=number,
            state=state,
            end=float(end) if end.isdigit() else None,
            nodes=node_names(nodes),
            reason=reason,
        )
        for number, state, end, nodes, reason in lines
    ]


def node_names(text: str) -> tuple[str, ...]:
    """The nodes that Slurm writes as in ``n[01-03,7],login``."""
    parts = re.findall(r"(?:[^,\[\]\s]|\[[^\]]*\])+", text)
    return tuple(name for part in parts for name in _expanded(part))


def _expanded(part: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    numbers, _, tail = rest.partition("]")
    for piece in numbers.split(","):
        first, _, last = piece.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for end in _expanded(tail):
                yield f"{head}{number:0{len(first)}d}{end}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What scontrol says of a job that runs.

    Attributes:
        nodes: Those that have not failed.
        end: When its time limit ends it, in seconds since the epoch; infinity for never.
        gpus: How many it has on each node; a step gets all only if it asks for them.
    """

    nodes: tuple[str, ...]
    end: float
    gpus: Mapping[str, int]


def ask_allocation(job: str) -> Allocation:
    """One job; waits for Slurm's answer."""
    return allocation_of(job, ask("scontrol", "--details", "--oneliner", "show", "job", job))


def allocation_of(job: str, text: str) -> Allocation:
    """One job in an answer of scontrol, which may show others of its array.

    Raises:
        LaunchError: It is not there, or has no nodes.
    """
    line = next((line for line in text.splitlines() if line.startswith(f"JobId={job} ")), "")
    nodes, end = (re.search(rf" {name}=(\S+)", line) for name in ("NodeList", "EndTime"))
    if nodes is None or nodes[1] == "(null)":
        raise LaunchError(f"Slurm knows of no nodes of job {job}.")
    return Allocation(
        nodes=node_names(nodes[1]),
        end=float(end[1]) if end is not None and end[1].isdigit() else math.inf,
        gpus={
            node: sum(map(int, _GPUS.findall(gres)))
            for names, gres in _ON_NODES.findall(line)
            for node in node_names(names)
        },
    )


def is_put_off(text: str) -> bool:
    """Whether srun's standard error says that Slurm starts no step now, but may later."""
    said = _REFUSED.search(text)
    return said is not None and may_pass(said[1])


def ask(*command: str, text: str = "", environment: Mapping[str, str] | None = None) -> str:
    """Standard output of a command that is given `text`, and these variables besides our own.

    Waits for it, for minutes where Slurm's controller is dead.

    Raises:
        LaunchError: It failed; says how.
    """
    variables = {**without_options(os.environ), **(environment or {})}
    variables |= {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            input=text,
            env=variables,
            capture_output=True,
            text=True,
            errors="replace",  # a job's comment may be anything
            timeout=_LIMIT_S,
            start_new_session=True,  # a Ctrl-C is for the driver
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"`{command[0]}` can't be run: {error}") from error
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise LaunchError(f"`{' '.join(command)}` failed: {said}")
    return done.stdout


def may_pass(refusal: str) -> bool:
    """Whether what Slurm has refused may be granted later: it was out of reach, or at a limit."""
    return any(words in refusal for words in _PASSING)


def without_options(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what Slurm's commands would take for their options."""
    return {
        name: value
        for name, value in environment.items()
        if name in _NO_OPTIONS or not name.startswith(_OPTIONS)
    }


def in_a_step(agent: Sequence[str], *options: str, suffix: str = "") -> list[str]:
    """The srun that starts an agent on one node, which says the node's name in Slurm.

    The `suffix`, which the shell expands, follows the node's name in that of the agent.
    """
    return [
        *("srun", "--nodes=1", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0"),
        *("--overlap", "--mpi=none", "--input=none", "--export=ALL", *options),
        *("sh", "-c", _NAMED.format(suffix=suffix).strip(), "sh", *agent),
    ]


def agent_command(
    devices: int | None, device_type: str | None, slots_per_device: int, notice_s: float
) -> list[str]:
    """The command line of an agent, as it is on all nodes."""
    given = {
        "devices": devices,
        "device-type": device_type,
        "slots-per-device": slots_per_device,
        "notice": notice_s,
    }
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return [sys.executable, "-m", "optuna_fleet", "agent", *options]
