"""Pilot jobs on a real Slurm: they join, are preempted, and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optuna_fleet.executor.cluster.slurm import harvest
from optuna_fleet.executor.cluster.slurm.harvest import HarvestCluster, HarvestEngine
from tests.clusters.hub import AGENT, Hub
from tests.clusters.slurm_lab import SlurmLab


def hub_of(folder: Path, sbatch: str = "", **options: Any) -> Hub:
    given = {"partition": "low", "max_nodes": 3, **options}
    return Hub(HarvestEngine(HarvestCluster(sbatch=sbatch, logs=folder, **given), AGENT, 0.2))


def test_no_variable_of_the_user_hides_pilots(
    slurm: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"LOGNAME": "nobody", "SQUEUE_PARTITION": "high", "SCANCEL_PARTITION": "high"}
    with monkeypatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        with hub_of(tmp_path, max_nodes=1) as hub:
            hub.wait_for(hub.nodes)
            slurm.wait_for(lambda: list(hub.engine.expected()) == hub.nodes())
            assert len(slurm.run("env", "-u", "SQUEUE_PARTITION", "squeue", "-h").split("\n")) == 1
    slurm.wait_for(lambda: not slurm.queue())


def test_pilots_that_nobody_uses_are_cancelled_with_notice(
    slurm: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harvest, "_SURPLUS_S", 0.0)
    with hub_of(tmp_path) as hub:
        hub.wait_for(lambda: len(hub.nodes()) == 3)
        hub.engine.want(1)
        hub.wait_for(lambda: sum(agent.noticed for agent in hub.agents) == 2)
        hub.wait_for(lambda: len(hub.nodes()) == 1)


def test_pilots_that_share_a_node_have_names_of_their_own(slurm: SlurmLab, tmp_path: Path) -> None:
    options = {"max_nodes": 2, "exclusive": False, "gpus_per_node": 1}
    with hub_of(tmp_path, "--nodelist=node1", **options) as hub:
        hub.wait_for(lambda: len(hub.nodes()) == 2)
        jobs = sorted(agent.told["SLURM_JOB_ID"] for agent in hub.agents)
        assert hub.nodes() == [f"node1.{job}" for job in jobs]
