"""Which variables of a loop over epochs are told of: those that carry something on."""

from __future__ import annotations

import gc
import math
import random
import sys
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from optuna_fleet.trainer.unsaved.carried import Variables, carried, marks_in
from optuna_fleet.trainer.unsaved.loops import looping_frame
from tqdm import tqdm

NUM_EPOCHS = 3


class Trial:
    """Has epochs, and finds what their loop carries."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.found: set[str] = set()

    def epochs(self, number: int = NUM_EPOCHS) -> Iterator[int]:
        first = None
        for epoch in range(number):
            begun = self._look(sys._getframe(1))
            first = first or begun
            yield epoch
            if epoch + 1 == number:
                return
            frame = looping_frame(sys._getframe(1))
            if frame is not None and first is not None and begun is not None:
                kept = marks_in([self.state, *self.state, *self.state.values()])
                self.found.update(carried(frame, first, begun, kept))
            del frame

    def _look(self, frame: Any) -> Variables | None:
        found = looping_frame(frame)
        return Variables.of(found) if found is not None else None


def loss_of(epoch: int) -> float:
    return random.Random(epoch).random() + 1 / (1 + epoch)


def batches() -> Iterator[tuple[float, int]]:
    yield from ((random.random(), n) for n in range(4))


# -- innocent -------------------------------------------------------------------------------------


def resets_its_totals(trial: Trial) -> float:
    total, number, parts = 0.0, 0, []
    for epoch in trial.epochs():
        total, number, parts = 0.0, 0, []
        for loss, _ in batches():
            total += loss
            number += 1
            parts.append(loss)
        print(total / number, sum(parts), epoch)
    return 0.0


def resets_them_at_the_end(trial: Trial) -> None:
    running, parts = 0.0, []
    for _ in trial.epochs():
        for loss, _ in batches():
            running += loss
            parts.append(loss)
        print(running, parts)
        running = 0.0
        parts.clear()


def clears_a_list_first(trial: Trial) -> None:
    parts: list[float] = []
    for epoch in trial.epochs():
        parts.clear()
        parts.extend(loss_of(n) for n in range(epoch + 1, 0, -1))


def returns_the_last(trial: Trial) -> float:
    accuracy = 0.0
    for epoch in trial.epochs():
        accuracy = loss_of(epoch)
        print(accuracy)
    return accuracy


def is_assigned_in_each_branch(trial: Trial) -> float:
    value = rate = 0.0
    for epoch in trial.epochs():
        if epoch:
            rate = 0.1 * epoch
            print(rate)
        else:
            rate = 0.5
        try:
            value = loss_of(epoch) * rate
        except ArithmeticError:
            continue
        finally:
            print(rate)
    return value


def takes_the_time(trial: Trial) -> None:
    start, ticks = time.time(), time.perf_counter_ns()
    for _ in tqdm(trial.epochs(), total=NUM_EPOCHS):
        print(time.time() - start, time.perf_counter_ns() - ticks)
        start, ticks = time.time(), time.perf_counter_ns()


def reads_the_last_loss_of_its_batches(trial: Trial) -> None:
    loss = step = 0.0
    for _, epoch in enumerate(trial.epochs()):
        for step, (loss, _) in enumerate(batches()):  # noqa: B007
            pass
        print(loss, step, epoch)


def loops_in_loops(trial: Trial) -> None:
    count = x = 0
    for epoch in (epoch for epoch in zip(trial.epochs(), range(9), strict=False)):
        count = 0
        while count < 5:
            count += 1
            for x in range(count):
                if x > 3:
                    break
        print(count, x, epoch)


def comprehends(trial: Trial) -> None:
    values, item = [0.0], 0.0
    for epoch in trial.epochs():
        values = [item * 2 for item in range(epoch + 1)]
        if (item := sum(values)) > 1:
            print(item)
        names = {key: item + key for key in values}
        print(names, [value for value in values if value != item])


def stops_early_within_an_epoch(trial: Trial) -> str:
    why = "done"
    for epoch in trial.epochs():
        with torch.no_grad():
            if epoch < 0:
                why = "negative"
                break
            if math.isnan(loss_of(epoch)):
                why = "nan"
                raise ValueError(why)
    return why


def keeps_it_in_the_state(trial: Trial) -> None:
    losses = trial.state.setdefault("losses", [])
    best, bad = trial.state.get("best", math.inf), 0
    copied: list[float] = []
    for epoch in trial.epochs():
        losses.append(loss_of(epoch))
        copied.append(loss_of(epoch))
        bad = 0 if losses[-1] < best else bad + 1
        best = min(best, losses[-1])
        trial.state.update(best=best, num_bad=bad, history=list(copied))


def overwrites_items(trial: Trial) -> None:
    logs: dict[str, Any] = {}
    table = [0.0] * NUM_EPOCHS
    for epoch in trial.epochs():
        logs["loss"] = loss_of(epoch)
        logs["parts"] = [loss_of(n) for n in range(epoch + 1)]
        table[epoch % 2] = loss_of(epoch)


def evaluates_last(trial: Trial) -> float:
    accuracy = 0.0
    for epoch in trial.epochs():
        if epoch == NUM_EPOCHS - 1:
            accuracy = loss_of(epoch)
    return accuracy


def moves_objects_about(trial: Trial) -> None:
    model, rows = torch.nn.Linear(1, 1), iter(range(99))
    models: list[torch.nn.Module] = []
    for _ in trial.epochs():
        model = model.train()
        models.append(torch.nn.Linear(1, next(rows) + 1))
        rows = iter(list(rows))


def asks_by_itself(trial: Trial) -> None:
    epochs, best = trial.epochs(), 0.0
    while (epoch := next(epochs, None)) is not None:
        best = max(best, loss_of(epoch))


def finds_it_in_the_attributes(trial: Any) -> None:
    best = 1.0
    for epoch in trial.epochs():
        best = min(best, loss_of(epoch))
    if best < 0:
        print(trial.user_attrs)


INNOCENT: list[Callable[[Any], Any]] = [
    resets_its_totals,
    resets_them_at_the_end,
    clears_a_list_first,
    returns_the_last,
    is_assigned_in_each_branch,
    takes_the_time,
    reads_the_last_loss_of_its_batches,
    loops_in_loops,
    comprehends,
    stops_early_within_an_epoch,
    keeps_it_in_the_state,
    overwrites_items,
    evaluates_last,
    moves_objects_about,
    asks_by_itself,
    finds_it_in_the_attributes,
]


@pytest.mark.parametrize("objective", INNOCENT)
def test_what_begins_anew_in_each_epoch_is_not_told_of(objective: Callable[[Any], Any]) -> None:
    trial = Trial()
    objective(trial)
    assert trial.found == set()


# -- guilty ---------------------------------------------------------------------------------------


def has_patience(trial: Trial) -> None:
    best, bad_epochs = math.inf, 0
    for epoch in trial.epochs():
        loss = 1.0 + epoch
        if loss < best:
            best = loss
            bad_epochs = 0
        else:
            bad_epochs += 1
        if bad_epochs > 9:
            break


def takes_the_maximum(trial: Trial) -> float:
    best = -math.inf
    for epoch in trial.epochs():
        best = max(best, loss_of(epoch))
    return best


def collects(trial: Trial) -> None:
    losses: list[float] = []
    history: dict[str, list[float]] = {"train": [], "val": []}
    by_epoch: dict[int, Any] = {}
    labels: set[int] = set()
    recent: deque[float] = deque(maxlen=100)
    parts: dict[str, list[float]] = defaultdict(list)
    counts = Counter[str]()
    for epoch in trial.epochs():
        losses.append(loss_of(epoch))
        history["val"].append(loss_of(epoch))
        by_epoch[epoch] = torch.tensor(loss_of(epoch))
        labels.add(epoch)
        recent.extend([loss_of(epoch)] * 3)
        parts["loss"] += [1.0]
        counts[f"{epoch}"] += 1


def remembers_the_best(trial: Trial) -> Any:
    best_epoch, best_weights, step = None, None, 0
    least = 9.0
    for epoch in trial.epochs():
        for _ in batches():
            step += 1
        if least > (loss := 1.0 / (1 + epoch)):
            least, best_epoch = loss, epoch
            best_weights = {"weight": torch.ones(3) * epoch}
    print(step)
    return best_epoch, best_weights


def smooths(trial: Trial) -> None:
    mean, worst, is_first = np.float64(0.0), torch.tensor(0.0), True
    for epoch in tqdm(trial.epochs()):
        mean = 0.9 * mean + 0.1 * loss_of(epoch)
        worst = torch.maximum(worst, torch.tensor(loss_of(epoch)))
        if is_first:
            is_first = False


def anneals_within_try(trial: Trial) -> None:
    rate, last = 0.1, None
    for epoch in trial.epochs():
        try:
            with torch.no_grad():
                if last is not None and last < loss_of(epoch):
                    rate *= 0.5
            rate *= 0.9
        finally:
            last = loss_of(epoch)


def loops_in_a_helper(trial: Trial) -> None:
    def train(best: float) -> float:
        for epoch in trial.epochs():
            best = min(best, loss_of(epoch))
        return best

    train(math.inf)


def counts_in_a_closure(trial: Trial) -> int:
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1

    for _ in trial.epochs():
        step()
        print(steps)
    return steps


COLLECTED = {"losses", "history", "by_epoch", "labels", "recent", "parts", "counts"}
GUILTY: list[tuple[Callable[[Any], Any], set[str]]] = [
    (has_patience, {"best", "bad_epochs"}),
    (takes_the_maximum, {"best"}),
    (collects, COLLECTED),
    (remembers_the_best, {"least", "best_epoch", "best_weights", "step"}),
    (smooths, {"mean", "worst", "is_first"}),
    (anneals_within_try, {"rate", "last"}),
    (loops_in_a_helper, {"best"}),
    (counts_in_a_closure, {"steps"}),
]


@pytest.mark.parametrize(("objective", "names"), GUILTY)
def test_what_goes_on_from_epoch_to_epoch_is_told_of(
    objective: Callable[[Any], Any], names: set[str]
) -> None:
    trial = Trial()
    objective(trial)
    assert trial.found == names


def with_far_jumps(number: int) -> Callable[[Any], Any]:
    """A loop of so many lines that its jumps need more than one byte."""
    lines = ["best, last = 1.0, 0.0", "for epoch in trial.epochs():", "    last = 0.5"]
    lines += [f"    x{n} = last * {n}" for n in range(number)]
    lines += ["    best = min(best, loss_of(epoch), last)", "return last"]
    scope: dict[str, Any] = {"loss_of": loss_of}
    exec("def objective(trial):\n" + "\n".join(f"    {line}" for line in lines), scope)
    return scope["objective"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("number", [10, 1000, 20_000])
def test_the_length_of_a_loop_does_not_matter(number: int) -> None:
    trial = Trial()
    with_far_jumps(number)(trial)
    assert trial.found == {"best"}


class Thing:
    pass


def test_nothing_is_kept_alive() -> None:
    def objective(trial: Trial) -> None:
        thing = Thing()
        refers = weakref.ref(thing)
        for _ in trial.epochs():
            thing = None  # type: ignore[assignment]
            assert refers() is None

    gc.disable()
    try:
        objective(Trial())
    finally:
        gc.enable()


def test_what_locals_returned_stays_as_it_is() -> None:
    def objective(trial: Trial) -> None:
        rate = 0.5
        settings = locals()
        for _ in trial.epochs():
            assert settings["rate"] == rate

    objective(Trial())
