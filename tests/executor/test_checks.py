"""Sweeps whose trials are checked before they get several devices, or are moved."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch.nn import functional

from optuna_fleet import Checkpoints, FleetConfigError, FleetExecutor, Preflight
from optuna_fleet.sampler_bridge.records import flights_of
from tests.fleets import small_model, small_pipeline

FOREVER = 100_000  # epochs; trials end when what is tested has come


def prepared(trial: Any) -> Any:
    model = small_model()
    return trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))


def trains(trial: Any, model: Any, optimizer: Any, weight: Any = None) -> None:
    for x, y in trial.batches("train", batch_size=10):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y, weight=weight).backward()
        optimizer.step()


def until_wide(trial: Any, weight: Any = None) -> float:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(FOREVER):
        trains(trial, model, optimizer, weight)
        if trial.world_size == 2 and not trial.is_preflight:
            break
    return 0.0


class UntilTold:
    """An objective that trains a little longer than until a check has come to something."""

    def __init__(self, flag: Path, train: Callable[..., Any]) -> None:
        self.flag = flag
        self.train = train

    def __call__(self, trial: Any) -> float:
        model, optimizer = prepared(trial)
        remaining = 20
        for _ in trial.epochs(FOREVER):
            self.train(trial, model, optimizer)
            remaining -= self.flag.exists()
            if trial.sum(remaining) <= 0:
                break
        return 0.0


def weighs_classes(trial: Any, model: Any, optimizer: Any) -> None:
    trains(trial, model, optimizer, weight=torch.tensor([1.0, 2.0, 5.0]).double())


def kills_the_check(trial: Any, model: Any, optimizer: Any) -> None:
    if trial.is_preflight:
        os.kill(os.getppid(), signal.SIGKILL)
    trains(trial, model, optimizer)


class DiesOnceTold(UntilTold):
    """It keeps its best in a local variable, and its process is killed once it was told so."""

    def __call__(self, trial: Any) -> float:
        model, optimizer = prepared(trial)
        best, killed = 1e9, self.flag.with_name("killed")
        for epoch in trial.epochs(FOREVER):
            self.train(trial, model, optimizer)
            best = min(best, float(next(iter(model.parameters())).detach().abs().sum()))
            if self.flag.exists() and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if epoch > 5 and killed.exists():
                break
        return best


@contextmanager
def listening(flag: Path | None = None) -> Iterator[list[str]]:
    """What is told; once it is about a check's outcome the flag is there."""
    lines: list[str] = []

    def hear(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        if flag is not None and "Trials like trial" in lines[-1]:
            flag.touch()

    handler = logging.Handler()
    handler.emit = hear  # type: ignore[method-assign]
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def flown(objective: Any, flag: Path | None = None, **options: Any) -> tuple[list[Any], str]:
    """One trial on two devices: its flights, and what was told."""
    study = optuna.create_study(study_name="checked")
    given = {"devices": 2, "device_type": "cpu", "policy": "equal-split", **options}
    with FleetExecutor(small_pipeline(), **given) as fleet, listening(flag) as told:
        study.optimize(objective, n_trials=1, executor=fleet)
    return flights_of(study)[0], "\n".join(told)


def sweep(objective: Any, flag: Path | None = None, **options: Any) -> tuple[list[int], str]:
    """Likewise: on how many devices it was, flight by flight."""
    flights, told = flown(objective, flag, **options)
    return [len(flight["devices"]) for flight in flights], told


def test_what_passes_its_check_gets_several_devices_and_is_checked_once(tmp_path: Path) -> None:
    widths, told = sweep(until_wide, checkpoints=tmp_path)
    assert widths == [1, 2]
    assert told.count("is checked: its objective's beginning runs several times") == 1
    widths, told = sweep(until_wide, checkpoints=tmp_path)
    assert widths[-1] == 2
    assert "is checked" not in told


def test_what_fails_its_check_stays_on_one_device_and_the_user_is_told_why(tmp_path: Path) -> None:
    flag = tmp_path / "told"
    widths, told = sweep(UntilTold(flag, weighs_classes), flag)
    assert widths == [1]
    assert told.count("Trials like trial 0: one device: on several the gradient") == 1
    assert "trial.weighted" in told


def test_what_is_not_to_be_moved_is_resumed_when_its_device_is_lost_and_that_is_recorded(
    tmp_path: Path,
) -> None:
    flag = tmp_path / "told"
    interval = Checkpoints(interval_s=0)
    flights, told = flown(DiesOnceTold(flag, trains), flag, checkpoints=interval)
    assert [len(flight["devices"]) for flight in flights] == [1, 1]
    assert "not moved: `best` would begin anew" in told
    assert flights[0]["began_anew"] == ""
    assert "`best` would begin anew" in flights[1]["began_anew"]


def test_a_check_that_dies_leaves_the_trial_on_one_device(tmp_path: Path) -> None:
    flag = tmp_path / "told"
    widths, told = sweep(UntilTold(flag, kills_the_check), flag)
    assert widths == [1]
    assert "Trials like trial 0: not checked" in told


def test_what_can_not_be_is_refused() -> None:
    given: Any = "auto"
    with pytest.raises(FleetConfigError, match="share"):
        Preflight(share=1.5)
    with pytest.raises(FleetConfigError, match="`preflight` is 'auto', but must be True, False"):
        FleetExecutor(devices=1, preflight=given)
