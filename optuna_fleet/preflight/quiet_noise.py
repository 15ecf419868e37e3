"""In a rehearsal's epochs each draw is one constant, so that it is the same in parts of a batch.

What it stands for is still drawn, and thrown away: generators move on as they would.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

_UNIFORM, _NORMAL = 0.37, 0.5
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")
_MODULES_OF_NUMPY = {
    **dict.fromkeys(("rand", "random", "random_sample", "sample", "uniform", "beta"), _UNIFORM),
    **dict.fromkeys(("randn", "normal", "standard_normal", "exponential"), _NORMAL),
}


class QuietNoise:
    """Takes the place of what draws by global generators; for good, in a throw-away process.

    A generator of the user's own is left as it is.

    Attributes:
        is_on: Draws are constants now.
        replaced: What stands for each function.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.replaced: dict[Any, Callable[..., Any]] = {}
        for name in ("rand", "rand_like"):
            self._put(torch, name, _filled(_UNIFORM))
        for name in ("randn", "randn_like", "normal"):
            self._put(torch, name, _filled(_NORMAL))
        self._put(torch, "randint", _middle)
        self._put(torch, "randint_like", _middle_like)
        self._put(torch, "randperm", lambda draw, n, *a, **k: draw(n, *a, **k).sort().values)
        self._put(torch, "bernoulli", lambda draw, p, *a, **k: (p > _UNIFORM).to(p.dtype))
        self._put(torch, "multinomial", _most_likely)
        in_place = {"normal_": _NORMAL, "uniform_": _UNIFORM, "exponential_": 0.7}
        for name, constant in {**in_place, "bernoulli_": 1.0, "cauchy_": _NORMAL}.items():
            self._put(Tensor, name, _filled(constant))
        for name in _DROPOUTS:
            self._put(functional, name, lambda draw, x, *a, **k: x)
        self._put(functional, "scaled_dot_product_attention", _without_dropout)
        for name in ("random", "betavariate"):
            self._put(random, name, lambda draw, *a: (draw(*a), _UNIFORM)[1])
        for name in ("gauss", "normalvariate"):
            self._put(random, name, lambda draw, *a: (draw(*a), _NORMAL)[1])
        self._put(random, "uniform", lambda draw, a, b: (draw(a, b), a + _UNIFORM * (b - a))[1])
        self._put(random, "randint", lambda draw, a, b: (draw(a, b), a)[1])
        self._put(random, "randrange", lambda draw, *a: (draw(*a), 0 if len(a) < 2 else a[0])[1])
        self._put(random, "choice", lambda draw, x: (draw(x), x[0])[1])
        self._put(random, "choices", lambda draw, x, *a, k=1, **more: [x[0]] * k)
        self._put(random, "shuffle", lambda draw, x: None)
        self._put(random, "sample", lambda draw, x, k: (draw(x, k), list(x)[:k])[1])
        for name, constant in _MODULES_OF_NUMPY.items():
            self._put(np.random, name, _constant(constant))
        self._put(np.random, "permutation", lambda draw, n: np.sort(draw(n)))
        self._put(np.random, "shuffle", lambda draw, x: None)
        self._put(np.random, "randint", _least)
        self._put(np.random, "choice", lambda draw, x, *a, **k: _first(draw(x, *a, **k), x))

    def _put(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        draw = getattr(owner, name, None)
        if draw is None:  # of another version
            return

        @wraps(draw)
        def drawn(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on or kwargs.get("generator") is not None:
                return draw(*args, **kwargs)
            return instead(draw, *args, **kwargs)

        setattr(owner, name, drawn)
        self.replaced[draw] = drawn

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block all is drawn as it is."""
        was, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = was


def without_dropout(module: nn.Module) -> None:
    """Have layers that drop out by themselves, in a kernel of their own, drop nothing."""
    for part in module.modules():
        if isinstance(part, nn.RNNBase | nn.MultiheadAttention):
            part.dropout = 0.0


def _filled(constant: float) -> Callable[..., Any]:
    return lambda draw, *args, **kwargs: draw(*args, **kwargs).detach().fill_(constant)


def _constant(constant: float) -> Callable[..., Any]:
    def instead(draw: Any, *args: Any, **kwargs: Any) -> Any:
        drawn = draw(*args, **kwargs)
        return np.full_like(drawn, constant) if isinstance(drawn, np.ndarray) else constant

    return instead


def _middle(draw: Any, *args: Any, **kwargs: Any) -> Any:
    numbers = [arg for arg in args if isinstance(arg, int)][:2]
    numbers = [kwargs[key] for key in ("low", "high") if key in kwargs] or numbers
    return draw(*args, **kwargs).fill_(sum(numbers) // 2)


def _middle_like(draw: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    return draw(x, *args, **kwargs).fill_(sum(args[:2]) // 2)


def _most_likely(draw: Any, weights: Any, num: int, *args: Any, **kwargs: Any) -> Any:
    drawn = draw(weights, num, *args, **kwargs)
    order = weights.argsort(-1, descending=True, stable=True)
    times = -(-num // order.shape[-1])
    return order.repeat(*[1] * (order.dim() - 1), times)[..., :num].to(drawn.device)


def _least(draw: Any, low: Any, high: Any = None, *args: Any, **kwargs: Any) -> Any:
    drawn = draw(low, high, *args, **kwargs)
    least = 0 if high is None else low
    return np.full_like(drawn, least) if isinstance(drawn, np.ndarray) else least


def _first(drawn: Any, items: Any) -> Any:
    first = 0 if isinstance(items, int) else items[0]
    return np.full_like(drawn, first) if isinstance(drawn, np.ndarray) else first


def _without_dropout(
    attend: Any,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    dropout_p: float = 0.0,
    *a: Any,
    **more: Any,
) -> Any:
    mask = more.pop("attn_mask", mask)
    return attend(q, k, v, mask, 0.0, *a, **more)
