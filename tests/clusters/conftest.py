"""A Slurm cluster for the tests of this folder, where Slurm is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.clusters.forks import agents_are_forked, forking
from tests.clusters.slurm_lab import SlurmLab, on_path, why_not
from tests.nursery import Nursery


@pytest.fixture(scope="session")
def slurm_lab() -> Iterator[SlurmLab]:
    if reason := why_not():
        pytest.skip(reason)
    with SlurmLab() as lab:
        yield lab


@pytest.fixture
def slurm(slurm_lab: SlurmLab) -> Iterator[SlurmLab]:
    """Four idle nodes, and Slurm's commands on the path of this process."""
    with on_path(slurm_lab):
        yield slurm_lab
        slurm_lab.restore()


@pytest.fixture
def allocate(slurm: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes this process one in an allocation, as salloc does; returns its number."""

    def allocated(*options: str) -> str:
        slurm.run("salloc", "--no-shell", "--no-kill", *options)
        (job,) = slurm.queue()
        monkeypatch.setenv("SLURM_JOB_ID", job)
        nodes = slurm.run("squeue", "-h", "-j", job, "-o", "%N")
        monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
        return job

    return allocated


@pytest.fixture
def forked_agents(nursery: Nursery) -> Iterator[None]:
    """Agents that Slurm and Ray start are forked by the nursery."""
    with forking(nursery), agents_are_forked():
        yield
