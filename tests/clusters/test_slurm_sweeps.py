"""Whole sweeps under Slurm, whose nodes fail or are taken: all trials have their results."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial

from optuna_fleet import FleetExecutor, HarvestCluster
from optuna_fleet.cli import main
from tests.clusters import recorded
from tests.clusters.forked import FORKED
from tests.clusters.slurm_lab import NODES, SlurmLab
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("forked_agents")

NUM_TRIALS = 12


def objective(trial: Any, *, gate: Path) -> float:
    until(lambda: trial.number == 0 or gate.exists())
    trial.set_user_attr("node", os.environ["SLURMD_NODENAME"])
    return float(trial.number**2)


def nodes_of_sweep(cluster: Any, disturb: Callable[[FrozenTrial], None], gate: Path) -> set[str]:
    """The nodes on which the trials of a sweep ended, of which `disturb` hears.

    Only the first ends before there is the file `gate`.
    """
    study = optuna.create_study()
    with FleetExecutor(cluster=cluster, devices=1, device_type="cpu") as fleet:
        study.optimize(
            functools.partial(objective, gate=gate),
            n_trials=NUM_TRIALS,
            callbacks=[lambda study, trial: disturb(trial)],
            executor=fleet,
        )
    assert {t.number: t.value for t in study.trials} == {n: n**2 for n in range(NUM_TRIALS)}
    return {trial.user_attrs["node"] for trial in study.trials}


def test_all_pilots_are_preempted_and_come_back(
    slurm: SlurmLab, tmp_path: Path, opens: Callable[[Path, str], None]
) -> None:
    opens(tmp_path / "gate", "its agent was told so by a SIGTERM")
    optuna.logging.set_verbosity(optuna.logging.INFO)
    preemptors: list[str] = []

    def preempt(trial: FrozenTrial) -> None:
        if not preemptors:
            options = ("--partition=high", "--nodes=4", "--exclusive")
            preemptors.append(slurm.submit("sleep 1", *options))

    cluster = HarvestCluster(partition="low", max_nodes=2, logs=tmp_path)
    assert nodes_of_sweep(cluster, preempt, tmp_path / "gate") <= set(NODES)
    slurm.wait_for(lambda: not slurm.queue())


def test_a_sweep_that_is_cancelled_preempted_and_requeued_records_what_it_would_have(
    slurm: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    midst, out = Path("midst"), Path("out")
    cancelled = submit(slurm, "cancelled")
    slurm.wait_for(midst.exists)
    slurm.run("scancel", cancelled)
    slurm.wait_for(lambda: not slurm.queue())
    midst.unlink()
    job = submit(slurm, "out")
    slurm.wait_for(midst.exists)
    slurm.submit("true", "--partition=high", "--nodes=4", "--exclusive")
    slurm.wait_for(lambda: "its trials move away" in out.read_text())
    Path("told").touch()
    slurm.wait_for(lambda: job not in slurm.queue())
    said = out.read_text()
    assert len(re.findall("go on, [1-9] of them from a checkpoint", said)) == 2, said
    for raw in ("Traceback", "srun:", "STEP"):
        assert raw not in said
    study = optuna.load_study(study_name="s", storage="sqlite:///s.db")
    assert recorded.numbers_of(study) == pytest.approx(recorded.undisturbed(), rel=1e-10)


def submit(slurm: SlurmLab, output: str) -> str:
    """Submit the sweep, or what is left of it; return the job's number."""
    options = ["--requeue", "--partition=low", "--exclusive", f"--output={output}"]
    assert main(["submit", *options, *FORKED, "tests.clusters.requeued"]) == 0
    (job,) = slurm.queue()
    return job
