"""`FleetExecutor.preflight`: what a user calls."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import tqdm

from optuna_fleet import FleetConfigError, FleetExecutor
from tests.preflight.table import BATCH, mean_of_classes, pipeline, prepared, scorer, step


def marks(trial: Any) -> None:
    """Leaves a mark where it is no rehearsal, and at its end."""
    folder = Path(trial.study.user_attrs["folder"])
    print("heard", file=sys.stderr, flush=True)
    assert tqdm.tqdm([]).disable  # by the environment, which it looks at when it is imported
    if not trial.is_preflight:
        (folder / "real").touch()
    model, optimizer = prepared(
        trial, scorer(), lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    )
    for epoch in trial.epochs(5):
        for batch in trial.batches("train_table", BATCH):
            step(optimizer, mean_of_classes(model, *batch))
        trial.report(1.0, epoch)
        trial.set_user_attr("seen", epoch)
    (folder / "end").touch()


def test_nothing_is_left_behind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    study = optuna.create_study()
    study.set_user_attr("folder", str(tmp_path))
    fleet = FleetExecutor(pipeline(), devices=1)
    report = fleet.preflight(study, marks)
    assert report.may_widen, report
    assert report.may_move, report
    assert 1e-3 <= report.params["lr"] <= 1e-1
    assert study.trials == []
    assert list(tmp_path.iterdir()) == []
    assert "heard" not in capfd.readouterr().err


def test_what_is_no_objective_is_refused() -> None:
    objective: Any = 1
    with pytest.raises(FleetConfigError, match="must be callable"):
        FleetExecutor(devices=1).preflight(optuna.create_study(), objective)
