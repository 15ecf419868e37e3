"""Objectives that are the same on any devices and after any move: the check must not say else."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from tqdm import tqdm

from tests.behaviour import losses, objectives
from tests.behaviour import test_moves as moves
from tests.preflight.table import (
    ANY,
    BATCH,
    EPOCHS,
    PLAIN,
    UNCHECKED,
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

GOOD = Table()

# -- what `tests.behaviour` trains, in float64 ----------------------------------------------------

for _name, _objective in objectives.OBJECTIVES.items():
    GOOD.add(f"usual: {_name}", _objective, ANY)
for _objective in (moves.trains, moves.keeps_all):
    GOOD.add(f"movable: {_objective.__name__}", _objective, ANY)
GOOD.add("steps", moves.ALONG, ANY)
GOOD.add("movable steps", moves.MOVABLE, ANY)

# -- losses of torch, and others, in float32 ------------------------------------------------------


def of_outputs(loss_of: Callable[[Tensor, Tensor], Tensor]) -> Any:
    return trains(lambda model, x, y, _: loss_of(model(x), y))


# These two are of float32 by their own words, so they are compared in that.
for _name, _loss_of in losses.LOSSES.items():
    GOOD.add(f"loss: {_name}", of_outputs(_loss_of), ANY)


@GOOD.loss(ANY, make=lambda: scorer().to("cuda"))
def on_a_gpu_by_name(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    """Checks are on the CPU, whatever a script asks for."""
    shift = torch.zeros(3, device=torch.device("cuda", 0))
    return F.cross_entropy(model(x.to("cuda:0")) + shift, y.cuda())


@GOOD.loss(ANY)
def per_sample_gradients(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    each = torch.func.vmap(lambda row: model(row[None])[0])(x)
    return F.cross_entropy(each, y)


@GOOD.loss(ANY)
def fixed_dtype(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    """Does not bear float64: compared by its first step."""
    weights = torch.ones(6, 6, dtype=torch.float32)
    return F.cross_entropy(model(x @ weights), y)


# -- weighted means, said to be that --------------------------------------------------------------


# -- optimizers, with and without BatchNorm -------------------------------------------------------


def _is_for_all(kind: type) -> bool:
    return kind.__name__ not in ("SparseAdam", "Muon")  # sparse gradients only; matrices only


def _normalised(*, bias: bool = False) -> nn.Module:
    return network(nn.BatchNorm1d(8), nn.ReLU(), bias=bias)


OPTIMIZERS = [kind for kind in moves.OPTIMIZERS if _is_for_all(kind)]
for _kind in OPTIMIZERS:

    def _optimizer(model: nn.Module, kind: Any = _kind) -> Any:
        return kind(model.parameters(), lr=0.01)

    _of = f"optimizer: {_kind.__name__}"
    GOOD.add(_of, trains(mean_of_classes, network, _optimizer), ANY)
    GOOD.add(f"{_of}, BatchNorm", trains(mean_of_classes, _normalised, _optimizer), ANY)
    # It has no gradient but rounding, of which Rprop and Adafactor make steps.
    _biased = functools.partial(_normalised, bias=True)
    GOOD.add(f"{_of}, bias, BatchNorm", trains(mean_of_classes, _biased, _optimizer), ANY)


@GOOD.case(ANY)
def groups_of_parameters(trial: Any) -> None:
    model = network()
    groups = [
        {"params": model.encoder.parameters(), "lr": 0.01},
        {"params": model.scorer.parameters(), "weight_decay": 0.1},
    ]
    model, optimizer = trial.prepare(model, torch.optim.AdamW(groups, lr=0.02))
    for _ in trial.epochs(EPOCHS):
        train(trial, model, optimizer)


# -- schedulers -----------------------------------------------------------------------------------


def schedules(make: Callable[[Any], Any]) -> Any:
    """Stepped after each batch."""

    def objective(trial: Any) -> None:
        model = scorer()
        optimizer = sgd(model, momentum=0.9)
        model, optimizer, schedule = trial.prepare(model, optimizer, make(optimizer))
        is_led = isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
        for _ in trial.epochs(EPOCHS):
            for x, y, _ in trial.batches("train_table", BATCH):
                loss = F.cross_entropy(model(x), y)
                step(optimizer, loss)
                mean = trial.mean(loss.item(), weight=trial.shard_size)
                schedule.step(*([mean] if is_led else []))

    return objective


SCHEDULERS = moves.SCHEDULERS | {
    # As many steps as a trial may have, however its epochs are numbered.
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100),
}
for _name, _make_schedule in SCHEDULERS.items():
    GOOD.add(f"scheduler: {_name}", schedules(_make_schedule), ANY)


# -- mixed precision ------------------------------------------------------------------------------


def autocasts(dtype: torch.dtype, *, scales: bool) -> Any:
    def objective(trial: Any) -> None:
        model = network()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=scales)
        trial.prepare(model, optimizer, scaler)
        for _ in trial.epochs(EPOCHS):
            for x, y, _ in trial.batches("train_table", BATCH):
                with torch.autocast("cpu", dtype=dtype):
                    loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()

    return objective


GOOD.add("autocast: bfloat16", autocasts(torch.bfloat16, scales=False), ANY)
GOOD.add("autocast: float16, scaled", autocasts(torch.float16, scales=True), ANY)
GOOD.add("bfloat16", trains(mean_of_classes, lambda: _InHalf(network())), ANY)


class _InHalf(nn.Module):
    """A model of bfloat16, whatever its inputs are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.bfloat16()).float()


# -- loops ----------------------------------------------------------------------------------------


@GOOD.case(ANY)
def keeps_its_best_as_an_attribute(trial: Any) -> float:
    """Of the study's, which has it wherever the trial is."""
    model, optimizer = prepared(trial, scorer())
    for _ in trial.epochs(EPOCHS):
        train(trial, model, optimizer)
        best = min(trial.user_attrs.get("best", math.inf), validation_loss(trial, model))
        trial.set_user_attr("best", best)
        optimizer.param_groups[0]["lr"] = 0.1 * best
    return trial.user_attrs["best"]


@GOOD.case(ANY)
def suggests_objects(trial: Any) -> None:
    kind = trial.suggest_categorical("optimizer", [torch.optim.SGD, torch.optim.Adam])
    trial.suggest_float("lr", 0.01, 0.1)
    model = scorer()
    model, optimizer = trial.prepare(model, kind(model.parameters(), lr=trial.params["lr"]))
    for _ in trial.epochs(EPOCHS):
        train(trial, model, optimizer)


@GOOD.case(ANY)
def stops_by_what_it_reported(trial: Any) -> float:
    model, optimizer = prepared(trial, scorer())
    for epoch in trial.epochs(EPOCHS):
        train(trial, model, optimizer)
        trial.report(validation_loss(trial, model), epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
        if trial.should_stop(patience=4):
            break
    return trial.best_value


@GOOD.case(ANY)
def totals_in_a_movable_pass(trial: Any) -> None:
    model, optimizer = prepared(trial, _normalised())
    for epoch in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH, movable=True):
            loss = F.cross_entropy(model(x), y)
            trial.totals["loss"] += loss.detach() * trial.shard_size
            trial.totals["samples"] += trial.shard_size
            step(optimizer, loss)
        trial.report(float(trial.totals.mean("loss", "samples")), epoch)


@GOOD.case(ANY)
def blocks_of_steps(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer(), momentum=0.9)
    for block in trial.steps(30, every=4):
        train(trial, model, optimizer)
        trial.report(validation_loss(trial, model), block)


@GOOD.case(ANY)
def pretrains_then_trains(trial: Any) -> None:
    model, head = network(), nn.Linear(3, 3)
    first, second = sgd(model), sgd(model, head, lr=0.05)
    trial.prepare(model, head, first, second)
    for _ in trial.epochs(4):
        for x, _, _ in trial.batches("train_table", BATCH):
            step(first, F.mse_loss(model(x), x[:, :3]))
    for _ in trial.epochs(5):
        for x, y, _ in trial.batches("train_table", BATCH):
            step(second, F.cross_entropy(head(model(x)), y))


@GOOD.case(ANY)
def folds_with_dropout(trial: Any) -> float:
    """A fold that is done is evaluated again after a move; the next one's weights are drawn."""
    losses = []
    for fold in ("train_table", "val_table"):
        model, optimizer = prepared(trial, network(nn.Dropout(0.5)))
        for _ in trial.epochs(3):
            for x, y, _ in trial.batches(fold, BATCH):
                step(optimizer, F.cross_entropy(model(x), y))
        losses.append(validation_loss(trial, model))
    return sum(losses)


@GOOD.case(ANY)
def tells_a_tracker_where_it_is(trial: Any) -> None:
    """What differs, and nothing follows from."""
    model, optimizer = prepared(trial, scorer())
    resume, began, device = trial.is_resumed, time.time(), f"{trial.rank} of {trial.world_size}"
    name, options = os.urandom(4).hex(), {"rows": BATCH // trial.world_size}
    lines = [] if trial.rank else [device]
    for epoch in trial.epochs(EPOCHS):
        train(trial, model, optimizer)
        loss = validation_loss(trial, model)
        lines = [f"{time.time() - began:.1f} s, resumed: {resume}, epoch {epoch}: {loss}"]
        trial.report(loss, epoch)
    assert all([lines, name, options])


class Refuses:
    """Does not tell what it has."""

    def __getattr__(self, name: str) -> Any:
        raise ArithmeticError(name)

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError

    __hash__ = None  # type: ignore[assignment]

    def state_dict(self) -> Any:
        raise ArithmeticError


class Meter:
    """Begins anew in each epoch."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.outputs = 0.0, list[Any]()


@GOOD.case(ANY)
def objects_of_all_sorts(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    schedule = trial.prepare(lr_scheduler.ExponentialLR(optimizer, 0.9))
    weight, everything, unused = model.scorer.weight, {"all": [model, optimizer]}, sgd(scorer())
    shy, itself, meter, criterion = {"one": [Refuses()]}, list[Any](), Meter(), nn.L1Loss()
    itself.append(itself)
    sparse = trial.state.setdefault("sparse", torch.eye(2).to_sparse())
    for _ in trial.epochs(EPOCHS):
        meter.reset()
        for x, y, _ in trial.batches("train_table", BATCH):
            step(optimizer, F.cross_entropy(model(x), y))
            meter.total += 1.0
        schedule.step()
    assert all([weight.numel(), everything, unused, shy, itself, criterion, sparse.is_sparse])


@GOOD.case(ANY)
def asks_for_its_locals(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    rate = 0.5
    settings = locals()
    for _ in trial.epochs(EPOCHS):
        assert settings["rate"] == rate
        train(trial, model, optimizer)


@GOOD.case(ANY)
def notes_times_in_its_state(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    times = trial.state.setdefault("times", [])
    for _ in trial.epochs(EPOCHS):
        began = time.perf_counter()
        train(trial, model, optimizer)
        times.append(trial.mean(time.perf_counter() - began))


@GOOD.case(ANY)
def shows_bars(trial: Any) -> None:
    model, optimizer = prepared(trial, scorer())
    epochs, batches = tqdm(trial.epochs(EPOCHS)), tqdm(total=100)
    for _ in epochs:
        for x, y, _ in trial.batches("train_table", BATCH):
            step(optimizer, F.cross_entropy(model(x), y))
            batches.update()


# -- models ---------------------------------------------------------------------------------------


class StochasticDepth(nn.Module):
    """By Python's generator, which all ranks have alike."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return x + self.module(x) if random.random() < 0.5 else x


class RareBranch(nn.Module):
    """Which some ranks do not take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        far = x[:, 0] > 1.0
        out = self.first(x)
        return out + far[:, None] * self.second(x) if far.any() else out


def _spectral() -> nn.Module:
    model = network(nn.LayerNorm(8), nn.GELU())
    nn.utils.parametrizations.spectral_norm(model.encoder)
    return model


def _deep() -> nn.Module:
    """Of three rows: what rounding changes grows from layer to layer, and from step to step."""
    layers = [(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(30)]
    return network(*itertools.chain.from_iterable(layers))


def _attention() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (3, 2)),
        nn.TransformerEncoderLayer(2, 1, 4, dropout=0.3, batch_first=True),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(2, 4, num_layers=2, dropout=0.3, batch_first=True)
        self.scorer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.scorer(self.encoder(x.unflatten(1, (3, 2)))[0][:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: network(nn.ReLU(), nn.Dropout(0.5)),
    "BatchNorm in depth": _deep,
    "BatchNorm by cumulative mean": lambda: network(nn.BatchNorm1d(8, momentum=None)),
    "spectral norm": _spectral,
    "attention": _attention,
    "recurrent": Recurrent,
    "stochastic depth": lambda: network(StochasticDepth(nn.Linear(8, 8))),
    "rare branch": RareBranch,
}
for _name, _make_model in MODELS.items():
    GOOD.add(f"model: {_name}", trains(mean_of_classes, _make_model), ANY)


@GOOD.loss(ANY, make=network)
def draws_by_torch(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    steps = torch.randint(0, 10, (len(x), 1)) / 10
    noise = torch.randn_like(x) + torch.poisson(torch.ones_like(x)) + x.clone().exponential_()
    chosen = torch.multinomial(x.abs() + 0.1, 2).sum(1, keepdim=True)
    share = torch.distributions.Beta(0.4, 0.4).sample()
    hidden = torch.distributions.Normal(model.encoder(x + steps * noise), 1.0).rsample()
    actions = torch.distributions.Categorical(logits=model.scorer(hidden)).sample()
    return F.cross_entropy(F.gumbel_softmax(model(share * x)) + 0.1 * chosen, actions)


@GOOD.loss(ANY)
def draws_by_python_and_numpy(model: Any, x: Tensor, y: Tensor, _: Tensor) -> Tensor:
    size = len(x)
    noise = np.random.randn(size, 6) + np.random.uniform(size=(size, 1)) + np.random.beta(0.4, 0.4)
    order = np.random.permutation(size)[random.sample(range(size), size)]
    np.random.shuffle(order)
    weights = [random.gauss(0, 1) + random.randint(0, 9) + random.betavariate(2, 3) for _ in x]
    weights = torch.tensor(weights)[:, None] + np.random.choice(random.choices([1, 2, 3], k=9))
    return F.cross_entropy(model((x + torch.tensor(noise))[order] * weights), y[order])


# -- examples, on little data ---------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextlib.contextmanager
def _examples(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


class OnLittleData:
    """A trial whose data sets are called otherwise."""

    def __init__(self, trial: Any, names: dict[str, str]) -> None:
        self._trial, self._names = trial, names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trial, name)

    def batches(self, name: str, *arguments: Any, **options: Any) -> Any:
        return self._trial.batches(self._names[name], *arguments, **options)


def example(module: str, names: dict[str, str]) -> Any:
    def objective(trial: Any) -> Any:
        folder = EXAMPLES / "ports" if module.startswith("pytorch") else EXAMPLES
        with _examples(folder):
            found = importlib.import_module(module)
        return found.objective(OnLittleData(trial, names))

    return objective


IMAGES = {"train": "train_images", "val": "val_images"}
GOOD.add(
    "example: digits",
    example("digits", IMAGES),
    ANY,
    optimizer="sgd",
    depth=1,
    width=8,
    sgd_lr=0.1,
)
PIXELS = {"train": "train_digits", "val": "val_digits"}
GOOD.add(
    "example: port",
    example("pytorch_simple_fleet", PIXELS),
    ANY,
    optimizer="Adam",
    lr=0.01,
    n_layers=1,
    n_units_l0=16,
    dropout_l0=0.2,
)

# -- what is not to be checked --------------------------------------------------------------------


@GOOD.case(PLAIN)
def plain_objective(trial: Any) -> float:
    return trial.suggest_float("x", 0.0, 1.0) ** 2


@GOOD.case(UNCHECKED, "pipeline")
def trains_in_stages(trial: Any) -> None:
    model = network()
    pipeline = trial.pipeline(model, sgd(model), F.cross_entropy)
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_table", BATCH):
            pipeline.step(x, y)
