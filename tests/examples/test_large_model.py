"""The search over transformers that do not fit on one device, two trials of it."""

from __future__ import annotations

from pathlib import Path

import optuna

from tests.nursery import Nursery

ROOT = Path(__file__).parents[2]


def test_what_is_too_large_for_a_device_trains_on_several(
    nursery: Nursery, tmp_path: Path
) -> None:
    storage = f"sqlite:///{tmp_path}/large.db"
    options = ["--trials", "2", "--epochs", "1", "--memory-mb", "8", "--seed", "2"]
    options += ["--storage", storage]
    ended = nursery.run(ROOT / "examples" / "large_model.py", *options, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (summary,) = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    assert all(trial.value < 4.85 for trial in study.trials)  # what guessing would have
    widest = max(study.trials, key=lambda trial: trial.params["width"] * trial.params["depth"])
    assert widest.user_attrs["stages"] > 2  # there are two devices of each type
