"""Ranks that stay when a trial moves within an epoch keep their frame, and others join them."""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch.nn.functional as F

from tests.executor.test_within_epochs import (
    BATCH,
    SIZE,
    all_are_asked,
    endings,
    fleet,
    prepared,
    result,
    run,
    undisturbed,
)
from tests.fleets import Leg, ask_to_move

__all__ = ["fleet", "undisturbed"]  # fixtures


def begun(folder: Path) -> list[int]:
    """The devices on which the objective has begun, in any order."""
    return sorted(map(int, (folder / "begun").read_text().split()))


def test_ranks_that_stay_keep_their_frame(
    fleet: Any, undisturbed: optuna.Study, tmp_path: Path
) -> None:
    legs = [Leg(some, until_asked=True) for some in [(0, 1, 2, 3), (3, 1, 2), (2, 1), (2, 1)]]
    moved = run(fleet, {0: [*legs, Leg((2,))]}, tmp_path / "m", {0: {3, 4, 15, 30}})
    assert begun(tmp_path / "m") == [0, 1, 2, 3]
    assert endings(moved) == ["yielded"] * 4 + ["returned"]
    assert result(moved.trials[0]) == pytest.approx(result(undisturbed.trials[0]), rel=1e-10)


def begins(trial: Any, how: str) -> None:
    """What an objective may do before its loop, or at the beginning of an epoch."""
    assert trial.suggest_categorical("how", [how]) == how
    trial.set_user_attr("begun", True)
    if how == "sums":
        assert trial.sum(1) == trial.world_size
    if how == "reads":
        assert sum(1 for _ in trial.batches("val", batch_size=8)) == 3


def trains_after(
    trial: Any, *, folder: Path, how: str, asks_at: Collection[int] = (4, 16)
) -> float:
    """Asks to move in some of its steps; notes where it has begun."""
    with (folder / "begun").open("a") as file:
        file.write(f"{trial._session.device} ")
    model, optimizer = prepared(trial)
    begins(trial, how)
    for epoch in trial.epochs(2):
        if how == "asks":
            assert not trial.should_prune()
        for images, numbers in trial.batches("train", batch_size=BATCH, movable=True):
            loss = F.cross_entropy(model(images), numbers % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trial.totals["loss"] += loss * trial.shard_size
            trial.totals["samples"] += trial.shard_size
            trial.state["steps"] = trial.state.get("steps", 0) + 1
            if trial.state["steps"] in asks_at and folder.name == "m":
                ask_to_move(trial)
                while not all_are_asked(trial):
                    trial.should_prune()
        trial.state[f"loss {epoch}"] = trial.totals["loss"]
        assert trial.totals["samples"] == SIZE
    return float(trial.state["loss 0"] + trial.state["loss 1"])


@pytest.mark.parametrize("how", ["does nothing", "reads", "sums", "asks"])
def test_ranks_join_where_others_are(fleet: Any, tmp_path: Path, how: str) -> None:
    values = []
    for name in ("m", "u"):
        legs = [Leg((0,), until_asked=True), Leg((0, 2), until_asked=True), Leg((1, 2, 3))]
        fleet.script = {0: legs if name == "m" else [Leg((0,))]}
        (tmp_path / name).mkdir()
        study = optuna.create_study()
        objective = functools.partial(trains_after, folder=tmp_path / name, how=how)
        study.optimize(objective, n_trials=1, executor=fleet)
        assert study.trials[0].user_attrs == study.trials[0].user_attrs | {"begun": True}
        values.append(study.trials[0].value)
    assert values[0] == pytest.approx(values[1], rel=1e-10)
    if how in ("does nothing", "reads"):
        assert begun(tmp_path / "m") == [0, 1, 2, 3]
    else:  # nobody could do that alone
        assert begun(tmp_path / "m").count(0) == 2


@pytest.mark.parametrize("others", [(), (0,)], ids=["none to come", "another to come"])
def test_ranks_that_stay_in_vain_lose_nothing(
    fleet: Any, undisturbed: optuna.Study, tmp_path: Path, others: tuple[int, ...]
) -> None:
    first = Leg((0, 1, 2), until_asked=True, promised=(1, 2))
    moved = run(fleet, {0: [first, Leg((3, *others))]}, tmp_path / "m", {0: {15}})
    assert begun(tmp_path / "m") == sorted([0, 1, 2, 3, *others])
    assert endings(moved) == ["yielded", "returned"]
    assert result(moved.trials[0]) == pytest.approx(result(undisturbed.trials[0]), rel=1e-10)
