"""`trial.sum`, `trial.mean` and `trial.totals`: the same on any number of devices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from optuna_fleet import FleetConfigError
from tests.behaviour.harness import moment
from tests.behaviour.parts import prepared


def is_same(result: Any, wanted: Any) -> bool:
    """Equal to the type of all that is in it."""
    if type(result) is not type(wanted):
        return False
    if isinstance(wanted, torch.Tensor):
        return result.dtype == wanted.dtype and torch.equal(result, wanted)
    if isinstance(wanted, dict):
        return result.keys() == wanted.keys() and all(
            is_same(result[k], wanted[k]) for k in wanted
        )
    if isinstance(wanted, (list, tuple)):
        return len(result) == len(wanted) and all(map(is_same, result, wanted))
    return bool(np.all(result == wanted))


SUMS: list[tuple[list[Any], Any]] = [
    ([1, 2], 3),
    ([2**60 + 1, 2**60 + 2], 2**61 + 3),
    ([-5, 2], -3),
    ([0.5, 1.0], 1.5),
    ([0, 1.5], 1.5),  # a rank without a batch never left its initial 0
    ([True, True], 2),
    ([np.float32(0.5), np.float32(2)], np.float32(2.5)),
    ([torch.ones(2, 2), torch.ones(2, 2)], torch.full((2, 2), 2.0)),
    ([torch.tensor([True]), torch.tensor([True])], torch.tensor([2])),
    ([{"a": (1, 2.0), "b": []}] * 2, {"a": (2, 4.0), "b": []}),
]
MEANS: list[tuple[list[Any], list[Any], Any]] = [
    ([1, 2], [None, None], 1.5),
    ([1.0, 4.0], [2, 1], 2.0),
    ([float("nan"), 4.0], [0, 1], 4.0),
    ([{"a": torch.tensor([1, 2])}] * 2, [1, 3], {"a": torch.tensor([1.0, 2.0])}),
]


def adds_up(trial: Any) -> None:
    prepared(trial)
    for values, wanted in SUMS:
        assert is_same(trial.sum(values[trial.rank]), wanted), values
    either = trial.sum([0, torch.tensor(4)][trial.rank])
    assert is_same(either, [4, torch.tensor(4)][trial.rank])
    for values, weights, wanted in MEANS:
        mean = trial.mean(values[trial.rank], weight=weights[trial.rank])
        assert is_same(mean, wanted), values
    for reduces in (trial.sum, trial.mean):
        assert not reduces(torch.ones((), requires_grad=True) * 2).requires_grad


def test_sums_and_means_keep_their_types(lab: Any) -> None:
    flown = lab.fly(adds_up, [2])
    assert flown.error is None, flown.error


ALONE: list[tuple[Any, Any]] = [
    (3, int),
    (2**62, int),
    (0.1, float),
    (True, int),
    (np.float32(0.1), np.float32),
    (np.ones(2), np.ndarray),
    (torch.tensor(0.1), torch.float32),
    (torch.tensor([2], dtype=torch.int16), torch.int16),
    (torch.tensor([True]), torch.int64),
    (torch.tensor(0.1, dtype=torch.float16), torch.float16),
]


def has_types(trial: Any) -> None:
    prepared(trial)
    for value, kind in ALONE:
        total = trial.sum(value)
        assert (total.dtype if isinstance(total, torch.Tensor) else type(total)) is kind
        assert np.all(np.asarray(total) == np.asarray(value) * trial.world_size)
    kinds = []
    for value in (3, 0.1, True, torch.tensor([1, 2]), np.float32(0.1)):
        for weight in (None, 3.0, 0.0):
            mean = trial.mean(value, weight=weight)
            exact = torch.as_tensor(mean) == torch.as_tensor(value)
            assert bool(exact.all()) is (weight != 0.0)
            kinds.append(str(type(mean)))
    trial.set_user_attr("kinds", kinds)


def test_alone_a_sum_has_the_type_it_has_in_a_group(lab: Any) -> None:
    lab.same(has_types, [2])


def sums_unlike_things(trial: Any) -> None:
    prepared(trial)
    trial.sum([{"a": 1}, {"a": 1, "b": 1}][trial.rank])


def test_unlike_structures_are_refused(lab: Any) -> None:
    assert type(lab.refused(sums_unlike_things).error).__name__ == "TrialError"


# -- totals ---------------------------------------------------------------------------------------


def totals_up(trial: Any) -> None:
    prepared(trial)
    for epoch in trial.epochs(3):
        for images, labels in trial.batches("train_odd", 10, movable=True):  # the last is one
            trial.totals["samples"] += trial.shard_size
            trial.totals["loss"] += images.requires_grad_().square().mean() * trial.shard_size
            trial.totals["score"] += np.float32(0.25) * trial.shard_size
            trial.totals["rows"] += len(labels)  # a stand-in sample counts for nothing
            trial.totals["by label"] += torch.bincount(labels, minlength=3)
            moment(trial)
        trial.report(trial.totals.mean("loss", "samples"), epoch)
        sums = [trial.totals[name] for name in ("samples", "score", "rows")]
        kept = trial.totals["by label"]  # which is not changed later
        trial.state.setdefault("seen", []).append([*map(float, sums), kept.tolist()])
        assert math.isnan(trial.totals.mean("loss", "what was never added to"))
        assert sums[0] == 41


def test_totals_are_those_of_one_device(lab: Any) -> None:
    lab.same(totals_up, [2, 3, 1])
    lab.same(totals_up, [1, 3, 2], within=(2, 8))
    lab.same(totals_up, [3, 2], kills={7: 1})


# -- what is refused ------------------------------------------------------------------------------

WRONG_TOTALS = [
    *(("x", value, r"trial.totals\['x'\]") for value in ("text", [1], 1j, np.zeros(2))),
    (3, 1, "names are strings"),
    (("correct", 3), 1, "names are strings"),
]


def adds_up_nonsense(trial: Any) -> None:
    prepared(trial)
    for reduces in (trial.sum, trial.mean):
        for value in ("low", None, 1j, 10**30):
            with pytest.raises(FleetConfigError, match=r"value\['loss'\]"):
                reduces({"loss": value})
    for weight in (-1, math.nan, math.inf, "3", [1.0, 2.0]):
        with pytest.raises(FleetConfigError, match="`weight` is"):
            trial.mean(1.0, weight=weight)
    with pytest.raises(FleetConfigError, match="0 when an epoch begins"):
        trial.totals["loss"] = 0.0
    for _ in trial.epochs(1):
        for _ in trial.batches("train", 10):
            for name, value, complaint in WRONG_TOTALS:
                with pytest.raises(FleetConfigError, match=complaint):
                    trial.totals[name] = value


@pytest.mark.parametrize("width", [1, 2])
def test_what_is_no_number_or_name_or_weight_is_refused(lab: Any, width: int) -> None:
    flown = lab.fly(adds_up_nonsense, [width])
    assert flown.error is None, flown.error
