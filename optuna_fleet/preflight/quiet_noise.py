"""In a rehearsal's epochs each draw is one constant, so that it is the same in parts of a batch.

What torch draws is drawn and then overwritten; Python and NumPy draw with a new generator for each
call. Dropout, in layers too, is a mask that is 1. A generator of the user's own is left as it is.
torch's own goes on by as much for each draw, whatever its size: what is drawn after the epochs
(the next fold's weights) is the same after parts of a batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
