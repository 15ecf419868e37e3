"""Gradients and statistics of several devices are those of one, whatever the graph."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.behaviour.harness import moment
from tests.behaviour.parts import linear, note, prepared, step, train_on
from tests.behaviour.words import pytestmark  # noqa: F401

OWN = F.batch_norm, nn.SyncBatchNorm.forward


def record(trial: Any, name: str, model: nn.Module) -> None:
    """Adds its gradients and its state to what is compared."""
    tensors = {f"grad of {key}": p.grad for key, p in model.named_parameters()}
    for key, value in {**tensors, **model.state_dict()}.items():
        seen = trial.state.setdefault("tensors", {}).setdefault(f"{name} {key}", [])
        seen.append(None if value is None else value.detach().double().tolist())
    trial.set_user_attr("tensors", trial.state["tensors"])


class Net(nn.Module):
    """With BatchNorm of all kinds.

    No bias before a norm, no norm of the features of two samples: gradients would be exactly 0,
    and Adam makes steps of any size out of rounding errors there.
    """

    def __init__(self, normed_head: bool = True) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(4, momentum=None)
        self.fc = nn.Linear(4, 3, bias=not normed_head)
        self.bn3 = nn.BatchNorm1d(4, affine=False) if normed_head else nn.Identity()
        self.bn4 = nn.BatchNorm1d(3, track_running_stats=False) if normed_head else nn.Identity()
        self.unused = nn.Linear(2, 2)

    def features(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.bn3(F.relu(self.bn2(self.conv2(x))).mean((2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.bn4(self.fc(self.features(x)))


def trains_in_each_way(trial: Any, *, batch_size: int) -> None:
    data = "train_odd" if batch_size > 2 else "val"  # 41 samples by tens, 20 by twos
    for method in ("forward", "parts", "accumulate"):
        for kind in (functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam):
            torch.manual_seed(trial.rank)  # the weights of the first rank are everybody's
            model = Net(normed_head=batch_size > 2).double()
            model, optimizer = trial.prepare(model, kind(model.parameters(), lr=0.05))
            for _ in trial.epochs(1):
                for images, labels in trial.batches(data, batch_size, drop_last=True):
                    inputs = 3 * images + 5
                    optimizer.zero_grad()
                    parts = model.fc(model.features(inputs)) if method == "parts" else None
                    loss = F.cross_entropy(model(inputs) if parts is None else parts, labels)
                    loss.backward()
                    if method == "accumulate":
                        F.cross_entropy(model(inputs) * 2, labels).backward()
                    optimizer.step()
                    note(trial, loss)
            record(trial, f"{method} {kind}", model)


# -- batch normalisation --------------------------------------------------------------------------


class Scaled(nn.Module):
    """Far from zero, where variances are easily lost."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(6)), nn.BatchNorm1d(6)

    def forward(self, images: Tensor) -> Tensor:
        rows = images[:, 0].transpose(1, 2)
        return self.norm((rows * self.scale + 1e2).transpose(1, 2))


def normalises(trial: Any, *, dtype: torch.dtype = torch.float64) -> None:
    model = trial.prepare(Scaled().to(dtype))
    for _ in trial.epochs(1):
        for images, _ in trial.batches("train_odd", 7):  # the last are six
            model.zero_grad()
            model(images.to(dtype)).pow(3).mean().backward()
            record(trial, "model", model)


def gathers_statistics(trial: Any) -> None:
    """Without gradients, in a pass over training data."""
    model = trial.prepare(Net().double())
    for _ in trial.epochs(2):
        with torch.no_grad():
            for images, _ in trial.batches("train_odd", 8, drop_last=True):
                model(images)
    record(trial, "model", model)


def norms_several_rows_of_a_sample(trial: Any) -> None:
    """As of graphs; a batch may have one sample."""
    norm = trial.prepare(nn.BatchNorm1d(6).double())
    for _ in trial.epochs(1):
        for images, _ in trial.batches("train_odd", 20):
            norm(images[:, 0].flatten(0, 1)).square().mean().backward()
            record(trial, "norm", norm)


def one_rank_evaluates(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(2):
        for images, labels in trial.batches("train", 10):
            step(optimizer, F.cross_entropy(model(images), labels))
        if trial.rank == 0:
            model.eval()
            with torch.no_grad():
                model(images)
            model(images)
            model.train()
    record(trial, "model", model)


# -- odd graphs -----------------------------------------------------------------------------------


def freezes(trial: Any) -> None:
    """Layers that are unused, frozen and free again, used twice, or whose backward has failed."""
    model = nn.ModuleList([linear() for _ in range(3)])
    model[0].requires_grad_(False)
    model = trial.prepare(model)

    def fail(_: Tensor) -> None:
        raise KeyError("planted")

    for epoch in trial.epochs(3):
        model[0].requires_grad_(epoch > 0)
        for images, _ in trial.batches("train_odd", 10):
            model.zero_grad()
            rows = images[:, 0, 0]
            if epoch == 1:
                hidden = model[0](rows)
                hidden.register_hook(fail)
                with pytest.raises(KeyError, match="planted"):
                    model[2](hidden).mean().backward()
                model.zero_grad()
            model[2](model[2](model[0](rows))).square().mean().backward()
            record(trial, "model", model)


def penalises(trial: Any, *, how: str) -> None:
    """Gradients of a loss with a graph of their own; `how` they are used, if at all."""
    parts = [nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)][: 2 if how == "last" else 3]
    model = nn.Sequential(*parts).double()
    model, optimizer = trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in trial.epochs(2):
        model.train(how != "eval")
        for images, _ in trial.batches("train_odd", 10, drop_last=True):
            rows = images[:, 0, 0].requires_grad_()
            loss = model(rows).square().mean()
            if how == "none":
                parameters = list(model.parameters())
                for grad in torch.autograd.grad(loss, parameters, create_graph=True):
                    assert grad.isfinite().all()
            else:
                each = model(rows).square().sum()
                (gradient,) = torch.autograd.grad(each, rows, create_graph=True)
                loss = loss + gradient.square().sum(1).mean()
            step(optimizer, loss)
    record(trial, "model", model)


def looks_at_its_model(trial: Any) -> None:
    mine = Net().double()
    norm, weight, keys = mine.bn1, mine.bn1.weight, list(mine.state_dict())
    model = trial.prepare(mine)
    twin, buffer = copy.deepcopy(model), io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert model is mine
    assert model.bn1 is norm
    assert norm.weight is weight
    assert list(model.state_dict()) == keys
    assert isinstance(twin.bn1, nn.BatchNorm2d)
    assert type(loaded.bn1) is nn.BatchNorm2d


def has_odd_buffers(trial: Any) -> None:
    """Each holds 3 on the first rank, another number elsewhere."""
    names = "uint8 int8 int16 int32 int64 bool uint16 uint32 uint64 float16 bfloat16 float64"
    module = nn.Linear(2, 2)
    for name in (*names.split(), "complex64", "complex128", "float8_e4m3fn"):
        value = torch.full((2, 3), 3 - trial.rank, dtype=torch.float32)
        module.register_buffer(f"its_{name}", value.to(getattr(torch, name)))
    trial.prepare(module)
    for name, buffer in module.named_buffers():
        wanted = 1 if name == "its_bool" else 3
        assert (buffer.to(torch.complex64) == wanted).all(), (name, trial.rank)


GRAPHS: list[tuple[Any, list[int], dict[str, float]]] = [
    (functools.partial(trains_in_each_way, batch_size=10), [3], {}),
    (functools.partial(trains_in_each_way, batch_size=2), [3], {}),
    (normalises, [3], {}),
    (functools.partial(normalises, dtype=torch.float32), [3], {"rel": 1e-2, "absolute": 1e-3}),
    (gathers_statistics, [1, 3], {}),
    (norms_several_rows_of_a_sample, [3], {}),
    (one_rank_evaluates, [2], {}),
    (freezes, [3], {}),
    (functools.partial(penalises, how="none"), [2], {}),
    (functools.partial(penalises, how="eval"), [2], {}),
    (looks_at_its_model, [2], {}),
    (has_odd_buffers, [2], {}),
]


@pytest.mark.parametrize(("objective", "widths", "options"), GRAPHS)
def test_gradients_and_statistics_are_those_of_one_device(
    lab: Any, objective: Any, widths: list[int], options: dict[str, float]
) -> None:
    lab.same(objective, widths, **options)


_kept: dict[str, nn.Module] = {}


def trains_a_model_of_the_process(trial: Any) -> None:
    """One that an earlier trial has trained as well, on another number of devices."""
    model = _kept.setdefault("model", nn.ModuleList([linear() for _ in range(3)]))
    for parameter in model.parameters():
        nn.init.uniform_(parameter)
    model.zero_grad()
    model = trial.prepare(model)
    for _ in trial.epochs(1):
        for images, _ in trial.batches("train_odd", 10):
            model[1](model[0](images[:, 0, 0])).square().mean().backward()
    record(trial, "model", model)


def test_a_model_that_an_earlier_trial_has_trained(lab: Any) -> None:
    for widths in ([2], [3], [(1, 0)]):
        lab.same(trains_a_model_of_the_process, widths)


# -- BatchNorm, wherever it is called -------------------------------------------------------------


class Normed(nn.Module):
    """Two norms, of a kind that is given, and what some objectives do between them."""

    def __init__(self, kind: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 3, 3, bias=False), kind(3)
        self.second, self.last = nn.Conv2d(3, 3, 2, bias=False), kind(3)
        self.head = nn.Linear(27, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def body(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.norm(self.first(x)).relu())).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


class Activated(nn.BatchNorm2d):
    """With a forward of its own, as in timm."""

    def forward(self, x: Tensor) -> Tensor:
        given = (self.running_mean, self.running_var, self.weight, self.bias)
        return F.leaky_relu(F.batch_norm(x, *given, self.training, 0.2, self.eps))


Step = Callable[[Tensor], Tensor]


def plain(model: Normed) -> Step:
    return model


def frozen_by_type(model: Normed) -> Step:
    """Norms keep what they have seen so far."""
    for layer in model.modules():
        if type(layer) is nn.BatchNorm2d:
            layer.eval()
    return model


def by_hand(model: Normed) -> Step:
    def forward(x: Tensor) -> Tensor:
        x = F.batch_norm(model.first(x), model.mean, model.var, training=model.training)
        return model.head(model.second(x).flatten(1))

    return forward


def functional_call(model: Normed) -> Step:
    """As in meta learning."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return lambda x: torch.func.functional_call(model, tensors, x)


def checkpointed(model: Normed, *, reentrant: bool = False) -> Step:
    def forward(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return model.head(checkpoint(model.body, x, use_reentrant=reentrant).flatten(1))

    return forward


NORMS: dict[str, tuple[Callable[[int], nn.Module], Callable[[Normed], Step]]] = {
    "plain": (nn.BatchNorm2d, plain),
    "own forward": (Activated, plain),
    "torch's own": (nn.SyncBatchNorm, plain),
    "without statistics": (functools.partial(nn.BatchNorm2d, track_running_stats=False), plain),
    "frozen by type": (nn.BatchNorm2d, frozen_by_type),
    "by hand": (nn.BatchNorm2d, by_hand),
    "functional call": (nn.BatchNorm2d, functional_call),
    "checkpointed": (nn.BatchNorm2d, checkpointed),
    "reentrant": (nn.BatchNorm2d, functools.partial(checkpointed, reentrant=True)),
}


def trains_normed(trial: Any, *, case: str) -> None:
    """For two epochs of five steps."""
    kind, begins = NORMS[case]
    model = trial.prepare(Normed(kind).double())
    optimizer = trial.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    forward = begins(model.train())
    for _ in trial.epochs(2):
        for x, y in trial.batches("train_odd", batch_size=10, movable=True):
            train_on(trial, forward, optimizer, x + 1, y)
            moment(trial)
    trial.set_user_attr("buffers", [float(b.double().sum()) for b in model.buffers()])


def has_torchs_own_functions(trial: Any) -> float:
    return float(F.batch_norm is OWN[0] and nn.SyncBatchNorm.forward is OWN[1])


@pytest.mark.parametrize("case", NORMS)
def test_batchnorm_is_that_of_one_device_wherever_it_is_called(lab: Any, case: str) -> None:
    told = ["use_reentrant=False exchanges them once"] if case == "reentrant" else []
    objective = functools.partial(trains_normed, case=case)
    lab.same(objective, [2, (1, 0), 1], within={1, 7}, told=told)
    if case == "torch's own":
        assert lab.fly(has_torchs_own_functions, [1]).trial.value == 1  # again


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["train", "last"])
def test_a_gradient_penalty_through_batchnorm_says_what_to_do(lab: Any, how: str) -> None:
    lab.refused(functools.partial(penalises, how=how), "policy='baseline'")


def has_another_model_on_each_rank(trial: Any) -> None:
    trial.prepare(nn.Linear(2 + trial.rank, 2))


def test_unlike_models_are_refused(lab: Any) -> None:
    flown = lab.refused(has_another_model_on_each_rank)
    assert type(flown.error).__name__ == "TrialError"


@pytest.mark.parametrize("affine", [True, False])
def test_lazy_layers_are_refused(lab: Any, affine: bool) -> None:
    def objective(trial: Any) -> None:
        trial.prepare(nn.Sequential(nn.LazyBatchNorm1d(affine=affine)))

    lab.refused(objective, "of Sequential is lazy", widths=[1])
