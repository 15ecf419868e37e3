"""The digits sweep, a few trials of it."""

from __future__ import annotations

from pathlib import Path

import optuna

from tests.nursery import Nursery

ROOT = Path(__file__).parents[2]


def test_a_short_sweep_learns_to_read_digits(nursery: Nursery, tmp_path: Path) -> None:
    storage, picture = f"sqlite:///{tmp_path}/digits.db", tmp_path / "digits.html"
    options = ["--trials", "2", "--epochs", "3", "--devices", "2"]
    options += ["--storage", storage, "--picture", str(picture)]
    ended = nursery.run(ROOT / "examples" / "digits.py", *options, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (summary,) = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    assert len(study.trials) == 2
    assert {trial.state.name for trial in study.trials} <= {"COMPLETE", "PRUNED"}
    assert study.best_value >= 0.9
    assert picture.stat().st_size > 10_000
