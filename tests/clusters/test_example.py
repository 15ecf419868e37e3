"""The example to copy, as its README says."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import optuna
import pytest

from optuna_fleet.cli import main
from tests.clusters.slurm_lab import SlurmLab

# Or one node might do it all before the other is there.
WAITS = """
        while not (there := fleet._runner._runtime) or len(there.nodes) < 2:
            optuna.create_study().optimize(lambda trial: 0.0, n_trials=1, executor=fleet)
"""
EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm"


def test_the_example(slurm: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shutil.copytree(EXAMPLE, tmp_path / "slurm"))
    script = Path("sweep.py")
    given = script.read_text().replace("n_trials=40", "n_trials=3")
    before, call, after = given.partition("        study.optimize(")
    script.write_text(before + WAITS + call + after)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    options = "--nodes 2 --cpus-per-node 1 --requeue --output=out"
    assert main(["submit", *options.split(), "python", "sweep.py"]) == 0
    slurm.wait_for(lambda: not slurm.queue())
    study = optuna.load_study(study_name="digits", storage="sqlite:///digits.db")
    assert len(study.trials) == 3, Path("out").read_text()
    assert study.best_value > 0.1
    assert "on 2 devices of 2 nodes" in Path("out").read_text()
