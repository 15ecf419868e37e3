"""Which losses are means over the samples: found on one device, without a false alarm."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import types
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from optuna_fleet.trainer.gradients.reducer import Reducer
from optuna_fleet.trainer.gradients.weights import Weights
from optuna_fleet.trainer.splitting import cuts, split_check, worlds
from optuna_fleet.trainer.splitting.errors import CannotFollowError
from optuna_fleet.trainer.splitting.precision import FewDigits
from optuna_fleet.trainer.splitting.split_check import SplitCheck
from optuna_fleet.trainer.splitting.tracked import TrackedInt, plain, tracked
from optuna_fleet.trainer.splitting.twins import twin_of

# What torch 2.4 says of its own activation checkpointing; all other warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast.* is deprecated")

SIZE = 16
WEIGHTS = torch.tensor([0.2, 1.0, 5.0, 2.0, 0.7])

needs_keywords = pytest.mark.skipif(
    "with_kwargs" not in inspect.signature(register_module_forward_hook).parameters,
    reason="this torch tells of no keyword arguments",
)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 5)
    )


class Checked:
    """A model in training, whose first batches are looked at."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = model.to(dtype)
        self.dtype = dtype
        self.told: list[str] = []
        self.remarks: list[str] = []
        reducer = Reducer(Weights(), lambda keys, text: None)
        reducer.watch(self.model)
        self.check = SplitCheck(
            self.told.append, lambda _, text: self.remarks.append(text), [self.model], reducer
        )

    def batch(self, number: int, size: int = SIZE) -> Any:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(size, 6, generator=generator).to(self.dtype)
        y = torch.randint(5, (size,), generator=generator)
        self.check.hand_out((x, y), size)
        return x, y

    def train(self, step: Callable[..., Any]) -> bool:
        """Whether the loss was found to be no mean."""
        try:
            for number in range(3):
                x, y = self.batch(number)
                step(self.model, x, y)
                self.model.zero_grad()
        finally:
            self.check.close()
        return bool(self.told)


def of(outputs_to_loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    return lambda model, x, y: outputs_to_loss(model(x), y).backward()


def each(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y, reduction="none")


def similarity(o: Tensor) -> Tensor:
    unit = F.normalize(o)
    return unit @ unit.T / 0.1


MEANS = {
    "cross entropy": of(F.cross_entropy),
    "label smoothing": of(lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1)),
    "sum / len": of(lambda o, y: each(o, y).sum() / len(y)),
    "sum / shape": of(lambda o, y: each(o, y).sum() / y.shape[0]),
    "sum / size()": of(lambda o, y: each(o, y).sum() / y.size(0)),
    "sum / a product": of(lambda o, y: o.square().sum() / (len(o) * o.shape[1])),
    "sum / a converted size": of(lambda o, y: each(o, y).sum() / float(y.shape[0])),
    "a constant that is a multiple": of(
        lambda o, y: F.cross_entropy(o, y) * 0 + each(o, y).sum() / len(y) / (2 * SIZE)
    ),
    "checkpointed": of(lambda o, y: checkpoint(F.cross_entropy, o, y, use_reentrant=False)),
    "targets changed in place": of(lambda o, y: F.cross_entropy(o, y.add_(1).remainder_(5))),
    "as a vector": lambda m, x, y: each(m(x), y).backward(torch.full((SIZE,), 1 / SIZE)),
    "alike rows": lambda m, x, y: F.cross_entropy(m(torch.cat([x, x])).chunk(2)[1], y).backward(),
    "by index": of(lambda o, y: -F.log_softmax(o, 1)[torch.arange(len(y)), y].mean()),
    "one-hot": of(lambda o, y: -(F.one_hot(y, 5) * F.log_softmax(o, 1)).sum(1).mean()),
    "focal": of(lambda o, y: ((1 - torch.exp(-each(o, y))) ** 2 * each(o, y)).mean()),
    "accumulated": of(lambda o, y: F.cross_entropy(o, y) / 4),
    "in single precision": of(lambda o, y: F.cross_entropy(o.float(), y)),
    "changed in place": of(lambda o, y: F.cross_entropy(o.mul_(2), y)),
    "dropout behind the model": of(lambda o, y: F.cross_entropy(F.dropout(o), y)),
    "noise before the model": lambda m, x, y: F.cross_entropy(
        m(x + torch.randn_like(x)), y
    ).backward(),
    "scaled inputs": lambda m, x, y: F.cross_entropy(m(x / 255), y).backward(),
    "parts of the model": lambda m, x, y: F.cross_entropy(m[1:](m[0](x)), y).backward(),
    "other views of the whole batch": lambda m, x, y: F.cross_entropy(
        m(torch.cat([x, x.flip(1)])).chunk(2)[0], y
    ).backward(),
    "sorted": lambda m, x, y: F.cross_entropy(m(x[y.argsort()]), y[y.argsort()]).backward(),
    "several views": lambda m, x, y: F.cross_entropy(
        m(torch.cat([x, x * 2, x + 1])).chunk(3)[0], y
    ).backward(),
    "with a regulariser": lambda m, x, y: (
        F.cross_entropy(m(x), y) + 0.01 * sum(p.norm() for p in m.parameters())
    ).backward(),
    "scaled for half precision": lambda m, x, y: (
        torch.amp.GradScaler("cpu").scale(F.cross_entropy(m(x), y)).backward()
    ),
}
NO_MEANS = {
    "class weights": of(lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS.to(o.dtype))),
    "ignored targets": of(lambda o, y: F.cross_entropy(o, y, ignore_index=2)),
    "masked": of(lambda o, y: (each(o, y) * (y != 2)).sum() / (y != 2).sum()),
    "masked, a number": of(lambda o, y: (each(o, y) * (y != 2)).sum() / (y != 2).sum().item()),
    "selected": of(lambda o, y: F.cross_entropy(o[y != 2], y[y != 2])),
    "a sum": of(lambda o, y: each(o, y).sum()),
    "a sum / a constant": of(lambda o, y: each(o, y).sum() / SIZE),
    "contrastive": of(lambda o, y: F.cross_entropy(similarity(o), torch.arange(len(o)))),
    "contrastive, by shape": of(
        lambda o, y: F.cross_entropy(similarity(o), torch.arange(o.shape[0]))
    ),
    "centred inputs": lambda m, x, y: F.cross_entropy(m(x - x.mean(0)), y).backward(),
    "inputs mixed in place": lambda m, x, y: F.cross_entropy(
        m(x.mul_(0.7).add_(x.flip(0), alpha=0.3)), y
    ).backward(),
    "covariance": of(lambda o, y: ((o - o.mean(0)).T @ (o - o.mean(0))).square().mean()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_samples_is_no_alarm(name: str, dtype: torch.dtype) -> None:
    assert not Checked(network(), dtype).train(MEANS[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NO_MEANS)
def test_what_is_no_mean_is_found(name: str, dtype: torch.dtype) -> None:
    assert Checked(network(), dtype).train(NO_MEANS[name])


class WithLoss(nn.Module):
    def __init__(self, weight: Tensor | None) -> None:
        super().__init__()
        self.network = network()
        self.weight = weight

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(x)
        return {"loss": F.cross_entropy(logits, labels, weight=self.weight), "logits": logits}


@pytest.mark.parametrize("weight", [None, pytest.param(WEIGHTS, marks=needs_keywords)])
def test_a_loss_made_in_the_model(weight: Tensor | None) -> None:
    found = Checked(WithLoss(weight)).train(lambda m, x, y: m(x, labels=y)["loss"].backward())
    assert found is (weight is not None)


@pytest.mark.parametrize("weight", [None, pytest.param(WEIGHTS, marks=needs_keywords)])
def test_a_loss_made_in_a_model_that_computes_in_half_precision(weight: Tensor | None) -> None:
    model = WithLoss(weight)
    forward = torch.autocast("cpu", torch.bfloat16)(type(model).forward)
    model.forward = types.MethodType(forward, model)  # as Accelerate does it
    found = Checked(model).train(lambda m, x, y: m(x, labels=y)["loss"].backward())
    assert found is (weight is not None)


@pytest.mark.parametrize(("says", "found"), [(lambda y: WEIGHTS[y].sum(), False), (len, True)])
def test_what_is_said_of_the_weights_is_checked(says: Callable[..., Any], found: bool) -> None:
    checked = Checked(network())

    def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
        loss = F.cross_entropy(model(x), y, weight=WEIGHTS)
        checked.check.weigh(loss, says(y) if found is False else (y == y).sum())
        loss.backward()

    assert checked.train(step) is found


def test_training_is_what_it_is_without_a_check() -> None:
    """Weights, statistics and random numbers, bit for bit."""

    def trained(checks: bool) -> list[Tensor]:
        model = network()
        checked = Checked(model)
        torch.manual_seed(1)
        for part in model.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if not checks:
            checked.check.hand_out = lambda *_: None  # type: ignore[method-assign]
        for number in range(5):
            x, y = checked.batch(number)
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + model(x[: x.shape[0] // 2]).square().mean()).backward()
            optimizer.step()
        checked.check.close()
        assert checked.told == []
        return [*model.state_dict().values(), torch.rand(3)]

    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(one, other)


def test_nothing_is_drawn_once_more_from_generators_of_the_users() -> None:
    ours, theirs = (torch.Generator().manual_seed(0) for _ in range(2))

    def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
        noise = torch.randn(x.shape, generator=ours) + torch.ones(SIZE).normal_(generator=ours)[0]
        (F.cross_entropy(model(x + noise), y) * torch.rand((), generator=ours)).backward()

    assert not Checked(network()).train(step)
    for _ in range(3):
        torch.randn(SIZE, 6, generator=theirs), torch.ones(SIZE).normal_(generator=theirs)
        torch.rand((), generator=theirs)
    assert torch.equal(ours.get_state(), theirs.get_state())


class WithTraces(nn.Module):
    """Keeps something of each call, as models do; its output is as wide as the batch is long."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, SIZE)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.last = self.layer(x) + random.random() * 0
        return self.last


def test_a_check_leaves_no_traces_in_the_model_nor_in_the_batch() -> None:
    checked = Checked(WithTraces(), torch.float64)
    seen: list[Any] = []
    checked.model.register_forward_hook(lambda module, inputs, output: seen.append(output))
    random.seed(0)
    x, y = checked.batch(0)
    before = x.clone(), y.clone()
    x.mul_(2)
    y.add_(1)
    outputs = checked.model(x)
    statistics = torch.zeros(SIZE, dtype=torch.float64)
    F.batch_norm(outputs, statistics, statistics + 1, training=True)
    outputs.mean().backward()
    checked.check.close()
    assert seen == [outputs]
    assert checked.model.last is outputs
    assert int(checked.model.num_calls) == 1
    assert torch.equal(x, before[0] * 2)
    assert torch.equal(y, before[1] + 1)
    torch.testing.assert_close(statistics, 0.1 * outputs.mean(0).detach())
    random.seed(0)
    assert random.random() != random.random()  # and the next one is the second
    assert _get_current_function_mode_stack() == []


@pytest.mark.parametrize("make", [network, lambda: WithLoss(None)])
def test_a_copy_never_calls_the_original(make: Callable[[], nn.Module]) -> None:
    model = make()
    model.forward = torch.no_grad()(model.forward)  # bound to it
    with pytest.raises(CannotFollowError):
        twin_of(model, shares_weights=True)


def test_functions_of_functions_are_let_alone() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
        weights = dict(model.named_parameters())

        def loss_of(weights: Any, sample: Tensor, label: Tensor) -> Tensor:
            outputs = torch.func.functional_call(model, weights, (sample[None],))
            return F.cross_entropy(outputs, label[None])

        each_gradient = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(weights, x, y)
        assert each_gradient["0.weight"].shape == (SIZE, 5, 6)

    assert not Checked(nn.Sequential(nn.Linear(6, 5))).train(step)


def test_a_mode_of_the_users_is_not_in_the_way() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    checked = Checked(network())
    with Mode():
        x, y = checked.batch(0)
    F.cross_entropy(checked.model(x), y).backward()
    checked.check.close()
    assert _get_current_function_mode_stack() == []


def test_what_can_not_be_followed_is_none_of_the_objectives_business() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
        outputs = model(x)
        torch.stack([outputs[i, 0] for i in range(SIZE)]).mean().backward()

    assert not Checked(network()).train(step)


@pytest.fixture
def too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """All outputs are too large to be followed whole: half of their samples are."""
    for module in (cuts, split_check):
        monkeypatch.setattr(module, "MOST_NUMBERS", SIZE * 5 // 2)


@pytest.mark.usefixtures("too_large")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*MEANS, *NO_MEANS])
def test_some_samples_of_a_large_batch_are_enough(name: str, dtype: torch.dtype) -> None:
    checked = Checked(network(), dtype)
    assert checked.train({**MEANS, **NO_MEANS}[name]) is (name in NO_MEANS)
    assert checked.remarks == []


@pytest.mark.usefixtures("too_large")
@pytest.mark.parametrize("weight", [None, pytest.param(WEIGHTS, marks=needs_keywords)])
def test_a_large_model_that_makes_its_loss(
    weight: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "MOST_NUMBERS", 10)
    model = WithLoss(weight)
    checked = Checked(model)
    hooked: list[Any] = []
    calls_seen: list[Any] = []
    model.network[0].weight.register_hook(hooked.append)
    model.network.register_forward_hook(lambda *call: calls_seen.append(call))
    found = checked.train(lambda m, x, y: m(x, labels=y)["loss"].backward())
    assert found is (weight is not None)
    assert len(hooked) == len(calls_seen) == 3  # by the objective's own steps alone


def test_a_copy_of_a_large_model_takes_no_memory() -> None:
    model = network()
    twin = twin_of(model, shares_weights=True)
    for own, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert its.data_ptr() == own.data_ptr()
        assert its is not own
    twin(torch.ones(2, 6)).sum().backward()
    assert all(own.grad is None for own in model.parameters())
    assert model.training


@pytest.mark.usefixtures("too_large")
def test_what_there_is_no_memory_for_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "available_bytes", lambda: 1000)
    checked = Checked(network())
    assert not checked.train(NO_MEANS["ignored targets"])
    assert ["too little memory" in remark for remark in checked.remarks] == [True]


MASK = ~torch.eye(SIZE, dtype=torch.bool)


def by_numpy(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, torch.from_numpy(y.numpy().copy()))


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (of(lambda o, y: F.cross_entropy(similarity(o), torch.arange(SIZE))), "differ by"),
        (of(lambda o, y: (similarity(o) - 9 * torch.eye(SIZE)).exp().mean()), "differ by"),
        (
            of(lambda o, y: similarity(o)[MASK].reshape(SIZE, -1).exp().mean()),
            "can't be computed on",
        ),
        (of(lambda o, y: (similarity(o) * MASK).exp().mean()), "can't be computed on"),
        (of(lambda o, y: o.reshape(SIZE, -1)[:, 0].mean()), "can't be computed on"),
        (of(by_numpy), None),
        (
            of(
                lambda o, y: F.ctc_loss(
                    F.log_softmax(o.reshape(1, -1, 5).expand(7, -1, 5), 2),
                    y.clamp(1)[:, None],
                    [7] * SIZE,
                    [1] * SIZE,
                )
            ),
            None,
        ),
    ],
    ids=["targets", "made mask", "indexed", "mask", "reshaped", "NumPy", "lengths"],
)
def test_constants_of_the_size_of_a_batch(step: Callable[..., Any], told: str | None) -> None:
    """Followed where they can be; what can't run on a part of a batch stays on one device."""
    checked = Checked(network())
    checked.train(step)
    assert [told in text for text in checked.told if told] == [True] * bool(told)
    assert bool(checked.told) is bool(told)


def test_batches_of_a_class_that_is_a_mapping_are_looked_into() -> None:
    checked = Checked(network())
    x, y = torch.randn(SIZE, 6), torch.arange(SIZE) % 5
    batch = UserDict(x=x, y=y)  # as of Transformers
    checked.check.hand_out(batch, SIZE)
    F.cross_entropy(checked.model(batch["x"]), batch["y"], weight=WEIGHTS).backward()
    checked.check.close()
    assert checked.told


# -- models ---------------------------------------------------------------------------------------


class Centred(nn.Module):
    """Less the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Attending(nn.Module):
    """Samples attend to each other."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.T).softmax(1) @ x


class Tokens(nn.Module):
    """Takes numbers for tokens."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(3, 5, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed((x > 0).long())


class SequenceFirst(nn.Module):
    """Whose rows are no samples, though there are as many."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(1, 5, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x[..., None])[0].mean(0)


class Restless(nn.Module):
    """What it gives depends on how often it was called, and on numbers drawn at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(6, 5), nn.Linear(6, 5)
        self.register_buffer("num_calls", torch.zeros(()))
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        noise = torch.randn(x.shape, generator=self.generator) + float(np.random.randn())
        return self.layer(x + noise * random.random()) * self.num_calls


class Averaged(Restless):
    """Changes weights of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_lerp_(list(self.mean.parameters()), list(self.layer.parameters()), 0.1)
            self.mean.weight.data.mul_(0.9)
        return self.layer(x) + self.mean(x).detach()


@pytest.mark.parametrize("kind", [Restless, Averaged])
def test_models_that_change_with_each_call(kind: type[Restless]) -> None:
    def trained(checks: bool) -> list[Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        checked = Checked(kind())
        if not checks:
            checked.check.hand_out = lambda *_: None  # type: ignore[method-assign]
        assert not checked.train(of(F.cross_entropy))
        return [*checked.model.state_dict().values(), checked.model.generator.get_state()]

    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(one, other)


def squares(model: nn.Module, x: Tensor, _: Tensor) -> None:
    model(x).square().mean().backward()


def of_sequences(model: nn.Module, x: Tensor, _: Tensor) -> None:
    model(torch.cat([x, x, x], dim=1)[:, :SIZE].T).square().mean().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layer", [Centred, Attending, lambda: nn.BatchNorm1d(8, momentum=0.1)])
def test_models_whose_samples_depend_on_each_other_are_found(
    layer: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), layer(), nn.Tanh(), nn.Linear(8, 5))
    checked = Checked(model, dtype)
    assert checked.train(of(F.cross_entropy)) is not isinstance(model[2], nn.BatchNorm1d)
    assert [text[:19] for text in checked.told] in ([], ["What its model give"])


@pytest.mark.filterwarnings("ignore:Using .torch.compile", "ignore:The .grad attribute")
@pytest.mark.parametrize(
    ("model", "step", "found"),
    [
        (lambda: nn.BatchNorm1d(6, track_running_stats=False), squares, True),
        (lambda: torch.compile(Centred(), backend="eager"), squares, True),
        (lambda: Tokens(max_norm=0.5), squares, True),
        (lambda: Tokens(scale_grad_by_freq=True, mode="sum"), squares, True),
        (Tokens, squares, False),
        (SequenceFirst, of_sequences, False),
    ],
    ids=["statistics", "compiled", "norms", "frequencies", "tokens", "sequences"],
)
def test_other_models(model: Callable[[], nn.Module], step: Any, found: bool) -> None:
    layers = nn.Sequential(nn.Linear(6, 6), model()) if step is squares else model()
    assert Checked(layers).train(step) is found


def test_float32_has_few_digits_on_gpus() -> None:
    """By cuDNN's default of TF32, for such sizes as it thinks fit."""
    found = []
    with FakeTensorMode():
        for device, dtype in (("cuda", torch.float32), ("cuda", torch.float64), ("cpu", None)):
            with FewDigits() as rounding:
                torch.ones(2, device=device, dtype=dtype) * 2
            found.append(rounding.is_found)
    assert found == [True, False, False]


@pytest.mark.parametrize(
    ("register", "hook", "found"),
    [
        ("register_hook", lambda gradient: gradient.clamp(-1, 1), True),
        ("register_hook", lambda gradient: None, False),
        ("register_post_accumulate_grad_hook", lambda weight: None, True),
    ],
)
def test_hooks_that_may_change_gradients_are_found(register: str, hook: Any, found: bool) -> None:
    checked = Checked(network())
    getattr(checked.model[0].weight, register)(hook)
    assert checked.train(of(F.cross_entropy)) is found


@pytest.mark.parametrize(
    ("register", "hook", "found"),
    [
        ("register_full_backward_pre_hook", lambda _, out: (out[0].clamp(-1, 1),), True),
        ("register_full_backward_hook", lambda _, into, out: (into[0].clamp(-1, 1),), True),
        ("register_full_backward_hook", lambda _, into, out: None, False),
    ],
)
def test_hooks_of_modules_that_change_gradients_are_found(
    register: str, hook: Any, found: bool
) -> None:
    checked = Checked(network())
    getattr(checked.model[2], register)(hook)
    assert checked.train(of(F.cross_entropy)) is found
    copied = copy.deepcopy(checked.model[2])
    for name in ("_backward_hooks", "_backward_pre_hooks"):
        assert list(getattr(copied, name).values()) in ([hook], [])


# -- numbers --------------------------------------------------------------------------------------


def test_a_tracked_number_is_a_number() -> None:
    size = tracked(6, (6, 2, 4))
    assert isinstance(size, TrackedInt)
    assert (size, size * 2, 1 / size, size // 4) == (6, 12, 1 / 6, 1)
    assert (2 * size).in_worlds == (12, 4, 8)
    assert (1 / (size - 2)).in_worlds[0] == 1 / 4  # one part is 1 / 0, and nobody's business
    assert type(plain(size)) is int
    assert type(pickle.loads(pickle.dumps(size * 0.5))) is float
    assert tracked(3, (3, 3, 3)).__class__ is int
