"""Whole sweeps under Slurm, whose nodes fail or are taken: all trials have their results."""

from __future__ import annotations

import re
from pathlib import Path

import optuna
import pytest

from optuna_fleet.cli import main
from tests.clusters import recorded
from tests.clusters.forked import FORKED
from tests.clusters.slurm_lab import SlurmLab

pytestmark = pytest.mark.usefixtures("forked_agents")


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
