"""One srun in an allocation: agents join from its nodes, and their ends are told of."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from optuna_fleet.exceptions import FleetConfigError, LaunchError
from optuna_fleet.executor.cluster.slurm import cluster
from optuna_fleet.executor.cluster.slurm.cluster import SlurmEngine, check_allocation
from optuna_fleet.executor.cluster.slurm.commands import Allocation, ask_allocation
from tests.clusters.hub import AGENT, Hub
from tests.clusters.slurm_lab import NODES


def hub_of(job: str, notice_s: float = 100.0) -> Hub:
    return Hub(SlurmEngine(job, AGENT, notice_s))


def test_nothing_is_left_in_the_allocation_and_no_end_is_told_where_there_is_none(
    allocate, slurm
) -> None:
    job = allocate("--nodes=4", "--gres=gpu:2")
    with hub_of(job) as hub:
        hub.wait_for(lambda: hub.nodes() == sorted(NODES))
        assert {agent.told["CUDA_VISIBLE_DEVICES"] for agent in hub.agents} == {"0,1"}
        assert hub.departures == []
    slurm.wait_for(lambda: not slurm.run("squeue", "-h", "--steps", "-j", job, "-o", "%i"))


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        (("--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=1"), ["0,1", "0,1"]),
        (("--nodes=2", "--gpus=3"), ["0", "0,1"]),
    ],
)
def test_agents_have_all_gpus_however_they_were_asked_for(
    options: tuple[str, ...], gpus: list[str], allocate, monkeypatch
) -> None:
    """What the allocation's tasks were to have is no option of the agents' steps."""
    for name, value in {"NTASKS": "4", "GPUS_PER_TASK": "1", "NTASKS_PER_NODE": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with hub_of(allocate(*options)) as hub:
        hub.wait_for(lambda: len(hub.nodes()) == 2)
        assert sorted(agent.told["CUDA_VISIBLE_DEVICES"] for agent in hub.agents) == gpus
        first, node = hub.agents[0].told, hub.agents[0].node
        hub.agents[0].end(1)
        hub.wait_for(lambda: hub.gone() == [node] and len(hub.nodes()) == 2)
        again = hub.agent_of(node).told
        assert again["CUDA_VISIBLE_DEVICES"] == first["CUDA_VISIBLE_DEVICES"]


def test_a_node_that_has_failed_before_is_no_matter(allocate, slurm) -> None:
    job = allocate("--nodes=4")
    slurm.crash("node2")  # the variables of the batch script still name it
    with hub_of(job) as hub:
        hub.wait_for(lambda: hub.nodes() == ["node1", "node3", "node4"])


def test_a_queue_that_can_not_be_asked_ends_nothing(allocate, monkeypatch) -> None:
    why = "`scontrol` failed: slurm_load_jobs error: Socket timed out on send/recv operation"
    monkeypatch.setattr(cluster, "ask_allocation", mock.Mock(side_effect=LaunchError(why)))
    with hub_of(allocate("--nodelist=node1,node2")) as hub:
        hub.wait_for(lambda: hub.nodes() == ["node1", "node2"])


def refusing_once(why: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While there is this file, the next srun fails, and removes it."""
    refuses, srun = folder / "refuses", folder / "srun"
    srun.write_text(
        f'#!/bin/sh\n[ -e {refuses} ] || exec {shutil.which("srun")} "$@"\nrm {refuses}\n'
        f"echo 'srun: error: Unable to create step for job 1: {why}' >&2; exit 1\n"
    )
    srun.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return refuses


def test_one_that_slurm_does_not_start_now_is_started_later(
    allocate, tmp_path, monkeypatch
) -> None:
    why = "Unable to contact slurm controller (connect failure)"
    refuses = refusing_once(why, tmp_path, monkeypatch)
    monkeypatch.setattr(cluster, "_PUT_OFF_S", 0.0)
    with hub_of(allocate("--nodelist=node1,node2")) as hub:
        hub.wait_for(lambda: len(hub.nodes()) == 2)
        refuses.touch()
        hub.agent_of("node1").end(1)
        hub.wait_for(lambda: hub.nodes() == ["node2"])
        hub.wait_for(lambda: hub.nodes() == ["node1", "node2"])
        assert hub.gone() == ["node1"]
        assert all(departure.is_replaced for departure in hub.departures)


@pytest.mark.parametrize("limit", ["10", "UNLIMITED"])
def test_a_time_limit_that_is_put_off_is_told_before_it_comes(
    limit: str, allocate, slurm, monkeypatch
) -> None:
    is_changed, looks = threading.Event(), iter([True])

    def look(job: str) -> Allocation:
        next(looks, False) or is_changed.wait()
        return ask_allocation(job)

    monkeypatch.setattr(cluster, "_LOOK_AGAIN_S", 1e6)  # at once
    monkeypatch.setattr(cluster, "ask_allocation", look)
    job = allocate("--nodelist=node1", "--time=5")
    with hub_of(job) as hub:
        hub.wait_for(lambda: hub.departures)
        assert 290 < (hub.departures[0].by or 0.0) - time.time() <= 301
        slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
        is_changed.set()
        hub.wait_for(lambda: len(hub.departures) == 2)
        before, after = (departure.by or 0.0 for departure in hub.departures)
        assert after - before == (300 if limit == "10" else math.inf)


def test_scancel_ends_all(allocate, slurm) -> None:
    job = allocate("--nodelist=node1,node2")
    with hub_of(job) as hub:
        hub.wait_for(lambda: len(hub.nodes()) == 2)
        slurm.run("scancel", job)
        with pytest.raises(LaunchError, match=f"job {job} ended"):
            hub.wait_for(lambda: False)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_is_a_notice(allocate, number: int, monkeypatch) -> None:
    others = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # of tests before this one
    monkeypatch.setattr(cluster, "_SAME_NOTICE_S", math.inf)
    with hub_of(allocate("--nodelist=node1,node2"), notice_s=50.0) as hub:
        hub.wait_for(lambda: len(hub.nodes()) == 2)
        for same in (number, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), same)
        hub.wait_for(lambda: len(hub.departures) == 2)
        assert all(0 < (d.by or 0.0) - time.time() <= 50 for d in hub.departures)
        ends: list[int] = []
        with monkeypatch.context() as later:
            later.setattr(cluster, "_SAME_NOTICE_S", -1.0)
            later.setattr(os, "kill", lambda pid, number: ends.append(number))
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGTERM)  # it is meant
        assert ends == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.signal(signal.SIGTERM, others) is signal.SIG_DFL


def test_after_a_signal_no_agent_is_started_again(allocate, capfd) -> None:
    with hub_of(job := allocate("--nodelist=node1,node2"), notice_s=0.0) as hub:
        hub.wait_for(lambda: len(hub.nodes()) == 2)
        os.kill(os.getpid(), signal.SIGUSR1)
        hub.wait_for(lambda: len(hub.departures) == 2)
        for agent in list(hub.agents):
            agent.end(1)
        with pytest.raises(LaunchError, match=f"ended the agents of job {job}: job {job} got SIG"):
            hub.wait_for(lambda: False)
    ends = [departure for departure in hub.departures if departure.by is None]
    assert {end.cause for end in ends} == {f"Slurm ends its job: job {job} got SIGUSR1"}
    assert not any(end.is_replaced for end in ends)
    assert "srun: " not in capfd.readouterr().err


def test_a_handler_of_the_script_stays(allocate) -> None:
    def own(number: int, frame: object) -> None: ...

    others = signal.signal(signal.SIGTERM, own)
    with hub_of(allocate("--nodelist=node1"), notice_s=50.0) as hub:
        os.kill(os.getpid(), signal.SIGUSR1)
        hub.wait_for(lambda: hub.departures)
        assert signal.getsignal(signal.SIGTERM) is own
    assert signal.signal(signal.SIGTERM, others) is own


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({}, "SLURM_JOB_ID is not set"),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"},
            "there would be 4 drivers",
        ),
    ],
)
def test_where_there_is_no_allocation_it_says_so(
    environment: dict[str, str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(FleetConfigError, match=complaint):
        check_allocation(environment)
