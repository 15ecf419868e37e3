"""What began anew at a move is told of by its name; nothing else is."""

from __future__ import annotations

import copy
import gc
import math
import os
import random
import time
import weakref
from collections import Counter, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from optuna_fleet.trainer import frames
from tests.trainer import moving_trial
from tests.trainer.moving_trial import fly


@pytest.fixture(autouse=True)
def _the_trial_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    not_theirs = (*frames.NOT_THE_USERS, moving_trial.__file__)
    monkeypatch.setattr(frames, "NOT_THE_USERS", not_theirs)


def prepared(trial: Any) -> Any:
    model = nn.Linear(2, 1)
    return trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def step(model: Any, optimizer: Any) -> float:
    optimizer.zero_grad()
    loss = model(torch.ones(1, 2)).square().sum()
    loss.backward()
    optimizer.step()
    return loss.item()


# -- what is lost ---------------------------------------------------------------------------------


def has_patience(trial: Any) -> None:
    best, num_bad, why = math.inf, 0, None
    for epoch in trial.epochs():
        loss = 1.0 + epoch
        num_bad = 0 if loss < best else num_bad + 1
        best, why = min(best, loss), "waits"
    assert why


def collects(trial: Any) -> None:
    losses: list[float] = []
    history: dict[str, list[float]] = {"train": [0.0] * 5, "val": []}
    labels: set[str] = set()
    recent: deque[float] = deque([0.0] * 9, maxlen=9)
    parts: dict[str, list[float]] = defaultdict(list)
    counts = Counter("a")
    confusion = np.zeros((3, 3))
    for epoch in trial.epochs():
        losses.append(1.0)
        history["val"].append(2.0)
        labels.add(f"{epoch}")
        recent.append(1.0)
        parts["loss"] += [1.0]
        counts["a"] += 1
        confusion[1, 2] += 1


def smooths(trial: Any) -> None:
    mean, worst = np.float64(0.0), torch.tensor(0.0)
    for epoch in tqdm(trial.epochs(), disable=True):
        mean, worst = 0.9 * mean + epoch + 1, worst + 1


def loops_in_a_helper(trial: Any) -> None:
    def train(best: float) -> float:
        nonlocal num_steps
        for _ in trial.epochs():
            best, num_steps = best - 1, num_steps + 1
        return best

    num_steps = 0
    train(9.0)


class Stopper:
    def __init__(self) -> None:
        self.best, self.size = 9.0, 3

    @property
    def worst(self) -> float:
        raise AssertionError("nobody asked for this")

    def train(self, trial: Any) -> None:
        for _ in trial.epochs():
            self.best -= 1


def has_a_stopper(trial: Any) -> None:
    stopper = Stopper()
    for _ in trial.epochs():
        stopper.best -= 1


@pytest.mark.parametrize(
    ("objective", "names"),
    [
        (has_patience, "best num_bad why"),
        (collects, "losses history labels recent parts counts confusion"),
        (smooths, "mean worst"),
        (loops_in_a_helper, "best num_steps"),
        (has_a_stopper, "stopper.best"),
        (lambda trial: Stopper().train(trial), "self.best"),
    ],
)
def test_variables_that_the_loop_had_changed_are_told_of(objective: Any, names: str) -> None:
    trial = fly(objective)
    assert trial.names == set(names.split())
    assert all(text.startswith("Local variables of ") for text in trial.told)


def reports_each_epoch(trial: Any) -> float:
    loss, best = math.inf, math.inf
    for epoch in trial.epochs():
        loss = 1.0 + epoch
        best = min(best, loss)
        trial.report(loss, epoch)
    return loss + best


def test_the_value_that_was_reported_last_is_not_told_of() -> None:
    assert fly(reports_each_epoch).names == {"best"}


def test_the_user_reads_where_and_what_to_do() -> None:
    line = has_patience.__code__.co_firstlineno
    assert fly(has_patience).told == [
        f"Local variables of `has_patience` (test_began_anew.py:{line}) began anew when the trial "
        "moved: `best`, `num_bad`, `why`. If what follows depends on them, keep them in "
        "trial.state, or use trial.best_value and trial.should_stop(patience=...)."
    ]


def schedules(trial: Any) -> None:
    model, optimizer = prepared(trial)
    schedule = ExponentialLR(optimizer, 0.9)
    for _ in trial.epochs():
        step(model, optimizer)
        schedule.step()


def averages(trial: Any) -> None:
    model, optimizer = prepared(trial)
    average, callbacks = AveragedModel(model), {"other": ExponentialLR(optimizer, 0.9)}
    for _ in trial.epochs():
        step(model, optimizer)
        average.update_parameters(model)
        callbacks["other"].step()


def keeps_a_copy(trial: Any) -> None:
    model, optimizer = prepared(trial)
    teacher = copy.deepcopy(model)
    for _ in trial.epochs():
        step(model, optimizer)
    assert teacher


@pytest.mark.parametrize(
    ("objective", "names"),
    [
        (schedules, "`schedule` (ExponentialLR)"),
        (averages, "`average` (AveragedModel)"),
        (keeps_a_copy, "`teacher` (Linear)"),
    ],
)
def test_objects_that_were_not_prepared_are_told_of(objective: Any, names: str) -> None:
    told = fly(objective).told
    assert f"not given to trial.prepare() began anew when the trial moved: {names}." in told[0]
    assert "`callbacks` (dict)" in told[-1] or len(told) == 1


class Cooling(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        self.temperature, self.scale = 1.0, 3.0


def test_numbers_in_prepared_modules_are_told_of() -> None:
    def cools(trial: Any) -> None:
        model = trial.prepare(Cooling())
        for _ in trial.epochs():
            model.temperature *= 0.9

    (told,) = fly(cools).told
    assert "modules began anew when the trial moved: `temperature` (Cooling). Make them" in told


# -- within an epoch ------------------------------------------------------------------------------


def train_epoch(trial: Any, history: list[float]) -> float:
    total, number = torch.zeros(()), 0
    for batch in trial.batches():
        total += batch.sum()
        number += 1
    history.append(float(total))
    return float(total / number)


def sums(trial: Any) -> None:
    history: list[float] = []
    for _ in trial.epochs():
        train_epoch(trial, history)


def test_what_a_movable_pass_adds_up_is_told_of() -> None:
    trial = fly(sums, (2, 1))
    assert trial.names == {"history", "total", "number"}
    assert all("trial.totals" in text for text in trial.told)
    assert any("`total` (Tensor), `number`." in text for text in trial.told)
    assert "".join(trial.told).count("history") == 1


def keeps_sums(trial: Any) -> None:
    steps = trial.state.setdefault("steps", [])
    for _ in trial.epochs():
        last = trial.state.get("last", 0.0)
        started, size = time.perf_counter(), 8 // trial.world_size
        for batch in trial.batches():
            last = trial.state["last"] = last + float(batch.sum()) / size
            steps.append(time.perf_counter() - started)


def test_what_it_keeps_is_not_told_of() -> None:
    assert fly(keeps_sums, (0, 1)).told == []
    assert fly(keeps_sums, (2, 2)).told == []


# -- what is not lost -----------------------------------------------------------------------------


def reads_clocks(trial: Any) -> None:
    start, ticks, second = time.time(), time.perf_counter_ns(), time.monotonic()
    clock = Stopper()
    for _ in trial.epochs():
        elapsed = time.time() - start
        start, ticks, second = time.time(), time.perf_counter_ns(), time.monotonic()
        clock.best = time.time()
        print(elapsed, ticks, second)


def depends_on_the_run(trial: Any) -> None:
    size, mode = 8 // trial.world_size, "a" if trial.is_resumed else "w"
    options, name = {"size": size}, f"{time.time_ns()} {os.urandom(4).hex()}"
    stopper = Stopper()
    stopper.size = size
    for _ in trial.epochs():
        print(mode, options, name)


def sets_all_in_the_loop(trial: Any) -> None:
    for epoch in trial.epochs():
        total, losses = 0.0, []
        for batch in trial.batches():
            total += float(batch.sum())
            losses.append(total)
        last = losses[-1] + epoch
    print(last)


def keeps_it_in_the_state(trial: Any) -> None:
    losses = trial.state.setdefault("losses", [])
    best, bad = trial.state.get("best", math.inf), trial.state.get("bad", 0)
    stopper = Stopper()
    for epoch in trial.epochs():
        losses.append(1.0)
        bad, best = bad + 1, min(best, 1.0 / (1 + epoch))
        stopper.best -= 1
        trial.state.update(best=best, bad=bad, stopper={"best": stopper.best})


def keeps_objects_in_the_state(trial: Any) -> None:
    model, optimizer = prepared(trial)
    schedule, weights = ExponentialLR(optimizer, 0.9), {"weight": torch.zeros(1, 2)}
    for _ in trial.epochs():
        step(model, optimizer)
        schedule.step()
        weights["weight"] = model.weight.detach().clone()
        trial.state.update(schedule=schedule.state_dict(), average=weights)


class Meter:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.outputs = 0.0, list[Any]()


class Accuracy(nn.Module):
    """A metric of the kind that torchmetrics has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def reset(self) -> None:
        self.total.zero_()


def uses_all_sorts_of_objects(trial: Any) -> None:
    model, optimizer = prepared(trial)
    schedule = trial.prepare(ExponentialLR(optimizer, 0.9))
    weight, parts, everything = model.weight, nn.Sequential(model), {"all": [model, optimizer]}
    state, unused = model.state_dict(), ExponentialLR(optimizer, 1.0)
    scaler, loss = torch.amp.GradScaler("cpu", enabled=False), nn.CrossEntropyLoss()
    meter, generator, rows, accuracy = Meter(), random.Random(0), iter(range(99)), Accuracy()
    bare = torch.ones(1, requires_grad=True)
    other = torch.optim.SGD([bare], lr=0.0, momentum=0.9)  # of which `Steps` tells
    for _ in trial.epochs():
        meter.reset()
        accuracy.reset()
        accuracy.total += 1
        bare.sum().backward()
        other.step()
        meter.total += step(model, optimizer)
        schedule.step()
        print(next(rows), generator.random())
    print(weight, parts, everything, state, unused, scaler, loss)


@pytest.mark.parametrize(
    "objective",
    [
        reads_clocks,
        depends_on_the_run,
        sets_all_in_the_loop,
        keeps_it_in_the_state,
        keeps_objects_in_the_state,
        uses_all_sorts_of_objects,
    ],
)
def test_objectives_that_lose_nothing_are_told_nothing(objective: Any) -> None:
    assert fly(objective).told == []


class Trap:
    """Must not be asked for anything."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)

    def __eq__(self, other: object) -> bool:
        raise AssertionError(other)

    __hash__ = None  # type: ignore[assignment]


class Stubborn:
    def state_dict(self) -> Any:
        raise RuntimeError("my state is mine")


def test_shy_objects_do_no_harm() -> None:
    def has_shy_objects(trial: Any) -> None:
        trap, traps, stubborn, itself = Trap(), {"one": [Trap()]}, Stubborn(), list[Any]()
        itself.append(itself)
        sparse, best = torch.eye(2).to_sparse(), 0
        trial.state["sparse"] = sparse
        for _ in trial.epochs():
            best += 2
        print(best, len(traps), len(itself), sparse.shape, trap is stubborn)

    assert fly(has_shy_objects).names == {"best"}


def test_nothing_is_kept_alive() -> None:
    def objective(trial: Any) -> None:
        thing: Any = Meter()
        refers = weakref.ref(thing)
        for _ in trial.epochs():
            thing = None
            assert refers() is None

    gc.disable()
    try:
        fly(objective)
    finally:
        gc.enable()


def test_what_locals_returned_stays_as_it_is() -> None:
    def objective(trial: Any) -> None:
        rate = 0.5
        settings = locals()
        for _ in trial.epochs():
            assert settings["rate"] == rate

    fly(objective)


def test_only_rank_0_looks() -> None:
    assert fly(has_patience).left is not None
    assert fly(has_patience, rank=1).left is None
