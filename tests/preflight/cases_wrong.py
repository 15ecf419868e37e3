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
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

from tests.behaviour import losses, objectives
from tests.preflight.cases_good import lbfgs
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
    bigrams,
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


@WRONG.loss(ONE, "scorer", make=bigrams, data="train_words")
def mean_over_tokens(model: Any, tokens: Tensor) -> Tensor:
    outputs = model(tokens[:, :-1]).flatten(0, 1)
    return F.cross_entropy(outputs, tokens[:, 1:].flatten(), ignore_index=0)


@WRONG.loss(ONE, "the gradient `model.scorer", "in step 1 of mini-epoch 1", "class weights")
def class_weights_of_the_batch(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=3) + 1
    return (F.cross_entropy(model(x), y, reduction="none") / counts[y]).mean()


@WRONG.loss(ONE, "scorer")
def sum_over_a_constant(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum") / BATCH


@WRONG.loss(ONE, "scorer")
def hardest_half_of_the_batch(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    each = F.cross_entropy(model(x), y, reduction="none")
    return each.topk(max(1, len(each) // 2)).values.mean()


@WRONG.loss(ONE, "scorer")
def normalised_advantages(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    """As in policy gradients."""
    rewards = x[:, 0] + x[:, 1]
    advantages = (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-3)
    return (advantages * F.cross_entropy(model(x), y, reduction="none")).mean()


@WRONG.loss(ONE, "scorer")
def pseudo_labels_above_a_quantile(model: Any, x: Tensor, *_: Tensor) -> Tensor:
    with torch.no_grad():
        sure, labels = model(x).softmax(1).max(1)
        is_sure = (sure >= sure.quantile(0.5)).to(x)
    return (is_sure * F.cross_entropy(model(x.flip(1)), labels, reduction="none")).mean()


@WRONG.loss(ONE, "scorer")
def relative_to_the_first_row(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(model(x - x[0]), y)


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


_FIXED_WEIGHTS = torch.tensor([1.0, 4.0, 0.5])


@WRONG.loss(ONE, "scorer")
def weights_of_the_module(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    """They are of float32, whatever all else is cast to."""
    return F.cross_entropy(model(x), y, weight=_FIXED_WEIGHTS)


@WRONG.loss(ONE, "scorer")
def weights_in_autocast(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(x)
    return F.cross_entropy(outputs.float(), y, weight=_FIXED_WEIGHTS)


# -- losses by epoch, by branch, by layer ---------------------------------------------------------


@WRONG.case(ONE, "gradient", "in step 1 of mini-epoch 2")
def class_weights_from_the_middle_on(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    for epoch in trial.epochs(EPOCHS):
        weights = torch.tensor([1.0, 4.0, 0.5]) if epoch >= 4 else None
        for x, y, _ in trial.batches("train_table", BATCH):
            step(optimizer, F.cross_entropy(model(x), y, weight=weights))


class NormByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 0.1).sqrt()


_normalises = trains(mean_of_classes, lambda: network(NormByHand()), drop_last=True)
WRONG.add("layer: NormByHand", _normalises, ONE, "gradient")


WRONG.add("collates_without_some", trains(mean_of_classes, data="train_table_none"), ONE)

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


@WRONG.batch(ONE, "scorer")
def divides_by_the_number_of_devices(
    trial: Any, model: Any, _: Any, x: Tensor, y: Tensor
) -> Tensor:
    return F.cross_entropy(model(x), y) / trial.world_size


@WRONG.batch(ONE, "scorer")
def shards_once_more(trial: Any, model: Any, _: Any, x: Tensor, y: Tensor) -> Tensor:
    mine = slice(trial.rank, None, trial.world_size)
    return F.cross_entropy(model(x[mine]), y[mine])


@WRONG.case(ONE, "learning rate")
def schedules_on_the_first_rank_only(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    schedule = trial.prepare(lr_scheduler.ExponentialLR(optimizer, 0.5))
    for _ in trial.epochs(EPOCHS):
        train(trial, model, optimizer)
        if trial.rank == 0:
            schedule.step()


@WRONG.case(ANY)
def is_initialised_by_rank(trial: Any) -> None:
    """All get what rank 0 has."""
    torch.manual_seed(trial.rank)
    model, optimizer = prepared(trial, scorer())
    for _ in trial.epochs(EPOCHS):
        train(trial, model, optimizer)


# -- kept from batch to batch by each rank for itself ---------------------------------------------


class Keeps(nn.Module):
    """Two layers with a buffer between them, which follows the data."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.encoder, self.scorer = nn.Linear(6, 6), nn.Linear(6, 3)
        start = F.normalize(torch.randn(shape), dim=-1) if shape else torch.ones(())
        self.register_buffer("kept", start)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        return self.scorer(self.use(hidden))

    def use(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class Queue(Keeps):
    """As in MoCo."""

    def use(self, hidden: Tensor) -> Tensor:
        last = self.kept.clone()
        with torch.no_grad():
            self.kept.copy_(torch.cat([F.normalize(hidden, dim=1), last])[: len(last)])
        return hidden + F.normalize(hidden, dim=1) @ last.T @ last


class Largest(Keeps):
    """As for quantised training."""

    def use(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.kept.mul_(0.5).add_(hidden.abs().max(), alpha=0.5)
        return hidden / self.kept


_FOLLOWS = "kept from batch to batch"  # it is used before it changes
for _kind, _shape, _words in (
    (Queue, (16, 6), _FOLLOWS),
    (Largest, (), "gradient"),
):
    WRONG.add(
        f"buffer: {_kind.__name__}",
        trains(mean_of_classes, functools.partial(_kind, *_shape)),
        *(ONE, _words),
    )


@WRONG.batch(ONE, "scorer")
def divides_by_its_mean_loss(trial: Any, model: Any, _: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    trial.state["scale"] = 0.5 * trial.state.get("scale", 1.0) + 0.5 * loss.item()
    return loss / trial.state["scale"]


@WRONG.batch(ONE, "scorer")
def decays_by_the_samples_it_has_seen(
    trial: Any, model: Any, optimizer: Any, x: Tensor, y: Tensor
) -> Tensor:
    trial.state["seen"] = trial.state.get("seen", 0) + len(x)
    optimizer.param_groups[0]["lr"] = 0.1 * math.exp(-trial.state["seen"] / 50)
    return F.cross_entropy(model(x), y)


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


@WRONG.case(ONE, "replay")
def replays_what_it_has_seen(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    replay: deque[Any] = deque(maxlen=8)  # more than a mini-epoch has batches
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            replay.append((x[:1].clone(), y[:1].clone()))
            again = sum(F.cross_entropy(model(a), b) for a, b in replay)
            step(optimizer, F.cross_entropy(model(x), y) + 0.3 * again)


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


def reports(value_of: Callable[[Any, Any], float]) -> Any:
    def objective(trial: Any) -> None:
        model, optimizer = prepared(trial, scorer())
        for epoch in trial.epochs(EPOCHS):
            train(trial, model, optimizer)
            with torch.no_grad():
                trial.report(float(value_of(trial, model)), epoch)

    return objective


def loss_that_is_not_summed(trial: Any, model: Any) -> float:
    return sum(
        F.cross_entropy(model(x), y).item() for x, y, _ in trial.batches("val_table", BATCH)
    )


def mean_of_means_of_batches(trial: Any, model: Any) -> float:
    means = [F.cross_entropy(model(x), y).item() for x, y, _ in trial.batches("val_table", 7)]
    return trial.mean(sum(means) / len(means))


def summed_twice(trial: Any, model: Any) -> float:
    wrong = sum((model(x)[:, 0] < 0).sum().item() for x, _, _ in trial.batches("val_table", BATCH))
    return trial.sum(trial.sum(wrong + 1))


for _value_of in (
    loss_that_is_not_summed,
    mean_of_means_of_batches,
    summed_twice,
):
    WRONG.add(
        f"reports: {_value_of.__name__}",
        reports(_value_of),
        *(ONE, "reported value", "trial.shard_size"),
    )

# -- what a move begins anew: objects -------------------------------------------------------------


class NoamOpt:
    """As the annotated transformer has it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self._step = optimizer, 0

    def step(self) -> None:
        self._step += 1
        rate = min(self._step**-0.5, self._step * 20**-1.5)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()


@WRONG.case(STAYS, "chosen")
def draws_between_folds(trial: Any) -> None:
    """What the next fold trains on is drawn after dropout; after a move nothing was dropped."""
    for fold in ("train_table", "val_table"):
        chosen = torch.rand(6)
        model, optimizer = prepared(trial, network(nn.Dropout(0.5)))
        for _ in trial.epochs(3):
            for x, y, _ in trial.batches(fold, BATCH):
                step(optimizer, F.cross_entropy(model(chosen * x), y))


@WRONG.case(STAYS, "_step")
def wrapper_that_counts_steps(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    noam = NoamOpt(optimizer)
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            noam.step()


@WRONG.case(STAYS, "schedule")
def scheduler_is_not_prepared(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    schedule = lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in trial.epochs(EPOCHS):
        train(trial, model, optimizer)
        schedule.step()


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


@WRONG.case(STAYS, "meter")
def meter_leads_the_rate(trial: Any) -> None:
    class Meter:
        total = count = 0.0

        def update(self, value: float) -> float:
            self.total, self.count = self.total + value, self.count + 1
            return self.total / self.count

    model, optimizer = prepared(trial, scorer())
    meter = Meter()
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            loss = F.cross_entropy(model(x), y)
            mean = trial.mean(loss.item(), weight=trial.shard_size)
            optimizer.param_groups[0]["lr"] = 0.1 * meter.update(mean)
            step(optimizer, loss)


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


def _as_number(model: Any) -> Any:
    model.past *= 0.9
    return model.past


def _in_a_deque(model: Any) -> Any:
    model.past.append(float(len(model.past) + 1))
    return sum(model.past) / len(model.past)


def _in_an_array(model: Any) -> Any:
    model.past += 0.1
    return model.past


def _in_an_object(model: Any) -> Any:
    model.past.level += 0.1
    return model.past.level


class Inner:
    level = 1.0


ATTRIBUTES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda: torch.ones(3), _as_tensor),
    "number": (lambda: 1.0, _as_number),
    "deque": (lambda: deque([1.0], maxlen=50), _in_a_deque),
    "array": (lambda: np.ones(3), _in_an_array),
    "object": (Inner, _in_an_object),
}
for _name, (_start, _use) in ATTRIBUTES.items():

    def _make(start: Any = _start, use: Any = _use) -> nn.Module:
        return Remembers(start(), use)

    WRONG.add(f"attribute: {_name}", trains(mean_of_classes, _make), STAYS, "past", "buffers")


# -- what a move begins anew: variables -----------------------------------------------------------


@WRONG.case(STAYS, "`best`", "trial.best_value")
def best_in_a_variable(trial: Any) -> float:
    model, optimizer = prepared(trial, scorer())
    best = math.inf
    for epoch in trial.epochs(EPOCHS):
        train(trial, model, optimizer)
        loss = validation_loss(trial, model)
        best = min(best, loss)
        trial.report(loss, epoch)
    return best


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


class Calls:
    number = 0


@WRONG.batch(STAYS, "learning rate")
def counts_in_a_class(_: Any, model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    Calls.number += 1
    optimizer.param_groups[0]["lr"] = 0.1 / Calls.number
    return F.cross_entropy(model(x), y)


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


def _count_cell(kept: Any, _: int) -> None:
    kept[1, 2] += 1


COLLECTS: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any]]] = {
    "list in a dict": (lambda: {"val": [0.0]}, lambda kept, k: kept["val"].append(1.0 + k)),
    "set": (set, lambda kept, epoch: kept.add(f"{epoch}")),
    "full deque": (lambda: deque([0.0] * 9, maxlen=9), lambda kept, k: kept.append(1.0 + k)),
    "defaultdict": (lambda: defaultdict(list), lambda kept, k: kept["loss"].append(1.0)),
    "Counter": (lambda: Counter("a"), _count),
    "array": (lambda: np.zeros((3, 3)), _count_cell),
    "number of NumPy": (lambda: np.float64(0.0), lambda kept, k: 0.9 * kept + k + 1),
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


def needs_two_devices(trial: Any, *, weights: Any) -> None:
    """So little of it is on one device too."""
    model = scorer()
    model, optimizer = trial.prepare(model, sgd(model), min_devices=2)
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            weight = None if weights is None else torch.tensor(weights)
            step(optimizer, F.cross_entropy(model(x), y, weight=weight))


WRONG.add("needs two devices", functools.partial(needs_two_devices, weights=None), ANY)
WRONG.add(
    "needs two devices, weighs classes",
    functools.partial(needs_two_devices, weights=[1.0, 4.0, 0.5]),
    *(ONE, "scorer"),
)


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
WRONG.add(
    "LBFGS by the loss of a part", functools.partial(lbfgs, is_shared=False), ONE, "prev_loss"
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
