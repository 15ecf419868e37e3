"""Objectives that are not the same on several devices, or not after a move; and some that once
were not, and are now.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

from tests.behaviour import losses, objectives
from tests.preflight.table import (
    ANY,
    BATCH,
    EPOCHS,
    ONE,
    STAYS,
    UNCHECKED,
    UNREPEATABLE,
    Case,
    Table,
    mean_of_classes,
    network,
    prepared,
    scorer,
    sgd,
    step,
    train,
    trains,
    validation_loss,
)

WRONG = Table()

# -- a loss that is no mean over the samples ------------------------------------------------------

for _loss_of, _data in losses.COUPLED.items():
    WRONG[_loss_of.__name__] = Case(
        functools.partial(losses.trains_linearly, loss_of=_loss_of, data=_data), ONE, ["gradient"]
    )


@WRONG.loss(ONE, "scorer")
def hardest_half_of_the_batch(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    each = F.cross_entropy(model(x), y, reduction="none")
    return each.topk(max(1, len(each) // 2)).values.mean()


@WRONG.loss(ONE, "scorer")
def mixup_by_flip(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    outputs = model(0.7 * x + 0.3 * x.flip(0))
    return 0.7 * F.cross_entropy(outputs, y) + 0.3 * F.cross_entropy(outputs, y.flip(0))


@WRONG.loss(ONE, "scorer")
def adapted_by_a_step(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    """MAML."""
    own = dict(model.named_parameters())
    loss = F.cross_entropy(model(x), y)
    slopes = torch.autograd.grad(loss, [*own.values()], create_graph=True)
    fast = {name: p - 0.5 * slope for (name, p), slope in zip(own.items(), slopes, strict=True)}
    return F.cross_entropy(torch.func.functional_call(model, fast, (x.flip(1),)), y)


@WRONG.loss(ONE, "gradient", make=network)
def norm_of_the_mean_gradient(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    x.requires_grad_(True)
    loss = F.cross_entropy(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.norm()


@WRONG.loss(ONE, "scorer")
def weighed_by_its_own_loss(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    return loss / (loss.detach() + 0.1)


CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 0.5])


@WRONG.loss(ONE, "scorer")
def weights_in_autocast(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(x)
    return F.cross_entropy(outputs.float(), y, weight=CLASS_WEIGHTS)


# -- losses by epoch, by branch, by layer ---------------------------------------------------------


@WRONG.case(ONE, "gradient", "in step 1 of mini-epoch 2")
def class_weights_from_the_middle_on(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    for epoch in trial.epochs(EPOCHS):
        weights = CLASS_WEIGHTS if epoch >= 4 else None
        for x, y, _ in trial.batches("train_table", BATCH):
            step(optimizer, F.cross_entropy(model(x), y, weight=weights))


class NormByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 0.1).sqrt()


_normalises = trains(mean_of_classes, lambda: network(NormByHand()), drop_last=True)
WRONG.add("layer: NormByHand", _normalises, ONE, "gradient")


WRONG.add("collates_without_some", trains(mean_of_classes, data="train_none"), ONE)

# -- gradients that are not those of a backward ---------------------------------------------------


@WRONG.case(ONE, "scorer")
def gradients_clamped_in_a_hook(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-0.05, 0.05))
    for _ in trial.epochs(EPOCHS):
        train(trial, model, optimizer)


@WRONG.case(ONE, "scorer")
def steps_by_gradients_of_its_own(trial: Any) -> None:
    model = trial.prepare(scorer())
    parameters = list(model.parameters())
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            grads = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
            with torch.no_grad():
                for p, grad in zip(parameters, grads, strict=True):
                    p.sub_(grad, alpha=0.1)


# -- left over from a script for several devices --------------------------------------------------


@WRONG.case(ONE, "scorer")
def shards_once_more(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    mine = slice(trial.rank, None, trial.world_size)
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            step(optimizer, F.cross_entropy(model(x[mine]), y[mine]))


@WRONG.case(ONE, "learning rate")
def schedules_on_the_first_rank_only(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    schedule = trial.prepare(lr_scheduler.ExponentialLR(optimizer, 0.5))
    for _ in trial.epochs(EPOCHS):
        train(trial, model, optimizer)
        if trial.rank == 0:
            schedule.step()


# -- kept from batch to batch by each rank for itself ---------------------------------------------


class Queue(nn.Module):
    """Two layers, with a buffer between them that follows the data: as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.scorer = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("last", F.normalize(torch.randn(16, 6), dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        keys, last = F.normalize(hidden, dim=1), self.last.clone()
        with torch.no_grad():
            self.last.copy_(torch.cat([keys, last])[: len(last)])
        return self.scorer(hidden + keys @ last.T @ last)


# It is used before it changes.
WRONG.add("buffer: Queue", trains(mean_of_classes, Queue), ONE, "kept from batch to batch")


@WRONG.case(ONE, "log_vars")
def weights_of_tasks_are_not_prepared(trial: Any) -> None:
    """By uncertainty; each rank has its own, and a move begins them anew."""
    model, optimizer = prepared(trial, scorer())
    log_vars = nn.Parameter(torch.zeros(2))
    others = torch.optim.SGD([log_vars], lr=0.3)
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            outputs = model(x)
            tasks = torch.stack([F.cross_entropy(outputs, y), outputs.square().mean()])
            others.zero_grad()
            step(optimizer, (tasks * torch.exp(-log_vars) + log_vars).sum())
            others.step()


@WRONG.case(ONE, "cache")
def teacher_outputs_are_cached(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    cache: dict[int, Tensor] = {}
    for _ in trial.epochs(EPOCHS):
        for x, y, number in trial.batches("train_table", BATCH):
            outputs = model(x)
            for n, row in zip(number.tolist(), outputs.detach(), strict=True):
                cache.setdefault(n, row.clone())
            taught = torch.stack([cache[n] for n in number.tolist()])
            step(optimizer, F.cross_entropy(outputs, y) + (outputs - taught).square().mean())


# -- values that are reported ---------------------------------------------------------------------


@WRONG.case(ONE, "reported value", "trial.shard_size")
def reports_the_mean_of_means_of_batches(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    for epoch in trial.epochs(EPOCHS):
        train(trial, model, optimizer)
        with torch.no_grad():
            batches = trial.batches("val_table", 7)
            means = [F.cross_entropy(model(x), y).item() for x, y, _ in batches]
        trial.report(trial.mean(sum(means) / len(means)), epoch)


# -- what a move begins anew: objects -------------------------------------------------------------


@WRONG.case(STAYS, "chosen")
def draws_between_folds(trial: Any) -> None:
    """What the next fold trains on is drawn after dropout; after a move nothing was dropped."""
    for fold in ("train_table", "val_table"):
        chosen = torch.rand(6)
        model, optimizer = prepared(trial, network(nn.Dropout(0.5)))
        for _ in trial.epochs(3):
            for x, y, _ in trial.batches(fold, BATCH):
                step(optimizer, F.cross_entropy(model(chosen * x), y))


@WRONG.case(STAYS, "average")
def averaged_model_is_not_prepared(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    average = swa_utils.AveragedModel(model)
    for epoch in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            step(optimizer, F.cross_entropy(model(x), y))
            average.update_parameters(model)
        trial.report(validation_loss(trial, average), epoch)


@WRONG.case(STAYS, "scaler")
def grad_scaler_is_not_prepared(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()


class Forgetful:
    """Its state is only half of what it is."""

    def __init__(self) -> None:
        self.both = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"both": self.both.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.both[0] = state["both"][0]


@WRONG.case(STAYS, "counts['both']")
def loads_half_of_its_state(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    counts = trial.prepare(Forgetful())
    for _ in trial.epochs(EPOCHS):
        train(trial, model, optimizer)
        counts.both += 1


@WRONG.case(STAYS, "optimizer")
def optimizer_is_not_prepared(trial: Any) -> None:
    model = trial.prepare(scorer())
    optimizer = sgd(model, momentum=0.9)
    for _ in trial.epochs(EPOCHS):
        train(trial, model, optimizer)


# -- what a move begins anew: what modules have ---------------------------------------------------


class Remembers(nn.Module):
    """Adds what it keeps of its calls, alike on all ranks, to its outputs."""

    def __init__(self, kept: Any, use: Callable[[Any], Any]) -> None:
        super().__init__()
        self.scorer = nn.Linear(6, 3)
        self.past = kept
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        value = self.use(self)
        return self.scorer(x) * torch.as_tensor(value).to(x)


def _as_tensor(model: Any) -> Any:
    model.past = 0.9 * model.past + 0.1 * model.scorer.bias.detach().abs()
    return model.past


def _in_a_deque(model: Any) -> Any:
    model.past.append(float(len(model.past) + 1))
    return sum(model.past) / len(model.past)


def _in_an_object(model: Any) -> Any:
    model.past.level += 0.1
    return model.past.level


class Inner:
    level = 1.0


ATTRIBUTES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda: torch.ones(3), _as_tensor),
    "deque": (lambda: deque([1.0], maxlen=50), _in_a_deque),
    "object": (Inner, _in_an_object),
}
for _name, (_start, _use) in ATTRIBUTES.items():

    def _make(start: Any = _start, use: Any = _use) -> nn.Module:
        return Remembers(start(), use)

    WRONG.add(f"attribute: {_name}", trains(mean_of_classes, _make), STAYS, "past", "buffers")


# -- what a move begins anew: variables -----------------------------------------------------------


@WRONG.case(STAYS, "size")
def grows_its_batches_by_a_variable(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    size = 4
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", size):
            step(optimizer, F.cross_entropy(model(x), y))
        size += 2


@WRONG.case(STAYS, "learning rate")
def takes_rates_from_an_iterator(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    rates = itertools.cycle([0.1, 0.05, 0.02, 0.01])
    for _ in trial.epochs(EPOCHS):
        optimizer.param_groups[0]["lr"] = next(rates)
        train(trial, model, optimizer)


class Trainer:
    """A class of the user's around the loop."""

    def __init__(self, trial: Any) -> None:
        self.trial, self.num_updates = trial, 0
        self.model, self.optimizer = prepared(trial, scorer())

    def update(self, x: Tensor, y: Tensor) -> None:
        self.num_updates += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / self.num_updates
        step(self.optimizer, F.cross_entropy(self.model(x), y))

    def fit(self) -> None:
        for _ in self.trial.epochs(EPOCHS):
            for x, y, _ in self.trial.batches("train_table", BATCH):
                self.update(x, y)


@WRONG.case(STAYS, "num_updates")
def counts_in_a_trainer(trial: Any) -> None:
    Trainer(trial).fit()


_CALLS = [0]


@WRONG.case(STAYS, "_CALLS")
def counts_in_a_global(trial: Any) -> None:
    """A process that has had the trial before would go on counting: it must not be the same."""
    model, optimizer = prepared(trial, scorer())
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            _CALLS[0] += 1
            optimizer.param_groups[0]["lr"] = 0.1 / _CALLS[0]
            step(optimizer, F.cross_entropy(model(x), y))


@WRONG.case(STAYS)
def generator_of_its_own(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    generator = torch.Generator().manual_seed(0)
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            noise = torch.rand((), generator=generator).to(x)
            step(optimizer, F.cross_entropy(model(x * (1 + noise)), y))


@WRONG.case(STAYS, "`total`", "trial.totals")
def sum_in_a_movable_pass(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    for epoch in trial.epochs(EPOCHS):
        total = 0.0
        for x, y, _ in trial.batches("train_table", BATCH, movable=True):
            loss = F.cross_entropy(model(x), y)
            step(optimizer, loss)
            total += loss.item() * trial.shard_size
        trial.report(trial.sum(total), epoch)


@WRONG.case(STAYS, "count")
def count_in_blocks_of_steps(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    count = 0
    for _ in trial.steps(30, every=5):
        for x, y, _ in trial.batches("train_table", BATCH):
            count += 1
            optimizer.param_groups[0]["lr"] = 0.1 / count
            step(optimizer, F.cross_entropy(model(x), y))


def collects(make: Callable[[], Any], add: Callable[[Any, int], Any]) -> Any:
    """Nothing follows from what is `kept`, as far as can be seen."""

    def objective(trial: Any) -> None:
        model, optimizer = prepared(trial, scorer())
        kept = make()
        for epoch in trial.epochs(EPOCHS):
            train(trial, model, optimizer)
            kept = add(kept, epoch) or kept
        assert kept is not None

    return objective


def _count(kept: Any, _: int) -> None:
    kept["a"] += 1


COLLECTS: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any]]] = {
    "list in a dict": (lambda: {"val": [0.0]}, lambda kept, k: kept["val"].append(1.0 + k)),
    "set": (set, lambda kept, epoch: kept.add(f"{epoch}")),
    "full deque": (lambda: deque([0.0] * 9, maxlen=9), lambda kept, k: kept.append(1.0 + k)),
    "Counter": (lambda: Counter("a"), _count),
    "tensor": (lambda: torch.tensor(0.0), lambda kept, _: kept + 1),
}
for _name, (_start, _add) in COLLECTS.items():
    WRONG.add(f"collects: {_name}", collects(_start, _add), STAYS, "kept")


@WRONG.case(STAYS, "best")
def loops_in_a_helper(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())

    def fits() -> None:
        nonlocal best
        for _ in trial.epochs(EPOCHS):
            train(trial, model, optimizer)
            best -= 1

    best = 9.0
    fits()


@WRONG.case(STAYS, "total")
def sum_of_a_helper_in_a_movable_pass(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())

    def train_epoch() -> float:
        total, number = torch.zeros(()), 0
        for x, y, _ in trial.batches("train_table", BATCH, movable=True):
            loss = F.cross_entropy(model(x), y)
            step(optimizer, loss)
            total, number = total + trial.mean(loss.item(), weight=trial.shard_size), number + 1
        return float(total / number)

    for epoch in trial.epochs(EPOCHS):
        trial.report(train_epoch(), epoch)


@WRONG.case(STAYS, "best")
def best_of_a_second_loop(trial: Any) -> float:
    model, optimizer = prepared(trial, scorer())
    for _ in trial.epochs(EPOCHS):
        for x, _, _ in trial.batches("train_table", BATCH):
            step(optimizer, model(x).square().mean())
    best = math.inf
    for _ in trial.epochs(EPOCHS):
        train(trial, model, optimizer)
        best = min(best, validation_loss(trial, model))
    return best


# -- what docs/objective.md has a remedy for ------------------------------------------------------


@WRONG.remedy(
    ONE, "the gradient `model.scorer.weight` differs", "in step 1 of mini-epoch 1", "class w"
)
def weighs_classes(trial: Any, *, mended: bool) -> None:
    """By what is of float32, whatever all else is cast to."""
    model, optimizer = prepared(trial, scorer())
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            loss = F.cross_entropy(model(x), y, weight=CLASS_WEIGHTS)
            step(optimizer, trial.weighted(loss, CLASS_WEIGHTS[y].sum()) if mended else loss)


@WRONG.remedy(ONE, "in step 2 of mini-epoch 1")
def centres_outputs(trial: Any, *, mended: bool) -> None:
    model, optimizer = prepared(trial, scorer())
    trial.state.setdefault("center", torch.zeros(3))
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            outputs = model(x)
            step(optimizer, F.cross_entropy(outputs - trial.state["center"], y))
            center = outputs.detach().mean(0)
            center = trial.mean(center, weight=trial.shard_size) if mended else center
            trial.state["center"] = (trial.state["center"] + center) / 2


@WRONG.remedy(ONE, "the state of the object `scheduler['best']` differs")
def schedules_by_loss(trial: Any, *, mended: bool) -> None:
    model = scorer()
    optimizer = sgd(model)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    trial.prepare(model, optimizer, scheduler)
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            loss = F.cross_entropy(model(x), y)
            step(optimizer, loss)
            value = loss.item()
            scheduler.step(trial.mean(value, weight=trial.shard_size) if mended else value)


@WRONG.remedy(ONE, "ranks have come apart: trial.state['counts'] differ")
def counts_classes(trial: Any, *, mended: bool) -> None:
    model, optimizer = prepared(trial, scorer())
    trial.state.setdefault("counts", torch.zeros(3))
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            step(optimizer, F.cross_entropy(model(x), y))
            counts = torch.bincount(y[: trial.shard_size], minlength=3)
            trial.state["counts"] += trial.sum(counts) if mended else counts


@WRONG.remedy(ONE, "the reported value `of step 0` differs")
def reports_accuracy(trial: Any, *, mended: bool) -> None:
    model, optimizer = prepared(trial, scorer())
    for epoch in trial.epochs(EPOCHS):
        train(trial, model, optimizer)
        correct = total = 0
        for x, y, _ in trial.batches("val_table", BATCH):
            correct += int((model(x).argmax(1) == y).sum())
            total += len(y)
        mean = trial.mean(correct / max(1, total))
        trial.report(trial.sum(correct) / trial.sum(total) if mended else mean, epoch)


@WRONG.remedy(ONE, "it fails: TrialError: Gradients of one step come, or may come,")
def fetches_ahead(trial: Any, *, mended: bool) -> None:
    model, optimizer = prepared(trial, scorer())
    for _ in trial.epochs(EPOCHS):
        earlier: list[tuple[Tensor, Tensor, int]] = []
        for x, y, _ in trial.batches("train_table", BATCH):
            earlier.append((x, y, trial.shard_size))
            if len(earlier) == 2:
                x, y, size = earlier.pop(0)
                loss = F.cross_entropy(model(x), y)
                weighted = trial.weighted(loss, size, fetched_ahead=True) if mended else loss
                step(optimizer, weighted)


@WRONG.remedy(STAYS, "not moved: `best` would begin anew", "trial.best_value")
def best_in_a_variable(trial: Any, *, mended: bool) -> float:
    model, optimizer = prepared(trial, scorer())
    best = math.inf
    for epoch in trial.epochs(EPOCHS):
        train(trial, model, optimizer)
        loss = validation_loss(trial, model)
        trial.report(loss, epoch)
        best = math.inf if mended else min(best, loss)
    return trial.best_value if mended else best


@WRONG.remedy(STAYS, "not moved: `scheduler.last_epoch`")
def schedules(trial: Any, *, mended: bool) -> None:
    model = scorer()
    optimizer = sgd(model)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    trial.prepare(model, optimizer, *([scheduler] if mended else []))
    for _ in trial.epochs(EPOCHS):
        train(trial, model, optimizer)
        scheduler.step()


class Centred(nn.Module):
    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        self.inner = scorer()
        self.center: Tensor
        if is_buffer:
            self.register_buffer("center", torch.zeros(3))
        else:
            self.center = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) - self.center  # type: ignore[no-any-return]


@WRONG.remedy(STAYS, "not moved: `model.center`")
def has_attribute(trial: Any, *, mended: bool) -> None:
    model, optimizer = prepared(trial, Centred(is_buffer=mended))
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            outputs = model(x)
            step(optimizer, F.cross_entropy(outputs, y))
            model.center = trial.mean(outputs.detach().mean(0), weight=trial.shard_size)


@WRONG.remedy(ONE, "prev_loss")
def searches_along_a_line(trial: Any, *, mended: bool) -> None:
    """One closure for a batch; few short steps, or rounding would grow."""
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    model, optimizer = trial.prepare(model, optimizer)
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return trial.mean(loss, weight=trial.shard_size) if mended else loss

            optimizer.step(closure)


# -- not repeatable, and not to be checked --------------------------------------------------------


@WRONG.case(UNREPEATABLE)
def is_seeded_by_the_clock(trial: Any) -> None:
    torch.manual_seed(time.time_ns() % 2**32)
    model, optimizer = prepared(trial, scorer())
    for _ in trial.epochs(EPOCHS):
        train(trial, model, optimizer)


@WRONG.case(ONE, "it fails", "SIGABRT")
def aborts(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    for _ in trial.epochs(EPOCHS):
        if trial.rank == 1:
            os.kill(os.getpid(), signal.SIGABRT)
        train(trial, model, optimizer)


def hangs(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    for _ in trial.epochs(EPOCHS):
        if trial.rank == 1:
            time.sleep(3600)
        train(trial, model, optimizer)


@WRONG.case(ONE, "scorer")
def needs_two_devices(trial: Any) -> None:
    """So little of it is on one device too."""
    model = scorer()
    model, optimizer = trial.prepare(model, sgd(model), min_devices=2)
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            step(optimizer, F.cross_entropy(model(x), y, weight=CLASS_WEIGHTS))


@WRONG.case(UNCHECKED, "ConnectionRefusedError", "in asks_a_service")
def asks_a_service(trial: Any) -> None:
    import socket

    model, optimizer = prepared(trial, scorer())
    for _ in trial.epochs(EPOCHS):
        with socket.create_connection(("127.0.0.1", 9), timeout=1):
            step(
                optimizer, sum(model(x).mean() for x, _, _ in trial.batches("train_table", BATCH))
            )


@WRONG.case(UNCHECKED, "late", early=0.5)
def suggests_in_a_late_epoch(trial: Any) -> None:
    """What the trial has not been asked for yet."""
    model, optimizer = prepared(trial, scorer(), lr=trial.suggest_float("early", 0.0, 1.0))
    for epoch in trial.epochs(EPOCHS):
        if epoch == EPOCHS - 1:
            trial.suggest_float("late", 0.0, 1.0)
        train(trial, model, optimizer)


def wrapped(trial: Any, *, when: str) -> None:
    model: Any = scorer()
    model = nn.parallel.DistributedDataParallel(model) if when == "before" else model
    model, optimizer = prepared(trial, model)
    model = nn.parallel.DistributedDataParallel(model) if when == "after" else model
    for _ in trial.epochs(EPOCHS):
        train(trial, model, optimizer)


for _when, _verdict, _word in (
    ("before", UNCHECKED, "DistributedDataParallel"),
    ("after", ONE, "gradient"),
):
    WRONG.add(
        f"DistributedDataParallel {_when} prepare",
        functools.partial(wrapped, when=_when),
        *(_verdict, _word),
    )

# -- batches of unlike weight at hand, which are refused on several devices -----------------------

for _name, _objective in objectives.UNLIKE.items():
    if _name == "zips_and_weighs":  # refused where a rank has no sample, which is not rehearsed
        WRONG.add(f"at hand: {_name}", _objective, ANY)
    else:
        WRONG.add(f"at hand: {_name}", _objective, ONE, "unlike sizes")
for _name in ("changes_outputs_in_place", "weighs_what_it_fetched_ahead"):
    WRONG.add(f"notes in a list: {_name}", getattr(objectives, _name), STAYS, "seen")

# -- what was once wrong --------------------------------------------------------------------------

for _name, _objective in objectives.ONCE_WRONG.items():
    WRONG.add(f"once wrong: {_name}", _objective, ANY)
