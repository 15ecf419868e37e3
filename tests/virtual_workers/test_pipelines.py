"""`trial.pipeline`: one objective, the same results on any number of stages."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optuna_fleet import Checkpoints, FleetConfigError, FleetExecutor, load_best_model
from tests.fleets import Leg, fleet_of, run, small_pipeline
from tests.layer_clock import emulated

SIZE, BATCH = 41, 10


class Noisy(nn.Module):
    """Draws from each generator, also when it is evaluated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn_like(x) + 0.1 * random.random() + 0.1 * np.random.rand()


def layers() -> nn.Sequential:
    """With BatchNorm, a dropout that is two of the layers, and work in place behind cuts."""
    dropout = nn.Sequential(nn.Dropout(0.3), Noisy())
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        dropout,
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.Tanh(),
        dropout,
        nn.Linear(8, 3),
    ).double()


def tied_layers() -> nn.Sequential:
    """Three layers with one weight: no cut can keep these together."""
    tied = [nn.Linear(36, 36) for _ in range(3)]
    for layer in tied[1:]:
        layer.weight = tied[0].weight
    first, last = nn.Sequential(nn.Flatten(), tied[0]), nn.Sequential(tied[2], nn.Linear(36, 3))
    return nn.Sequential(first, nn.Tanh(), tied[1], nn.Tanh(), last).double()


def momentum(parameters: Any, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-3)


def momentum_of_some(parameters: Any, lr: float) -> torch.optim.SGD:
    """The first layer has gradients, which count for their norm, but is not trained."""
    return momentum([*parameters][2:], lr)


def is_right(outputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"accuracy": (outputs.argmax(1) == labels).double().mean(), "largest": outputs.max()}


def trains(trial: Any, **more: Any) -> float:
    """Train in stages; the losses of all steps go into a user attribute."""
    with emulated():
        return trains_as_measured(trial, **more)


def trains_as_measured(
    trial: Any,
    *,
    options: dict[str, Any],
    epochs: int = 3,
    make: Any = momentum,
    at_epoch: Callable[[int], object] = lambda epoch: None,
    build: Callable[[], nn.Sequential] = layers,
) -> float:
    model = build()
    optimizer = make(model.parameters(), lr=0.05)
    pipeline = trial.pipeline(model, optimizer, F.cross_entropy, **options)
    scheduler = trial.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    losses = trial.state.setdefault("losses", [])
    found: dict[str, float] = {}
    for epoch in trial.epochs(epochs):
        at_epoch(epoch)
        for images, labels in trial.batches("train", batch_size=BATCH):
            loss = pipeline.step(images, labels)
            trial.totals["steps"] += 1
            if loss is not None:
                losses.append(loss.item())
        losses += [loss.item() for loss in pipeline.flush()]
        assert trial.totals["steps"] == 5
        scheduler.step()
        found = pipeline.evaluate(trial.batches("val", batch_size=8), is_right)
        trial.report(found["accuracy"], epoch)
        assert trial.sum(1) == 1
    trial.set_user_attr("losses", losses)
    trial.set_user_attr("found", found)
    trial.set_user_attr("cuts", pipeline.cuts)
    trial.set_user_attr("layout", [pipeline.num_virtual_workers, pipeline.num_stages])
    noise = torch.rand(3).tolist()
    trial.set_user_attr("noise", [*noise, random.random(), np.random.rand()])
    return losses[-1]


def result(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    assert trial.state is optuna.trial.TrialState.COMPLETE
    return {key: trial.user_attrs[key] for key in ("losses", "found", "noise")}


FLUSHED = {"in_flight": 4, "max_grad_norm": 0.1, "virtual_workers": 1}
DELAYED = {"in_flight": 3, "virtual_workers": 1, "clock_distance": 0}


@pytest.mark.parametrize(
    ("make", "options", "build"),
    [
        (momentum_of_some, FLUSHED, layers),
        (momentum, DELAYED, layers),
        (torch.optim.AdamW, FLUSHED, tied_layers),
    ],
)
def test_results_do_not_depend_on_the_number_of_stages(
    fleet: Any, make: Any, options: dict[str, Any], build: Callable[[], nn.Sequential]
) -> None:
    objective = functools.partial(trains, options=options, make=make, build=build)
    alone = run(fleet, objective, Leg((0,)))
    legs = Leg((1, 2, 0), until_epoch=1), Leg((0,), until_epoch=2), Leg((2, 1))
    moved = run(fleet, objective, *legs)
    assert result(moved) == result(alone)
    assert len(result(alone)["losses"]) == 15
    assert [len(trial.user_attrs["cuts"]) for trial in (alone, moved)] == [0, 1]


def clamps_gradients(model: nn.Module) -> None:
    """By hooks, which are called as soon as a batch's gradients are there."""

    def clamp(parameter: Any) -> None:
        parameter.grad.clamp_(-0.01, 0.01)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clamp)


UNLIMITED = {**FLUSHED, "max_grad_norm": None}


def thaws_what_layers_share(trial: Any, *, plainly: bool = False) -> float:
    """Their weight is frozen in one layer and thawed in another one, which may be elsewhere."""
    model = tied_layers()
    clamps_gradients(model)

    def at_epoch(epoch: int) -> None:
        if epoch < 2:
            layer = (model[0], model[-1])[epoch][-1 - epoch]
            layer.weight.requires_grad_(epoch > 0)

    if not plainly:
        return trains(trial, options=UNLIMITED, at_epoch=at_epoch, build=lambda: model)
    optimizer = momentum(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    trial.prepare(model, optimizer, scheduler)
    losses = []
    for epoch in trial.epochs(3):
        at_epoch(epoch)
        for images, labels in trial.batches("train", batch_size=BATCH):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    trial.set_user_attr("losses", losses)
    return losses[-1]


def test_what_layers_share_may_be_thawed_as_in_a_plain_loop(fleet: Any) -> None:
    plain = run(fleet, functools.partial(thaws_what_layers_share, plainly=True), Leg((0,)))
    alone, in_three = (run(fleet, thaws_what_layers_share, Leg(on)) for on in ((0,), (1, 2, 0)))
    assert result(alone)["losses"] == pytest.approx(plain.user_attrs["losses"], rel=1e-12)
    assert result(in_three) == result(alone)


def begins_to_train_more(trial: Any, *, options: dict[str, Any], thaws: bool) -> float:
    """The optimizer gets the first layers in the second epoch, which may also thaw them."""
    model, optimizers = layers(), []
    model[:2].requires_grad_(not thaws)
    if options is UNLIMITED:
        clamps_gradients(model)

    def make(parameters: Any, lr: float) -> torch.optim.SGD:
        optimizers.append(momentum_of_some([*parameters][2:], lr))
        return optimizers[0]

    def at_epoch(epoch: int) -> None:
        if epoch == 1:
            model[:2].requires_grad_(True)
            optimizers[0].add_param_group({"params": [*model[:2].parameters()], "lr": 0.02})

    return trains(trial, options=options, make=make, at_epoch=at_epoch, build=lambda: model)


@pytest.mark.parametrize(("options", "thaws"), [(UNLIMITED, True), (DELAYED, False)])
def test_what_is_trained_since_a_later_epoch_is_so_after_a_move(
    fleet: Any, options: dict[str, Any], thaws: bool
) -> None:
    objective = functools.partial(begins_to_train_more, options=options, thaws=thaws)
    alone = run(fleet, objective, Leg((0,)))
    moved = run(fleet, objective, Leg((1, 2, 0), until_epoch=2), Leg((2, 1)))
    assert result(moved) == result(alone)
    assert len(moved.user_attrs["cuts"]) == 1


def averages_by_hand(trial: Any) -> float:
    model = layers()
    average = copy.deepcopy(model)

    @torch.no_grad()
    def at_epoch(epoch: int) -> None:
        for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
            assert parameter.shape == kept.shape
            kept.lerp_(parameter, 0.1)

    return trains(trial, options=FLUSHED, at_epoch=at_epoch, build=lambda: model)


def test_weights_that_are_elsewhere_are_not_passed_over(fleet: Any) -> None:
    with pytest.raises(FleetConfigError, match=r"`lerp_` was .* on another rank"):
        run(fleet, averages_by_hand, Leg((0, 1)))


def ends_with_batches_in_flight(trial: Any) -> float:
    model = layers()
    optimizer = momentum(model.parameters(), lr=0.05)
    pipeline = trial.pipeline(model, optimizer, F.cross_entropy, **DELAYED)
    for _ in trial.epochs(2):
        for images, labels in trial.batches("train", batch_size=BATCH):
            pipeline.step(images, labels)
    return 0.0


def test_what_is_in_flight_at_the_end_is_trained_on(tmp_path: Path) -> None:
    found = []
    with fleet_of(devices=3, checkpoints=Checkpoints(tmp_path)) as fleet:
        for devices in ((0,), (0, 1, 2)):
            fleet.script = {0: [Leg(devices)]}
            study = optuna.create_study(study_name=f"on {len(devices)}")
            study.optimize(ends_with_batches_in_flight, n_trials=1, executor=fleet)
            found.append(load_best_model(study, layers()).state_dict())
    alone, in_three = found
    assert all(torch.equal(alone[name], in_three[name]) for name in alone)


# -- several virtual workers ----------------------------------------------------------------------

WAVES = {"in_flight": 3, "clock_distance": 0, "virtual_workers": 2}
ALL = (0, 1, 2, 3)


class Counter(nn.Module):
    """Leaves something behind that is no BatchNorm's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class Bag(nn.Module):
    """Has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(7, 3, mode="sum", sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bags: torch.Tensor = self.table((x * 100).long().abs() % 7)
        return bags + x


def built_with(layer: nn.Module) -> nn.Sequential:
    return layers().append(layer).double()


ON_TWO = {"in_flight": 4, "virtual_workers": 2}
ON_NODES = {"in_flight": 1, "clock_distance": 0, "layout": "NP"}


@pytest.mark.parametrize(
    ("layer", "num_workers", "options"),
    [(Counter(), 1, ON_TWO), (Bag(), 1, ON_TWO), (Bag(), 1, ON_NODES), (nn.Identity(), 2, ON_TWO)],
)
def test_layers_that_can_not_be_added_up_share_no_batch(
    fleet: Any, layer: nn.Module, num_workers: int, options: dict[str, Any]
) -> None:
    build = functools.partial(built_with, layer)
    make = torch.optim.SGD if isinstance(layer, Bag) else momentum
    objective = functools.partial(trains, options=options, build=build, make=make)
    alone, on_two = run(fleet, objective, Leg((0,))), run(fleet, objective, Leg((2, 1)))
    assert on_two.user_attrs["layout"] == [num_workers, 2 // num_workers]
    assert result(on_two) == result(alone)


class Experts(nn.Module):
    """Each part of a batch goes through one of two layers alike, now this one first, now that."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(36, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = self.experts[int(x.sum().abs() * 1000) % 2](x.flatten(1))
        return chosen


def test_layers_that_some_parts_of_a_batch_pass_by_are_not_mixed_up(fleet: Any) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(Experts(), nn.Linear(3, 3)).double()

    options = {"in_flight": 6, "virtual_workers": 2}
    objective = functools.partial(trains, options=options, build=build)
    alone, on_two = run(fleet, objective, Leg((0,))), run(fleet, objective, Leg((0, 1)))
    assert on_two.user_attrs["layout"] == [2, 1]
    assert result(on_two) == result(alone)


def without_noise() -> nn.Sequential:
    model = layers()
    model[1] = nn.GroupNorm(2, 4).double()
    model[3] = model[7] = nn.Identity()
    return model


def test_one_minibatch_at_a_time_is_sgd_on_whole_batches_whatever_the_layout(fleet: Any) -> None:
    """With momentum and weight decay; the last batch has one sample for two virtual workers."""
    options = {**WAVES, "in_flight": 1}
    objective = functools.partial(trains, options=options, build=without_noise)
    plain = functools.partial(trains, options={"in_flight": 1}, build=without_noise)
    expected = result(run(fleet, plain, Leg((0,))))
    legs = Leg(ALL, until_epoch=1), Leg((2, 1, 0), until_epoch=2), Leg((3,))
    for several in (run(fleet, objective, Leg(ALL)), run(fleet, objective, *legs)):
        assert result(several)["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        assert result(several)["found"] == pytest.approx(expected["found"], rel=1e-10)


# -- what goes wrong ------------------------------------------------------------------------------


def mse(trial: Any, model: Any, optimizer: Any = None, **options: Any) -> Any:
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return trial.pipeline(model, optimizer, F.mse_loss, **options)


def twice(trial: Any) -> Any:
    return mse(trial, layers()), mse(trial, layers())


def prepares_its_model(trial: Any) -> Any:
    model = layers()
    mse(trial, model)
    trial.prepare(model)


def hooks_without_flushes(trial: Any) -> Any:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return mse(trial, model, clock_distance=0).step(torch.ones(2, 2), torch.ones(2, 2))


def limits_norms(trial: Any, **options: Any) -> Any:
    return mse(trial, nn.Sequential(nn.Embedding(5, 2, max_norm=1.0), nn.ReLU()), **options)


def steps_on_nothing(trial: Any) -> Any:
    return mse(trial, layers()).step(None, None)


def told_of(**options: Any) -> Callable[[Any], Any]:
    return lambda trial: mse(trial, layers(), **options)


@pytest.mark.parametrize(
    ("objective", "told"),
    [
        (lambda trial: mse(trial, nn.Linear(2, 2)), "takes a torch.nn.Sequential"),
        (told_of(optimizer=0.1), "`float` as the optimizer"),
        (told_of(optimizer=torch.optim.LBFGS(layers().parameters())), "LBFGS"),
        (told_of(optimizer=torch.optim.SGD(layers().parameters())), "8 parameters that are not"),
        (told_of(in_flight=0), "`in_flight` is 0"),
        (told_of(min_devices=9), "has 1: it must not be more"),
        (told_of(clock_distance=-1), "`clock_distance` is -1"),
        (told_of(virtual_workers=0), "`virtual_workers` is 0"),
        (told_of(clock_distance=0, layout="PMP"), "`layout` is .PMP."),
        (told_of(layout="ED"), "say with `clock_distance` how many"),
        (told_of(clock_distance=0, layout="NP", virtual_workers=2), "follows from the nodes"),
        (told_of(clock_distance=0, max_grad_norm=1.0), "given with `clock_distance`"),
        (twice, "only once"),
        (prepares_its_model, "after trial.pipeline"),
        (hooks_without_flushes, "'0.weight' has a hook"),
        (lambda trial: limits_norms(trial, clock_distance=0), "`max_norm`, which writes"),
        (steps_on_nothing, "must be a batch"),
        (
            functools.partial(begins_to_train_more, options=DELAYED, thaws=True),
            "`requires_grad` of '0.bias' has changed",
        ),
    ],
)
def test_nonsense_is_refused_with_what_to_do(inline: Any, objective: Any, told: str) -> None:
    with pytest.raises(FleetConfigError, match=told):
        optuna.create_study().optimize(objective, n_trials=1, executor=inline)


@pytest.fixture(scope="module")
def inline() -> Iterator[Any]:
    with FleetExecutor(small_pipeline(), cluster="inline") as fleet:
        yield fleet


# -- devices that are too small, or too many ------------------------------------------------------


@pytest.fixture(scope="module")
def of_three() -> Iterator[Any]:
    with FleetExecutor(small_pipeline(), devices=3) as fleet:
        yield fleet


def test_what_does_not_fit_on_a_device_gets_as_many_as_it_needs(of_three: Any) -> None:
    def swept(memory_bytes: float | None) -> optuna.trial.FrozenTrial:
        options = {**FLUSHED, "memory_bytes": memory_bytes}
        study = optuna.create_study()
        objective = functools.partial(trains, options=options)
        study.optimize(objective, n_trials=1, executor=of_three)
        return study.trials[0]

    tight = swept(17_000)
    assert result(swept(None)) == result(tight)
    assert len(tight.user_attrs["cuts"]) > 0
    with pytest.raises(FleetConfigError, match="do not fit on 3 devices"):
        swept(1_000)


def two_layers() -> nn.Sequential:
    first = nn.Sequential(nn.Flatten(), nn.Linear(36, 36))
    return nn.Sequential(first, nn.Linear(36, 36)).double()


def test_devices_too_many_for_one_pipeline_and_too_few_for_two_are_not_all_taken(
    of_three: Any,
) -> None:
    """Each layer needs a device of its own."""
    options = {"in_flight": 4, "memory_bytes": 45_000}
    objective = functools.partial(trains, options=options, build=two_layers)
    study = optuna.create_study()
    study.optimize(objective, n_trials=1, executor=of_three)
    assert study.trials[0].user_attrs["layout"] == [1, 2]
