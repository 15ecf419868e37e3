"""G2 for what users write: right on any devices, or on as few as it takes, and told."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.behaviour import objectives
from tests.behaviour.objectives import OBJECTIVES, ONCE_WRONG, UNLIKE
from tests.behaviour.parts import each_batch, prepared, train_on
from tests.behaviour.small import small_model, train_epoch
from tests.behaviour.words import pytestmark  # noqa: F401

EXACT = OBJECTIVES | ONCE_WRONG
# Three first, so that what went wrong there has consequences; then one stays and another joins.
WIDTHS = {
    "compiled": [(0, 1), (0,)],  # each rank compiles for itself
    "prunes_its_weights": [3, 2],  # it has but one moment between two epochs
}


@pytest.mark.parametrize("name", EXACT)
def test_the_same_on_any_devices(lab: Any, name: str) -> None:
    widths = WIDTHS.get(name, [3, 2, 1])
    rel = 0.05 if name == "autocast" else 1e-8  # bfloat16 has three digits
    flown = lab.same(EXACT[name], widths, rel=rel)
    seen = flown.trial.user_attrs["seen"]
    assert len(set(seen)) > len(seen) / 2  # it does train


@pytest.mark.parametrize(
    "objective", [objectives.changes_outputs_in_place, objectives.weighs_what_it_fetched_ahead]
)
def test_the_same_on_three_devices(lab: Any, objective: Any) -> None:
    lab.same(objective, [3])


def counts_with_a_loss_module(trial: Any) -> None:
    """And leaves out the batch size, which is the one given last."""
    model, _ = prepared(trial)
    trial.prepare(nn.CrossEntropyLoss())
    model.eval()
    with torch.no_grad():
        lengths = [len(labels) for _, labels in trial.batches("val", batch_size=9)]
    trial.set_user_attr("number", trial.sum(sum(lengths)))
    trial.set_user_attr("batches", len(trial.batches("train")))


def test_each_sample_is_evaluated_once(lab: Any) -> None:
    given = lab.same(counts_with_a_loss_module, [3]).trial.user_attrs
    assert given == {"number": 20, "batches": 5}  # the last batch is two samples


def loops_by_itself(trial: Any) -> None:
    model, optimizer = prepared(trial)
    losses: list[float] = []
    for _ in range(3):
        train_epoch(trial, model, optimizer, losses, batch_size=10)
    trial.set_user_attr("seen", losses)


def test_a_loop_of_its_own_is_told_that_its_epochs_are_all_alike(lab: Any) -> None:
    lab.same(loops_by_itself, [3], told=["is read again outside of trial.epochs()"])


def follows_its_own_loss(trial: Any) -> None:
    model, optimizer = prepared(trial)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for epoch in trial.epochs(3):
        train_epoch(trial, model, optimizer, [], batch_size=10)
        plateau.step(0.0 if trial.rank else -float(epoch))  # losses of this rank's samples


class Widest(nn.Module):
    """The largest value seen so far, as for quantised training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.largest.mul_(0.9).add_(0.1 * x.abs().max())
        return x / self.largest


@each_batch(lambda: nn.Sequential(Widest(), small_model()))
def a_buffer_follows_the_widest(trial: Any, *given: Any) -> None:
    train_on(trial, *given)


UNLIKE_SIZES = "batches of unlike sizes"
FEWER = "goes on from its last checkpoint, on one device"
TOLD: list[tuple[Any, str, list[int]]] = [
    *((objective, UNLIKE_SIZES, [1, 3]) for objective in UNLIKE.values()),
    (
        functools.partial(objectives.weighs_what_it_fetched_ahead, normalises=True),
        UNLIKE_SIZES,
        [3],
    ),
    # What is found on several devices costs no restart that counts.
    (functools.partial(objectives.fetches_three_ahead, from_epoch=2), FEWER, [1, 3]),
    (follows_its_own_loss, "ranks have come apart: SGD (1): group 0['lr']", [3]),
    (a_buffer_follows_the_widest, "", [1, 3]),
    (objectives.a_buffer_follows_the_data, "", [1, 3]),
    (objectives.a_buffer_follows_the_data, "", [1, 1, 3]),  # the last epoch is compared as well
    (objectives.remembers_each_sample, "trial.state", [2, 3]),
    (objectives.sets_gradients, "", [1, 3]),
    (functools.partial(objectives.drops_or_adds_rows, data="train_none"), "", [2, 3]),
    (functools.partial(objectives.drops_or_adds_rows, data="train_twice"), "", [2, 3]),
]


@pytest.mark.parametrize(("objective", "word", "widths"), TOLD)
def test_what_can_not_be_the_same_goes_on_on_one_device_and_is_told(
    lab: Any, objective: Any, word: str, widths: list[int]
) -> None:
    flown = lab.one_device(objective, word, widths=widths)
    assert flown.widths == [1, 3, 1] or word != FEWER


def test_sums_within_an_evaluation_are_of_all_ranks(lab: Any) -> None:
    words = "goes on from its last checkpoint, on 2 devices at most"
    flown = lab.one_device(objectives.sums_in_each_step, words, widths=[1, 4], most=2)
    assert flown.widths == [1, 4, 2]


# -- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "first", "last"),
    [
        ({"max_devices": 2}, 1, 2),
        ({"min_devices": 3}, 1, 4),
        # Not on one again and again.
        ({"min_devices": 3, "batch_size": 1, "epochs": 4}, 1, 3),
    ],
)
def test_a_trial_says_how_many_devices_it_wants(
    lab: Any, bounds: dict[str, int], first: int, last: int
) -> None:
    flown = lab.fly(functools.partial(objectives.bounded, **bounds), widths=None)
    assert (flown.widths[0], flown.widths[-1]) == (first, last)
    least, most = bounds.get("min_devices", 1), bounds.get("max_devices", 4)
    assert all(least <= width <= most for width in flown.widths[1:])


@pytest.mark.parametrize(
    ("bounds", "complaint"),
    [
        ({"min_devices": 5}, "`min_devices` is 5, but the fleet has 4: it must not be more"),
        ({"min_devices": 3, "later": {"max_devices": 2}}, "is 3, but `max_devices` is 2"),
        ({"max_devices": 0}, "`max_devices` is 0, but must be a whole number >= 1, or None"),
    ],
)
def test_bounds_that_can_not_be_met_are_refused(
    lab: Any, bounds: dict[str, Any], complaint: str
) -> None:
    lab.refused(functools.partial(objectives.bounded, **bounds), complaint, widths=None)


def test_a_trial_that_needs_fewer_devices_than_it_may_have_fails(lab: Any) -> None:
    """Else it would be begun again and again."""
    objective = functools.partial(objectives.sums_in_each_step, min_devices=3)
    lab.refused(objective, "on 2 devices at most, but its `min_devices` is 3", widths=[3])
