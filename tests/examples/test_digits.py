"""The digits sweep, a few trials of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import optuna

ROOT = Path(__file__).parents[2]


def test_a_short_sweep_learns_to_read_digits(tmp_path: Path) -> None:
    storage, picture = f"sqlite:///{tmp_path}/digits.db", tmp_path / "digits.png"
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), "--trials", "2"]
    command += ["--epochs", "3", "--devices", "2", "--storage", storage, "--picture", str(picture)]
    subprocess.run(command, check=True, timeout=240, cwd=tmp_path)
    (summary,) = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    assert len(study.trials) == 2
    assert {trial.state.name for trial in study.trials} <= {"COMPLETE", "PRUNED"}
    assert study.best_value >= 0.9
    assert picture.stat().st_size > 10_000
    assert (tmp_path / "digits.html").exists()
