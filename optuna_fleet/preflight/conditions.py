"""What objectives are rehearsed under: each draw is a constant, and numbers are in float64.

In parts of a batch draws are the same then, and only what is no rounding differs.

What torch draws is drawn and then overwritten; Python and NumPy draw with a new generator for each
call. Dropout, in layers too, is a mask that is 1. A generator of the user's own is left as it is.
torch's own goes on by as much for each draw, whatever its size: what is drawn after the epochs
(the next fold's weights) is the same after parts of a batch.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from optuna_fleet.accelerator import device_types

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
