"""Gradients and statistics of several devices are those of one, whatever the graph."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.behaviour.parts import note, prepared
from tests.behaviour.words import pytestmark  # noqa: F401

ODD_TYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "bool", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float64", "complex64", "complex128", "float8_e4m3fn"),
)


def record(trial: Any, **tensors: Any) -> None:
    """Adds tensors to what is compared."""
    for name, value in tensors.items():
        seen = trial.state.setdefault("tensors", {}).setdefault(name, [])
        seen.append(None if value is None else value.detach().double().tolist())
    trial.set_user_attr("tensors", trial.state["tensors"])


def record_model(trial: Any, name: str, model: nn.Module) -> None:
    for key, parameter in model.named_parameters():
        record(trial, **{f"{name} grad of {key}": parameter.grad})
    for key, value in model.state_dict().items():
        record(trial, **{f"{name} {key}": value})


class Net(nn.Module):
    """With BatchNorm of all kinds.

    No bias before a norm, no norm of the features of two samples: gradients would be exactly 0,
    and Adam makes steps of any size out of rounding errors there.
    """

    def __init__(self, normed_head: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(4, momentum=None)
        self.fc = nn.Linear(4, 3, bias=not normed_head)
        self.bn3: nn.Module = nn.Identity()
        self.bn4: nn.Module = nn.Identity()
        if normed_head:
            self.bn3 = nn.BatchNorm1d(4, affine=False)
            self.bn4 = nn.BatchNorm1d(3, track_running_stats=False)
        self.unused = nn.Linear(2, 2)

    def features(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.bn3(F.relu(self.bn2(self.conv2(x))).mean((2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.bn4(self.fc(self.features(x)))


def backward(method: str, model: Net, images: Tensor, labels: Tensor) -> Tensor:
    if method == "parts":
        loss = F.cross_entropy(model.fc(model.features(images)), labels)
    else:
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    if method == "accumulate":
        F.cross_entropy(model(images) * 2, labels).backward()
    return loss


SGD = functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01)


def trains_in_each_way(trial: Any, *, batch_size: int) -> None:
    data = "train_odd" if batch_size > 2 else "val"  # 41 samples by tens, 20 by twos
    for method in ("forward", "parts", "accumulate"):
        for make in (SGD, torch.optim.Adam):
            torch.manual_seed(trial.rank)  # the weights of the first rank are everybody's
            model = Net(normed_head=batch_size > 2).double()
            model, optimizer = prepared(trial, lambda model=model: model, _with_rate(make))
            for _ in trial.epochs(1):
                for images, labels in trial.batches(data, batch_size, drop_last=True):
                    optimizer.zero_grad()
                    loss = backward(method, model, 3 * images + 5, labels)
                    optimizer.step()
                    note(trial, loss)
            record_model(trial, f"{method} {make}", model)


def _with_rate(make: Any) -> Any:
    return functools.partial(make, lr=0.05)


@pytest.mark.parametrize("batch_size", [10, 2])
def test_training_is_that_of_one_device(lab: Any, batch_size: int) -> None:
    objective = functools.partial(trains_in_each_way, batch_size=batch_size)
    lab.same(objective, [2])
    lab.same(objective, [3])


# -- batch normalisation --------------------------------------------------------------------------


class Scaled(nn.Module):
    """Far from zero, where variances are easily lost."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(6)), norm

    def forward(self, images: Tensor) -> Tensor:
        rows = images[:, 0].transpose(1, 2)
        return self.norm((rows * self.scale + 1e2).transpose(1, 2))


def normalises(trial: Any, *, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = trial.prepare(Scaled(nn.BatchNorm1d(6)).to(dtype))
    for _ in trial.epochs(1):
        for images, _ in trial.batches("train_odd", 7):  # the last are six
            model.zero_grad()
            model(images.to(dtype)).pow(3).mean().backward()
            record_model(trial, "model", model)


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-8), (torch.float32, 1e-2)])
def test_gradients_through_statistics(lab: Any, dtype: torch.dtype, rel: float) -> None:
    objective = functools.partial(normalises, dtype=dtype)
    absolute = 1e-10 if dtype == torch.float64 else 1e-3
    lab.same(objective, [3], rel=rel, absolute=absolute)


def gathers_statistics(trial: Any) -> None:
    """Without gradients, in a pass over training data."""
    model = trial.prepare(Net(normed_head=True).double())
    for _ in trial.epochs(2):
        with torch.no_grad():
            for images, _ in trial.batches("train_odd", 8, drop_last=True):
                model(images)
    record_model(trial, "model", model)


def test_statistics_without_gradients(lab: Any) -> None:
    lab.same(gathers_statistics, [1, 3])


def graphs_norm(trial: Any) -> None:
    """A sample has several rows, a batch may have one sample."""
    norm = trial.prepare(nn.BatchNorm1d(6).double())
    for _ in trial.epochs(1):
        for images, _ in trial.batches("train_odd", 20):
            norm(images[:, 0].flatten(0, 1)).square().mean().backward()
            record_model(trial, "norm", norm)


def test_a_sample_of_several_rows(lab: Any) -> None:
    lab.same(graphs_norm, [3])


def one_rank_evaluates(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(2):
        for images, labels in trial.batches("train", 10):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if trial.rank == 0:
            model.eval()
            with torch.no_grad():
                model(images)
            model(images)
            model.train()
    record_model(trial, "model", model)


def test_a_rank_may_evaluate_alone(lab: Any) -> None:
    lab.same(one_rank_evaluates, [2])


# -- odd graphs -----------------------------------------------------------------------------------


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(6, 6) for _ in range(3)]).double()


def freezes(trial: Any) -> None:
    """Layers that are unused, frozen and free again, used twice, or whose backward has failed."""
    model = layers()
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
            record_model(trial, "model", model)


def test_odd_graphs(lab: Any) -> None:
    lab.same(freezes, [2, 3] if freezes is not freezes else [3])


_kept: dict[str, nn.Module] = {}


def trains_a_model_of_the_process(trial: Any) -> None:
    """One that an earlier trial has trained as well, on another number of devices."""
    model = _kept.setdefault("model", layers())
    model.load_state_dict(layers().state_dict())
    model.zero_grad()
    model = trial.prepare(model)
    for _ in trial.epochs(1):
        for images, _ in trial.batches("train_odd", 10):
            model[1](model[0](images[:, 0, 0])).square().mean().backward()
    record_model(trial, "model", model)


def test_a_model_that_an_earlier_trial_has_trained(lab: Any) -> None:
    for widths in ([2], [3], [(1, 0)]):
        lab.same(trains_a_model_of_the_process, widths)


def has_odd_buffers(trial: Any) -> None:
    """Each holds 3 on the first rank, another number elsewhere."""
    module = nn.Linear(2, 2)
    for name in ODD_TYPES:
        value = torch.full((2, 3), 3 - trial.rank, dtype=torch.float32)
        module.register_buffer(f"its_{name}", value.to(getattr(torch, name)))
    trial.prepare(module)
    for name in ODD_TYPES:
        value = module.get_buffer(f"its_{name}").to(torch.complex64)
        assert (value == (1 if name == "bool" else 3)).all(), (name, trial.rank)


def test_buffers_of_every_type_are_made_equal(lab: Any) -> None:
    lab.same(has_odd_buffers, [2])


# -- gradients of gradients -----------------------------------------------------------------------


def penalises(trial: Any, *, how: str) -> None:
    """Gradients of a loss with a graph of their own; `how` they are used, if at all."""
    torch.manual_seed(0)
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
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    record_model(trial, "model", model)


@pytest.mark.parametrize("how", ["train", "last"])
def test_a_gradient_penalty_through_batchnorm_says_what_to_do(lab: Any, how: str) -> None:
    lab.refused(functools.partial(penalises, how=how), "policy='baseline'")


@pytest.mark.parametrize("how", ["none", "eval"])
def test_other_graphs_of_gradients_are_welcome(lab: Any, how: str) -> None:
    lab.same(functools.partial(penalises, how=how), [2])


# -- models ---------------------------------------------------------------------------------------


def looks_at_its_model(trial: Any) -> None:
    mine = Net(normed_head=True).double()
    norm, weight, keys = mine.bn1, mine.bn1.weight, list(mine.state_dict())
    model = trial.prepare(mine)
    twin, buffer = copy.deepcopy(model), io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    told = {
        "same object": model is mine and model.bn1 is norm and norm.weight is weight,
        "same keys": list(model.state_dict()) == keys,
        "method": callable(model.features),
        "instance": isinstance(norm, nn.BatchNorm2d),
        "copied": isinstance(twin.bn1, nn.BatchNorm2d),
        "pickled plain": type(loaded.bn1) is nn.BatchNorm2d,
    }
    assert all(told.values()), told


def test_a_model_stays_the_users_own(lab: Any) -> None:
    lab.same(looks_at_its_model, [2])


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
