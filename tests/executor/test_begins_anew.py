"""What a trial would lose when it moves is told of before it does; nothing else is."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import AveragedModel

from optuna_fleet import FleetExecutor
from tests.fleets import Leg, small_model, small_pipeline, train, train_epoch

ON_THREE = [Leg((0, 1, 2))]
BEGINS = "begins anew when the trial moves to other devices or is resumed: "


def told_inline(objective: Any, log: Any) -> list[str]:
    study = optuna.create_study()
    study.optimize(
        objective, n_trials=2, executor=FleetExecutor(small_pipeline(), cluster="inline")
    )
    return [line for line in log.getvalue().splitlines() if " anew " in line]


def prepared(trial: Any, *more: Any) -> Any:
    model = small_model()
    return trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), *more)


def epochs(trial: Any, model: Any, optimizer: Any, after: Callable[[], Any]) -> float:
    for _ in trial.epochs(3):
        train_epoch(trial, model, optimizer, [], batch_size=10, after_step=lambda _: after())
    return 0.0


class Ema:
    """Exponential moving average of a model's weights, as most projects have one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}

    @property
    def biggest(self) -> float:
        raise AssertionError("nobody asked for this")

    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * parameter.data


class Cooling(nn.Module):
    """Its temperature falls with each batch; it also counts what it has seen once."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()
        self.temperature, self.size = 1.0, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.size = 36
        if self.training:
            self.temperature *= 0.9
        return self.body(images) / self.temperature


def test_numbers_in_a_model_are_told_of(log: Any) -> None:
    def cools(trial: Any) -> float:
        model = Cooling()
        trial.prepare(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.05))
        return epochs(trial, model, optimizer, lambda: None)

    (line,) = told_inline(cools, log)
    assert "Numbers in prepared modules that change from epoch to epoch begin anew" in line
    assert "`temperature` (Cooling). Make them buffers" in line


# -- what is lost ---------------------------------------------------------------------------------


def forgets_the_scheduler(trial: Any) -> float:
    model, optimizer = prepared(trial)
    schedule = ExponentialLR(optimizer, 0.99)
    return epochs(trial, model, optimizer, schedule.step)


def forgets_a_plateau_in_an_object(trial: Any) -> float:
    class Callbacks:
        def __init__(self, optimizer: Any) -> None:
            self.all = {"plateau": ReduceLROnPlateau(optimizer)}

    model, optimizer = prepared(trial)
    callbacks = Callbacks(optimizer)
    return epochs(trial, model, optimizer, lambda: callbacks.all["plateau"].step(1.0))


def forgets_the_average(trial: Any) -> float:
    model, optimizer = prepared(trial)
    average = AveragedModel(model)
    return epochs(trial, model, optimizer, lambda: average.update_parameters(model))


def forgets_a_moving_average(trial: Any) -> float:
    model, optimizer = prepared(trial)
    ema = Ema(model)
    return epochs(trial, model, optimizer, ema.update)


def forgets_a_copy(trial: Any) -> float:
    model, optimizer = prepared(trial)
    both = nn.ModuleList([model, copy.deepcopy(model)])

    def update() -> None:
        for mine, its in zip(both[1].parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(its.data, alpha=0.1)

    return epochs(trial, model, optimizer, update)


@pytest.mark.parametrize(
    ("objective", "names"),
    [
        (forgets_the_scheduler, "`schedule` (ExponentialLR)."),
        (forgets_a_plateau_in_an_object, "`callbacks` (Callbacks)."),
        (forgets_the_average, "`average` (AveragedModel)."),
        (forgets_a_moving_average, "`ema` (Ema)."),
        (forgets_a_copy, "`both` (ModuleList)."),
    ],
)
def test_what_changes_but_was_not_prepared_is_told_of(
    objective: Any, names: str, log: Any
) -> None:
    (line,) = told_inline(objective, log)
    assert line.startswith("Trial 0: What changes from epoch to epoch but was not given")
    assert BEGINS + names in line


def stops_early(trial: Any) -> float:
    model, optimizer = prepared(trial)
    schedule = LinearLR(optimizer)
    best, bad_epochs = math.inf, 0
    for epoch in trial.epochs(4):
        train_epoch(trial, model, optimizer, [], batch_size=10, after_step=lambda _: schedule.step)
        schedule.step()
        bad_epochs = 0 if 1 - epoch < best else bad_epochs + 1
        best = min(best, 1 - epoch)
        trial.report(best, epoch)
    return best


def test_a_sweep_is_told_of_its_variables_once(fleet: Any, log: Any) -> None:
    study = optuna.create_study()
    fleet.script = {0: [Leg((0, 1, 2), 2), Leg((0,))], 1: ON_THREE}
    study.optimize(stops_early, n_trials=2, executor=fleet)
    told = [line for line in log.getvalue().splitlines() if " anew " in line]
    assert len(told) == 2
    assert "Local variables" in told[0]
    assert "is resumed: `best` (in stops_early, test_begins_anew.py:" in told[0]
    assert BEGINS + "`schedule` (LinearLR)." in told[1]


# -- what is not ----------------------------------------------------------------------------------


class Meter:
    """Counts anew in each epoch."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.outputs = torch.zeros(()), list[Any]()


class Accuracy(nn.Module):
    """A metric of the kind that torchmetrics has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def reset(self) -> None:
        self.total.zero_()


def uses_all_sorts_of_objects(trial: Any) -> float:
    model, optimizer = prepared(trial)
    warmup, decay = LinearLR(optimizer), ExponentialLR(optimizer, 0.9)
    schedule = trial.prepare(SequentialLR(optimizer, [warmup, decay], [1]))
    plateau, unused = ReduceLROnPlateau(optimizer), ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    teacher, shares = copy.deepcopy(model).eval(), nn.Sequential(model, nn.ReLU())
    weights, gradients = model.state_dict(), [torch.ones(()) for _ in model.parameters()]
    meter, accuracy, outputs = Meter(), Accuracy(), {}
    model[0].register_forward_hook(lambda module, _, out: outputs.update(first=out, last=out))
    for _ in trial.epochs(3):
        meter.reset()
        accuracy.reset()
        train_epoch(trial, model, optimizer, meter.outputs, batch_size=10)
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        meter.total += 1
        accuracy.total += len(gradients)
        schedule.step()
        plateau.step(1.0)
        trial.state["plateau"] = plateau.state_dict()
    return float(bool(unused and scaler and teacher and shares and weights))


class Trap:
    """Must not be asked for anything."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)

    def __eq__(self, other: object) -> bool:
        raise AssertionError(other)

    __hash__ = None  # type: ignore[assignment]


def has_shy_objects(trial: Any) -> float:
    model, optimizer = prepared(trial)
    trap, traps = Trap(), {"one": [Trap()]}
    short_lived: Any = Meter()
    refers = weakref.ref(short_lived)
    gc.disable()
    for _ in trial.epochs(3):
        train_epoch(trial, model, optimizer, [], batch_size=10)
        short_lived = None
        assert refers() is None
    gc.enable()
    return float(trap is traps["one"][0] or short_lived is not None)


def keeps_the_average(trial: Any) -> float:
    model, optimizer = prepared(trial)
    average = trial.prepare(AveragedModel(model))
    ema = Ema(model)
    trial.state["ema"] = ema.shadow
    by_hand = copy.deepcopy(model)

    def update() -> None:
        average.update_parameters(model)
        ema.update()
        by_hand.load_state_dict(model.state_dict())
        trial.state["copy"] = copy.deepcopy(by_hand.state_dict())

    return epochs(trial, model, optimizer, update)


@pytest.mark.parametrize(
    "objective", [uses_all_sorts_of_objects, has_shy_objects, keeps_the_average, train]
)
def test_what_is_restored_or_begins_anew_anyway_is_not_told_of(objective: Any, log: Any) -> None:
    assert told_inline(objective, log) == []
    assert "Traceback" not in log.getvalue()


# -- from batch to batch --------------------------------------------------------------------------


def step_on(model: Any, optimizer: Any, batch: Any) -> torch.Tensor:
    images, labels = batch
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def forgets_sums(trial: Any, *, movable: bool = True) -> float:
    model, optimizer = prepared(trial)
    seen: list[float] = []
    for epoch in trial.epochs(2):
        total, count = 0.0, 0
        seen.clear()
        for batch in trial.batches("train", batch_size=10, movable=movable):
            loss = step_on(model, optimizer, batch)
            total += loss.item()
            count += 1
            seen.append(loss.item())
        trial.report(total / count + len(seen), epoch)
    return 0.0


def forgets_what_it_counts(trial: Any) -> float:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(2):
        for step, batch in enumerate(trial.batches("train", batch_size=10, movable=True)):
            step_on(model, optimizer, batch)
            assert step < 5
    return 0.0


def forgets_nothing(trial: Any) -> float:
    model, optimizer = prepared(trial)
    trial.state["step"] = 0
    for epoch, _ in enumerate(trial.epochs(2)):
        loss = None
        for batch in trial.batches("train", batch_size=10, movable=True):
            loss = step_on(model, optimizer, batch)
            trial.totals["loss"] += loss * trial.shard_size
            trial.totals["samples"] += trial.shard_size
            trial.state["step"] += 1
            last = loss.item()
        assert loss is not None
        trial.report(trial.totals.mean("loss", "samples") + last, epoch)
    return 0.0


@pytest.mark.parametrize(
    ("objective", "names"),
    [
        (forgets_sums, "`seen`, `total`, `count`"),
        (forgets_what_it_counts, "what `enumerate` counts"),
    ],
)
def test_what_a_movable_loop_keeps_to_itself_is_told_of_once(
    objective: Any, names: str, log: Any
) -> None:
    (told,) = told_inline(objective, log)
    assert "from batch to batch" in told
    assert set(told.split("resumed: ")[1].split(" (in ")[0].split(", ")) == set(names.split(", "))
    assert "trial.totals" in told


def forgets_sums_but_does_not_move(trial: Any) -> float:
    return forgets_sums(trial, movable=False)


def reads_few_batches(trial: Any) -> float:
    model, optimizer = prepared(trial)
    for epoch in trial.epochs(4):
        for batch in trial.batches("train", batch_size=40, movable=True):  # two of them
            step_on(model, optimizer, batch)
            assert epoch < 4
    return 0.0


@pytest.mark.parametrize(
    "objective", [forgets_nothing, forgets_sums_but_does_not_move, reads_few_batches]
)
def test_what_goes_on_where_it_was_is_not_told_of(objective: Any, log: Any) -> None:
    assert told_inline(objective, log) == []
