"""What Slurm's commands have printed, and what that means. Recorded from Slurm 22.05."""

from __future__ import annotations

import math

import pytest

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.slurm.commands import (
    Allocation,
    Job,
    allocation_of,
    ask,
    jobs_of,
    may_pass,
    node_names,
    without_options,
)

QUEUE = """\
7|RUNNING|1795385303|node[1-2]|None
8|RUNNING|NONE|node1|None
9|PENDING|N/A||Resources
10|PENDING|N/A||Nodes required for job are DOWN, DRAINED or reserved | or so
"""


def test_jobs() -> None:
    running = {"state": "RUNNING", "reason": "None"}
    waits = "Nodes required for job are DOWN, DRAINED or reserved | or so"
    assert jobs_of(QUEUE) == [
        Job(number="7", end=1795385303.0, nodes=("node1", "node2"), **running),
        Job(number="8", nodes=("node1",), **running),
        Job(number="9", state="PENDING", reason="Resources"),
        Job(number="10", state="PENDING", reason=waits),
    ]
    assert jobs_of("") == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("login", ("login",)),
        ("node[1-2,4]", ("node1", "node2", "node4")),
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("a1,gpu-[3,7]-ib,b[1-2]", ("a1", "gpu-3-ib", "gpu-7-ib", "b1", "b2")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
    ],
)
def test_names_of_nodes(text: str, names: tuple[str, ...]) -> None:
    assert node_names(text) == names


@pytest.mark.parametrize(
    ("said", "passes"),
    [
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", False),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller", True),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: ...", True),
    ],
)
def test_what_may_pass(said: str, passes: bool) -> None:
    assert may_pass(said) == passes


def test_a_command_that_fails_says_how() -> None:
    with pytest.raises(LaunchError, match=r"`sh -c .*` failed: no such partition"):
        ask("sh", "-c", "echo no such partition >&2; exit 1")
    with pytest.raises(LaunchError, match="can't be run"):
        ask("no-such-command")


def test_a_job_is_no_option_of_another() -> None:
    given = {"SLURM_NTASKS": "4", "SRUN_CPUS_PER_TASK": "2", "SLURM_CONF": "/x", "HOME": "/home"}
    assert without_options(given) == {"SLURM_CONF": "/x", "HOME": "/home"}


JOBS = """\
JobId=20 ArrayJobId=20 EndTime=1795850011 NodeList=node[3-5] BatchHost=node3 JOB_GRES=gpu:5 \
  Nodes=node[3-4] CPU_IDs=2-3 Mem=0 GRES=gpu:2(IDX:0-1)   Nodes=node5 CPU_IDs=0 Mem=0 \
GRES=gpu:a100:1(IDX:0),gpu:t4:3(IDX:1-3),nic:2
JobId=21 ArrayJobId=20 EndTime=Unknown ReqNodeList=node9 NodeList=node2   Nodes=node2 CPU_IDs=2 \
Mem=0 GRES=
JobId=22 ArrayJobId=20 EndTime=Unknown NodeList=(null)
"""


def test_allocations() -> None:
    gpus = {"node3": 2, "node4": 2, "node5": 4}
    first = Allocation(nodes=("node3", "node4", "node5"), end=1795850011.0, gpus=gpus)
    assert allocation_of("20", JOBS) == first
    second = Allocation(nodes=("node2",), end=math.inf, gpus={"node2": 0})
    assert allocation_of("21", JOBS) == second
    for job in ("22", "2"):
        with pytest.raises(LaunchError, match="no nodes"):
            allocation_of(job, JOBS)
