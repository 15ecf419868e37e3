"""The example to copy, as its README says."""

from __future__ import annotations

import shutil
from pathlib import Path

import optuna
import pytest

from optuna_fleet.cli import main
from tests.clusters.forked import FORKED
from tests.clusters.slurm_lab import SlurmLab

EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm"
DRIVER = """
import runpy
from tests.clusters.forks import agents_are_forked
with agents_are_forked():
    runpy.run_path("sweep.py", run_name="__main__")
"""


@pytest.mark.usefixtures("forked_agents")
def test_the_example(slurm: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shutil.copytree(EXAMPLE, tmp_path / "slurm"))
    script = Path("sweep.py")
    text = (
        script.read_text().replace("n_trials=40", "n_trials=3").replace("epochs(20)", "epochs(3)")
    )
    script.write_text(text)
    Path("driver.py").write_text(DRIVER)
    options = "--nodes 2 --cpus-per-node 1 --requeue --output=out"
    assert main(["submit", *options.split(), *FORKED, "driver.py"]) == 0
    slurm.wait_for(lambda: not slurm.queue())
    study = optuna.load_study(study_name="digits", storage="sqlite:///digits.db")
    assert len(study.trials) == 3, Path("out").read_text()
    assert study.best_value > 0.1
