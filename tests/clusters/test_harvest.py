"""Pilot jobs on a real Slurm: they join, are preempted, and come back."""

from __future__ import annotations

import time
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


def joined_and_seen(hub: Hub, slurm: SlurmLab) -> str:
    """The node of the only pilot, which Slurm's queue has shown to the engine."""
    hub.wait_for(hub.nodes)
    slurm.wait_for(lambda: list(hub.engine.expected()) == hub.nodes())
    return hub.nodes()[0]


def test_no_variable_of_the_user_hides_pilots(
    slurm: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"LOGNAME": "nobody", "SQUEUE_PARTITION": "high", "SCANCEL_PARTITION": "high"}
    with monkeypatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        with hub_of(tmp_path, max_nodes=1) as hub:
            joined_and_seen(hub, slurm)
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


def test_a_pilot_whose_node_crashes_is_requeued(slurm: SlurmLab, tmp_path: Path) -> None:
    with hub_of(tmp_path, max_nodes=1) as hub:
        node = joined_and_seen(hub, slurm)
        slurm.crash(node)
        hub.wait_for(lambda: hub.gone() == [node])
        hub.wait_for(lambda: hub.nodes() and hub.nodes() != [node])


def test_a_lost_node_is_given_back_and_another_taken(slurm: SlurmLab, tmp_path: Path) -> None:
    with hub_of(tmp_path, max_nodes=1) as hub:
        hub.engine.end(joined_and_seen(hub, slurm))
        (agent,) = hub.agents
        agent.end(0)
        hub.wait_for(lambda: hub.agents and agent not in hub.agents and hub.nodes())
        assert hub.agents[0].told["SLURM_JOB_ID"] != agent.told["SLURM_JOB_ID"]


def test_a_time_limit_is_known_and_another_pilot_waits(
    slurm: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harvest, "_RENEWAL_SHARE", 0.92)
    begun = time.time()
    with hub_of(tmp_path, time_limit_s=60, max_nodes=1) as hub:
        hub.wait_for(lambda: hub.departures)
        (departure,) = hub.departures
        assert departure.by is not None
        assert begun + 55 < departure.by < time.time() + 61
        hub.wait_for(lambda: len(hub.nodes()) == 2)  # 55 s before the first one ends


def test_pilots_that_share_a_node_have_names_of_their_own(slurm: SlurmLab, tmp_path: Path) -> None:
    options = {"max_nodes": 2, "exclusive": False, "gpus_per_node": 1}
    with hub_of(tmp_path, "--nodelist=node1", **options) as hub:
        hub.wait_for(lambda: len(hub.nodes()) == 2)
        jobs = sorted(agent.told["SLURM_JOB_ID"] for agent in hub.agents)
        assert hub.nodes() == [f"node1.{job}" for job in jobs]
