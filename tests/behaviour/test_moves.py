"""A trial that moves, or whose processes die, gives what it would have given undisturbed.

Between epochs, within them, and within periods of steps.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from optuna_fleet import TrialError
from tests.behaviour.harness import moment
from tests.behaviour.parts import (
    each_batch,
    note,
    note_evaluation,
    prepared,
    sgd,
    step,
    train_on,
)
from tests.behaviour.small import evaluate, num_wrong, small_model, train, train_epoch

EXACTLY: dict[str, Any] = {"rel": 0.0, "absolute": 0.0}

pytestmark = [
    pytest.mark.filterwarnings("ignore:To get the last learning rate"),
    pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step"),
]

# -- between epochs -------------------------------------------------------------------------------


def two_loops(trial: Any) -> None:
    """Two models, one after the other, each with a loop of its own."""
    for part in range(2):
        model, optimizer = prepared(trial, small_model)
        losses = trial.state.setdefault(f"losses {part}", [])
        for _ in trial.epochs(3):
            train_epoch(trial, model, optimizer, losses, batch_size=10)
    trial.set_user_attr("losses", [trial.state[f"losses {part}"] for part in range(2)])


def makes_things_late(trial: Any) -> None:
    """A scheduler, weights and a count are made anew before they are restored in the loop."""
    model, optimizer = prepared(trial)
    warmup = trial.prepare(schedulers.LinearLR(optimizer, 0.1, total_iters=3))
    nn.init.constant_(model[0].weight, 0.1)
    trial.state["steps"] = 0
    for _ in trial.epochs(4):
        for images, labels in trial.batches("train", batch_size=10):
            train_on(trial, model, optimizer, images, labels)
            trial.state["steps"] += 1
        warmup.step()
    trial.set_user_attr("steps", trial.state["steps"])


def draws(trial: Any) -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def decides_by_chance(trial: Any) -> None:
    """A layer is skipped at random; each step, and what comes after the last one, draws."""
    model, skipped = trial.prepare(small_model(), nn.BatchNorm2d(1).double())
    optimizer = trial.prepare(sgd([*model.parameters(), *skipped.parameters()]))
    for _ in trial.epochs(4):
        for images, labels in trial.batches("train", batch_size=10):
            inputs = images if torch.rand(()) < 0.5 else skipped(images)
            loss = F.cross_entropy(model(inputs), labels)
            step(optimizer, loss)
            note(trial, loss)
            trial.state["seen"] += draws(trial)
    trial.state["seen"] += draws(trial)


def a_table(trial: Any, model: nn.Linear) -> Callable[[int], Tensor]:
    table = trial.state.setdefault("table", torch.zeros(3))
    return lambda epoch: table.mul_(0.5).add_(epoch + 1)


def a_table_made_anew(trial: Any, model: nn.Linear) -> Callable[[int], Tensor]:
    """It is assigned each time that the objective begins."""
    table = trial.state["anew"] = torch.zeros(3)
    return lambda epoch: table.mul_(0.5).add_(epoch + 1)


def a_ring_in_a_list(trial: Any, model: nn.Linear) -> Callable[[int], Tensor]:
    ring = trial.state.setdefault("ring", [torch.zeros(2), torch.zeros(2, 3), torch.zeros(())])
    first, _, number = ring[:3]

    def turn(epoch: int) -> Tensor:
        first.add_(number.add_(1))
        ring.append(torch.full((1,), float(epoch)))  # it has grown when it is restored
        return torch.stack([first.sum(), ring[0].sum(), ring[-1].sum()])

    return turn


def a_view(trial: Any, model: nn.Linear) -> Callable[[int], Tensor]:
    """A part of what the state has, which other dtypes and shapes come before."""
    trial.state.setdefault("few", torch.ones(2, dtype=torch.int8))
    row = trial.state.setdefault("rows", torch.zeros(2, 3, dtype=torch.float64))[1]
    return lambda epoch: row.add_(epoch + 1)


def the_weights_at_first(trial: Any, model: nn.Linear) -> Callable[[int], Tensor]:
    """The state has the model's own memory until the loop gives it a copy."""
    trial.state["old"] = model.weight.detach()

    def compare(epoch: int) -> Tensor:
        distance = model.weight.detach() - trial.state["old"]
        trial.state["old"] = model.weight.detach().clone()
        return torch.cat([distance, model.weight.detach()])

    return compare


def python_objects(trial: Any, model: nn.Linear) -> Callable[[int], Tensor]:
    state = trial.state.setdefault("mine", {"best": None, "seen": set()})

    def change(epoch: int) -> Tensor:
        state["best"] = max(epoch / 3, state["best"] or 0.0)
        state["seen"].add((epoch, "epoch"))
        return torch.tensor([state["best"], *sorted(number for number, _ in state["seen"])])

    return change


KEEPS = (
    a_table,
    a_table_made_anew,
    a_ring_in_a_list,
    a_view,
    the_weights_at_first,
    python_objects,
)


def keeps_in_its_state(trial: Any) -> None:
    """What it got from `trial.state` before its loop is the state's own in the loop too."""
    model = trial.prepare(nn.Linear(2, 2))
    steps = {keep.__name__: keep(trial, model) for keep in KEEPS}
    for epoch in trial.epochs(5):
        with torch.no_grad():
            model.weight.add_(epoch + 0.5)
        for name, change in steps.items():
            trial.set_user_attr(f"{name} in {epoch}", change(epoch).flatten().double().tolist())


def all_of(module: Any, base: type, *besides: type) -> list[Any]:
    found = [kind for _, kind in inspect.getmembers(module, inspect.isclass)]
    return [kind for kind in found if issubclass(kind, (base, *besides)) and kind is not base]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4, 4, 6]),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.MultiStepLR(o, [2, 4])], [1]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o), schedulers.MultiStepLR(o, [2, 4])]
    ),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "SWALR": lambda o: SWALR(o, 0.05),
}
OTHERS = all_of(schedulers, schedulers.LRScheduler, schedulers.ReduceLROnPlateau)
SCHEDULERS = {kind.__name__: kind for kind in OTHERS if kind.__name__[0] != "_"} | SCHEDULERS
OPTIMIZERS = [k for k in all_of(torch.optim, torch.optim.Optimizer) if k.__name__ != "LBFGS"]


def optimizes(trial: Any, *, dtype: torch.dtype = torch.float64) -> None:
    """One model after the other, each with another optimizer."""
    for kind in OPTIMIZERS:
        is_sparse = kind.__name__ == "SparseAdam"
        body = nn.Linear(36, 3, bias=kind.__name__ != "Muon")  # which takes matrices only
        model = (nn.Embedding(41, 3, sparse=True) if is_sparse else body).to(dtype)
        model, optimizer = trial.prepare(model, kind(model.parameters(), lr=0.01))
        for _ in trial.epochs(2):
            for images, numbers in trial.batches("train_numbered", batch_size=20):
                inputs = numbers if is_sparse else images.flatten(1).to(dtype)
                loss = F.cross_entropy(model(inputs), numbers % 3)
                step(optimizer, loss)
                note(trial, loss)


def schedules(trial: Any) -> None:
    for make in SCHEDULERS.values():
        model = nn.Linear(36, 3).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer, scheduler = trial.prepare(model, optimizer, make(optimizer))
        is_led = isinstance(scheduler, schedulers.ReduceLROnPlateau)
        for _ in trial.epochs(2):
            for images, labels in trial.batches("train", batch_size=14):
                loss = train_on(
                    trial, nn.Sequential(nn.Flatten(), model), optimizer, images, labels
                )
                scheduler.step(*([loss] if is_led else []))
                trial.state["seen"].append(optimizer.param_groups[0]["lr"])


ONE_BY_ONE = [
    (train, [(3,)]),
    (train, [1] * 6),
    (two_loops, [1] * 5),
    (makes_things_late, [1, 1, 1]),
    (decides_by_chance, [1, 1, 1]),
    (keeps_in_its_state, [(0,), (1,), (1,), (0,), (1,)]),
    (schedules, [1] * (1 + len(SCHEDULERS))),
    # torch gives each floating point number of a state that it loads the type of the parameter:
    # NAdam has one of float32.
    (functools.partial(optimizes, dtype=torch.float32), [1] * (1 + len(OPTIMIZERS))),
]


@pytest.mark.parametrize(("objective", "widths"), ONE_BY_ONE)
def test_one_device_after_the_other_gives_the_same_bits(
    lab: Any, objective: Any, widths: Any
) -> None:
    lab.same(objective, widths, **EXACTLY)


def test_moved_from_three_to_three_it_gives_the_same_bits(lab: Any) -> None:
    lab.same(train, [(0, 1, 2), (1, 2, 3), (3, 1, 0)], against=(0, 1, 2), **EXACTLY)


# Batch 10: shards of 5+5, 4+3+3; the last batch is 1+1, 1+1+0.
@pytest.mark.parametrize(
    ("objective", "widths"),
    [
        (train, [4]),
        (train, [1, 2, 3, 3, 1]),
        (two_loops, [1, 3, 2, 3, 1]),
        (makes_things_late, [1, 3, 2]),
        (decides_by_chance, [3, 1, 2]),
        (optimizes, [1 + i % 2 for i in range(1 + len(OPTIMIZERS))]),
    ],
)
def test_the_same_losses_on_any_devices(lab: Any, objective: Any, widths: Any) -> None:
    lab.same(objective, widths)


# -- deaths ---------------------------------------------------------------------------------------


def trains_and_may_die(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for epoch in trial.epochs(4):
        for images, labels in trial.batches("train", batch_size=10):  # five of them
            loss = train_on(trial, model, optimizer, images, labels)
            trial.totals["loss"] += loss * trial.shard_size
            moment(trial)
        note_evaluation(trial, model)
        trial.report(trial.totals["loss"], epoch)


@pytest.mark.parametrize(
    ("widths", "kills"),
    [
        ([1, 1], {2: 0, 7: 0, 17: 0}),  # at first there is no checkpoint yet
        ([3, 2, 1], {1: 0, 9: 1, 14: 0}),
    ],
)
def test_what_died_goes_on_from_the_last_checkpoint(lab: Any, widths: Any, kills: Any) -> None:
    lab.same(trains_and_may_die, widths, kills=kills)


def opens_its_log_once(trial: Any) -> None:
    """The log is somewhere else: it knows how often it was opened, and goes on if it was."""
    if not trial.is_resumed:
        trial.set_user_attr("opened", trial.user_attrs.get("opened", 0) + 1)
    model, optimizer = prepared(trial)
    for _ in trial.epochs(3):
        for images, labels in trial.batches("train", batch_size=10, movable=True):
            train_on(trial, model, optimizer, images, labels)
            moment(trial)


@pytest.mark.parametrize(
    "disturbed", [{}, {"widths": [1, 3, 3], "within": {2, 8}}, {"widths": [1, 1], "kills": {7: 0}}]
)
def test_a_trial_that_goes_on_knows_it(lab: Any, disturbed: Any) -> None:
    assert lab.same(opens_its_log_once, **disturbed).trial.user_attrs["opened"] == 1


# -- within epochs --------------------------------------------------------------------------------

SIZE, BATCH, EPOCHS = 41, 4, 5
STEPS = -(-SIZE // BATCH)


def samples(trial: Any, numbers: Tensor) -> list[int]:
    """Those that the trial's ranks have now."""
    counts = torch.bincount(numbers, minlength=SIZE) * bool(trial.shard_size)
    return list(trial.sum(counts).nonzero().flatten().tolist())


def trains(trial: Any) -> None:
    """Notes samples, losses, random numbers and totals."""
    model, optimizer = prepared(trial)
    seen = trial.state.setdefault("seen", [])
    for epoch in trial.epochs(EPOCHS):
        optimizer.param_groups[0]["lr"] *= 0.9  # done again where the trial goes on
        model.train()
        for images, numbers in trial.batches("train_numbered", batch_size=BATCH, movable=True):
            loss = F.cross_entropy(model(images), numbers % 3)
            step(optimizer, loss)
            trial.totals["loss"] += loss * trial.shard_size
            trial.totals["samples"] += trial.shard_size
            trial.totals["by label"] += torch.bincount(numbers % 3, minlength=3)
            seen.append(
                {
                    "samples": samples(trial, numbers),
                    "loss": trial.mean(loss.item(), weight=trial.shard_size),
                    "draws": draws(trial),
                }
            )
            moment(trial)
        seen.append([trial.totals["samples"], *trial.totals["by label"].tolist()])
        trial.report(trial.totals.mean("loss", "samples"), 2 * epoch)
        trial.report(evaluate(trial, model, num_wrong) / 20, 2 * epoch + 1)
    trial.set_user_attr("model", {k: v.tolist() for k, v in model.state_dict().items()})


def keeps_all(trial: Any) -> None:
    model, optimizer = prepared(trial)
    schedule = trial.prepare(schedulers.ExponentialLR(optimizer, 0.9))
    best, num_devices = trial.state.get("best", math.inf), trial.world_size
    for _ in trial.epochs(4):
        for images, labels in trial.batches("train", batch_size=10, movable=True):
            loss = train_on(trial, model, optimizer, images, labels)
            trial.totals["loss"] += loss * trial.shard_size
            best = trial.state["best"] = min(best, loss)
            moment(trial)
        trial.state["seen"].append(trial.totals["loss"])
        schedule.step()
    assert num_devices == trial.world_size


@pytest.mark.parametrize("within", [(), (2, 8)])
def test_schedules_and_variables_that_are_kept_move_along(lab: Any, within: Any) -> None:
    lab.same(keeps_all, [1, 2, 3], within=within)


def test_each_sample_is_trained_on_once_an_epoch(lab: Any) -> None:
    seen = lab.undisturbed(trains).trial.user_attrs["seen"]
    steps = [step["samples"] for step in seen if isinstance(step, dict)]
    assert len(steps) == EPOCHS * STEPS
    assert sorted(itertools.chain(*steps[:STEPS])) == list(range(SIZE))


@pytest.mark.parametrize(
    "devices", [[(0,), (1,), (2,), (3,), (0,)], [(0, 1, 2), (1, 2, 3)] * 2 + [(0, 1, 2)]]
)
def test_on_equally_many_devices_it_goes_on_bit_for_bit(lab: Any, devices: Any) -> None:
    lab.same(trains, devices, within={3, 4, 15, 30}, against=devices[0], **EXACTLY)


@pytest.mark.parametrize("waits", [True, False], ids=["at that step", "at any step"])
def test_moves_by_chance_change_nothing(lab: Any, waits: bool) -> None:
    chance = random.Random(1)
    within = set(chance.sample(range(EPOCHS * STEPS - 1), 5))
    widths = [tuple(chance.sample(range(4), chance.randint(1, 4))) for _ in range(6)]
    lab.same(trains, widths, within=within, waits=waits)


@pytest.mark.parametrize(
    ("devices", "moved_at", "kills"),
    [([1, 1], 3, {5: 0}), ([(0, 1), (2, 3)], 7, {40: 1})],
)
def test_a_trial_killed_within_an_epoch_goes_on_from_where_it_moved_to(
    lab: Any, devices: Any, moved_at: int, kills: Any
) -> None:
    lab.same(trains, devices, within={moved_at}, kills=kills, against=devices[0], **EXACTLY)


def begins_busily(trial: Any) -> None:
    """What an objective may do before its loop, and before its batches."""
    assert trial.suggest_categorical("kind", ["a"]) == "a"
    trial.set_user_attr("begun", True)
    assert trial.sum(1) == trial.world_size
    model, optimizer = prepared(trial)
    assert sum(1 for _ in trial.batches("val", batch_size=8)) == 3
    for epoch in trial.epochs(2):
        assert not trial.should_prune()
        for images, numbers in trial.batches("train_numbered", batch_size=BATCH, movable=True):
            loss = train_on(trial, model, optimizer, images, numbers % 3)
            trial.totals["loss"] += loss * trial.shard_size
            trial.totals["samples"] += trial.shard_size
            moment(trial)
        trial.report(trial.totals.mean("loss", "samples"), epoch)


def test_what_an_objective_does_at_its_beginning_it_does_again(lab: Any) -> None:
    lab.same(begins_busily, [(0,), (0, 2), (1, 2, 3)], within={3, STEPS + 4})


# -- what is not left in its midst ----------------------------------------------------------------


def reads(trial: Any, *, data: str = "train_numbered", movable: bool = True) -> Iterator[Any]:
    return iter(trial.batches(data, batch_size=BATCH, movable=movable))


def reads_ahead(trial: Any) -> Iterator[Any]:
    """Each batch is fetched before the one before it is used."""
    fetched = reads(trial, data="train")
    batch = next(fetched)
    for following in fetched:
        yield batch
        batch = following
    yield batch


def evaluates_first(trial: Any) -> Iterator[Any]:
    for _ in trial.batches("val", batch_size=8):
        pass
    return reads(trial)


def reads_two(trial: Any) -> Iterator[Any]:
    return (pair[0] for pair in zip(reads(trial), reads(trial), strict=True))


def notes_where_it_began(read: Any, *others: Any) -> Any:
    """With how many steps each run has begun."""

    def objective(trial: Any) -> float:
        model, optimizer = prepared(trial)
        for other in others:
            trial.prepare(other())
        steps = trial.state.setdefault("steps", [])
        begun = len(steps)
        for _ in trial.epochs(3):
            for images, numbers in read(trial):
                step(optimizer, F.cross_entropy(model(images), numbers % 3))
                steps.append(begun)
                moment(trial)
        trial.set_user_attr("begun", sorted(set(steps)))
        return float(len(steps))

    return objective


@pytest.mark.parametrize(
    "read", [reads_ahead, evaluates_first, reads_two, functools.partial(reads, movable=False)]
)
def test_a_pass_that_can_not_go_on_elsewhere_is_read_to_its_end(lab: Any, read: Any) -> None:
    flown = lab.fly(notes_where_it_began(read), [(1, 2), (1, 2)], within={STEPS + 1})
    assert flown.endings == ["yielded", "returned"]
    assert flown.trial.user_attrs["begun"] == [0, 2 * STEPS]
    assert flown.trial.value == 3 * STEPS


class Stubborn:
    """Has a state that nobody can save."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("my state is mine")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nobody can have saved it")


def test_a_trial_that_can_not_be_checkpointed_goes_on_where_it_is(lab: Any) -> None:
    objective = notes_where_it_began(reads, Stubborn)
    flown = lab.fly(objective, [(1, 2), (1, 2)], within={STEPS + 1})
    assert flown.endings == ["returned"]
    assert flown.trial.value == 3 * STEPS


@each_batch(data="train", movable=True)
def fails_on_one_rank(trial: Any, model: Any, optimizer: Any, images: Any, labels: Any) -> None:
    train_on(trial, model, optimizer, images, labels)
    moment(trial)
    if trial.rank == 1:
        raise TrialError("planted")


def test_a_rank_that_fails_while_the_others_stop_is_the_cause(lab: Any) -> None:
    flown = lab.fly(fails_on_one_rank, [3, 3], within={0})
    assert "planted" in str(flown.error)
    assert flown.endings == ["raised"]


# -- trials that count steps ----------------------------------------------------------------------

NUM_STEPS, EVERY = 20, 4  # of eights, 6 an epoch: periods over an epoch's end, and up to one


def counts_steps(loop: Any, *, drop_last: bool = False, movable: bool = False) -> Any:
    """Notes the loss and the samples of each step."""

    def objective(trial: Any) -> None:
        model, optimizer = prepared(trial)
        steps = trial.state.setdefault("steps", [])
        lengths = trial.state.setdefault("lengths", [])
        for period in loop(trial):
            model.train()
            batches = trial.batches("train_numbered", 8, drop_last=drop_last, movable=movable)
            for images, numbers in batches:
                loss = train_on(trial, model, optimizer, images, numbers % 3)
                steps.append([loss, samples(trial, numbers)])
                moment(trial)
            lengths.append(len(batches))
            trial.report(evaluate(trial, model, num_wrong) / 20, period)
        trial.set_user_attr("steps", steps)
        trial.set_user_attr("lengths", lengths)

    return objective


def in_periods(trial: Any) -> Any:
    return trial.steps(NUM_STEPS, every=EVERY)


def in_epochs(trial: Any) -> Any:
    return trial.epochs(4)


ALONG, MOVABLE = counts_steps(in_periods), counts_steps(in_periods, movable=True)


@pytest.mark.parametrize("drop_last", [False, True])
def test_periods_cut_the_epochs_that_other_trials_have(lab: Any, drop_last: bool) -> None:
    by_steps, by_epochs = (
        lab.undisturbed(counts_steps(loop, drop_last=drop_last)).trial.user_attrs
        for loop in (in_periods, in_epochs)
    )
    assert by_steps["steps"] == by_epochs["steps"][:NUM_STEPS]
    assert by_steps["lengths"] == [EVERY] * 5
    per_epoch, size = (5, 40) if drop_last else (6, SIZE)
    first = list(itertools.chain(*(seen for _, seen in by_steps["steps"][:per_epoch])))
    assert len(set(first)) == len(first) == size


@pytest.mark.parametrize(
    ("objective", "disturbed"),
    [
        (ALONG, {"widths": [2, 2, 1]}),
        (ALONG, {"widths": [1, 3, 3, 2]}),
        # In the midst of an epoch, at its end, and after it.
        (MOVABLE, {"widths": [1, 2, (1, 2), 1], "within": (1, 4, 9)}),
        (ALONG, {"widths": [1, 2], "kills": {2: 0, 10: 1}}),
    ],
)
def test_periods_are_the_same_wherever_they_are_trained(
    lab: Any, objective: Any, disturbed: Any
) -> None:
    lab.same(objective, **disturbed)


def counts(trial: Any) -> None:
    """How many batches there are, where."""
    prepared(trial)
    before = len(trial.batches("train", 8))
    for _ in trial.steps(10, every=8):
        read = [len(list(trial.batches(name))) for name in ("train", "val")]
        trial.set_user_attr(str(len(trial.user_attrs)), [len(trial.batches("train")), *read])
    for _ in trial.steps(10, every=4):
        break
    trial.set_user_attr("around", [before, len(trial.batches("train"))])


def test_how_many_batches_there_are(lab: Any) -> None:
    given = lab.undisturbed(counts).trial.user_attrs
    assert given == {"0": [8, 8, 3], "1": [2, 2, 3], "around": [6, 6]}


def test_what_is_no_number_of_steps(lab: Any) -> None:
    lab.refused(lambda trial: trial.steps(10, every=2.5), "whole number >= 1", widths=[1])
