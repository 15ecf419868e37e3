"""What objectives are rehearsed under: constant draws, numbers in float64, a few batches.

In parts of a batch draws are the same then, and only what is no rounding differs.

What torch draws is drawn and then overwritten; Python and NumPy draw with a new generator for each
call. Dropout, in layers too, is a mask that is 1. A generator of the user's own is left as it is.
torch's own goes on by as much for each draw, whatever its size: what is drawn after the epochs
(the next fold's weights) is the same after parts of a batch.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from optuna_fleet.accelerator import device_types
from optuna_fleet.pipeline.preprocessor import payload
from optuna_fleet.pipeline.reader.client import Batch, InlineClient
from optuna_fleet.pipeline.reader.read_plan import Batches, ReadPlan, planned
from optuna_fleet.pipeline.spec import PipelineSpec
from optuna_fleet.preflight.rehearsals import Order
from optuna_fleet.wire.packing import unpack

_UNIFORM, _NORMAL = 0.37, 0.5


def _most_likely(drawn: Tensor, weights: Any, num: int, *_: Any) -> Any:
    order = weights.argsort(dim=-1, descending=True, stable=True)
    return order.repeat(*[1] * (order.dim() - 1), -(-num // order.shape[-1]))[..., :num]


_OF_TORCH: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform_"), lambda *_: _UNIFORM),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_"), lambda *_: _NORMAL),
    **dict.fromkeys(("exponential_", "cauchy_", "log_normal_"), lambda *_: _NORMAL),
    **dict.fromkeys(("poisson", "geometric_", "_standard_gamma"), lambda *_: 1.0),
    "_sample_dirichlet": lambda drawn, *_: 1 / drawn.shape[-1],
    **dict.fromkeys(
        ("randint", "randint_like", "random_"),
        lambda _, *ends: sum(end for end in ends if isinstance(end, int)) // 2,
    ),
    **dict.fromkeys(
        ("bernoulli", "bernoulli_"),
        lambda _, *p: p[0] > _UNIFORM if p and isinstance(p[0], Tensor) else 1.0,
    ),
    "randperm": lambda drawn, *_: drawn.sort().values,
    "multinomial": _most_likely,
}
_OF_OTHERS: dict[str, Callable[..., Any]] = {
    "shuffle": lambda items: None,
    "permutation": lambda items: np.array(items) if np.ndim(items) else np.arange(items),
    "choices": lambda items, *_, k=1, **__: [items[0]] * k,
}
_NO_DRAWS = ("seed", "getstate", "setstate", "get_state", "set_state")


class QuietNoise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """To be entered for torch; takes the place of Python's and NumPy's functions for good.

    Attributes:
        is_on: Draws are constants now.
        is_rough: Something of less precision than float32 was computed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_on = self.is_rough = False
        self._replace(random, random.Random)
        self._replace(np.random, np.random.RandomState)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = kwargs or {}
        is_draw = self.is_on and torch.Tag.nondeterministic_seeded in func.tags
        state = torch.get_rng_state() if is_draw else None
        drawn = func(*args, **kwargs)
        if state is not None:
            torch.set_rng_state(state)
            torch.rand((), device="cpu")
            name = func.overloadpacket.__name__
            if name in _OF_TORCH and kwargs.get("generator") is None:
                given = args[1:] if name.endswith("_") else args
                drawn.copy_(torch.as_tensor(_OF_TORCH[name](drawn, *given)))
        self.is_rough |= getattr(drawn, "dtype", None) in (torch.float16, torch.bfloat16)
        return drawn

    def _replace(self, module: Any, generator: type[Any]) -> None:
        """Replace what is drawn with the generator that a module has."""
        for name, draw in list(vars(module).items()):
            is_draw = isinstance(getattr(draw, "__self__", None), generator)
            if is_draw and name not in _NO_DRAWS:
                setattr(module, name, self._quiet(draw, name, generator))

    def _quiet(self, draw: Any, name: str, generator: type[Any]) -> Any:
        @wraps(draw)
        def drawn(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return draw(*args, **kwargs)
            if name in _OF_OTHERS:
                return _OF_OTHERS[name](*args, **kwargs)
            made = getattr(generator(0), name)(*args, **kwargs)
            is_array = isinstance(made, np.ndarray) and made.size > 0
            return np.full_like(made, made.flat[0]) if is_array else made

        return drawn


# -- float64 --------------------------------------------------------------------------------------

_DOUBLE = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    torch.complex64: torch.complex128,
}
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}
_MOVES = {getattr(Tensor, name, None) for name in device_types()}
_MAKERS = {torch.tensor, torch.as_tensor, torch.from_numpy}


class InDouble(TorchFunctionMode):
    """While it is entered, what would be of less precision is float64, and on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.amp."):
            return func(*args, **(kwargs or {}))  # its scales are float32 whatever it scales
        if func in _CASTS:
            return args[0].double()
        if func in _MOVES:
            return args[0]
        args = tuple(map(_instead, args))
        kwargs = {name: _instead(value) for name, value in (kwargs or {}).items()}
        with torch._C._DisableAutocast():
            try:
                result = func(*args, **kwargs)
            except RuntimeError:  # perhaps of a tensor that the script has made
                again = in_double((args, kwargs))
                if _ids(again) == _ids((args, kwargs)):
                    raise
                result = func(*again[0], **again[1])
        return in_double(result) if func in _MAKERS else result


def _instead(value: Any) -> Any:
    """What stands for a type of numbers, or a device."""
    if isinstance(value, str | torch.device) and str(value).partition(":")[0] in device_types():
        return type(value)("cpu")
    return _DOUBLE.get(value, value) if isinstance(value, torch.dtype) else value


def _ids(value: Any) -> list[int]:
    return [id(leaf) for leaf in pytree.tree_leaves(value)]


def in_double(value: Any) -> Any:
    """Nested data, with its numbers in float64."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(_instead(tensor.dtype)), value)


# -- data -----------------------------------------------------------------------------------------


class Data(InlineClient):
    """A few batches of each pass, always of the same samples, the last batch of an odd size.

    Args:
        spec: Of the data sets.
        order: Says how much of them.
        noise: Is off while samples are made.

    Attributes:
        begin_pass: Called as each pass begins.
    """

    def __init__(self, spec: PipelineSpec, order: Order, noise: QuietNoise) -> None:
        assert order.payload is not None
        source = order.payload.load()
        source = replace(source, generators=payload.generators_in(source))
        collates = {each.name: unpack(each.collate) for each in spec.datasets if each.collate}
        super().__init__(spec, source, collates)
        self.begin_pass: Callable[[ReadPlan], object] = lambda plan: None
        self._order = order
        self._noise = noise
        self._made_samples: dict[tuple[str, int], Any] = {}

    def read(self, name: str, **arguments: Any) -> Batches[Batch]:
        """See `InlineClient`."""
        plan = planned(self.spec, name, **arguments)
        full = self._order.num_batches if self.spec.dataset(name).shuffled else 1
        return Batches(replace(plan, num_samples=_subset(plan, full)), self._made_of)

    def _made_of(self, plan: ReadPlan) -> Iterator[Batch]:
        self.begin_pass(plan)
        for batch in super()._made(plan):
            yield replace(batch, data=in_double(batch.data)) if self._order.is_double else batch

    def _batch(self, plan: ReadPlan, step: int) -> Batch:
        was, self._noise.is_on = self._noise.is_on, False
        try:
            return super()._batch(plan, step)
        finally:
            self._noise.is_on = was

    def _sample(self, plan: ReadPlan, position: int) -> Any:
        # In each mini-epoch in another place, or a rank would always have the same.
        position = (position + plan.epoch * (plan.num_samples // 3 | 1)) % plan.num_samples
        if (plan.name, position) not in self._made_samples:
            sample = super()._sample(replace(plan, epoch=0), position)
            self._made_samples[plan.name, position] = sample
        return self._made_samples[plan.name, position]


def _subset(plan: ReadPlan, num_full: int) -> int:
    """How many samples make so many batches, and one more of an odd size."""
    size = min(plan.batch_size, plan.num_samples)
    if plan.drop_last:
        return min(plan.num_samples // size, num_full) * size
    num = min(plan.num_samples, num_full * size + (size // 2 | 1))
    last = num % size or size
    return num if last % 2 or num == 1 else num - 1
