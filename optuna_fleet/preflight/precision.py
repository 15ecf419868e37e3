"""An objective in float64, whatever precision it asks for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_DOUBLE = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    torch.complex64: torch.complex128,
}
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}
_MAKERS = {torch.tensor, torch.as_tensor, torch.from_numpy}


class InDouble(TorchFunctionMode):
    """While it is entered, what would be of less precision is float64.

    Args:
        replaced: Functions to call in the place of others.
    """

    def __init__(self, replaced: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._replaced = replaced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        kwargs = kwargs or {}
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.amp."):
            return func(*args, **kwargs)  # its scales are float32 whatever it scales
        if func in _CASTS:
            return args[0].double()
        if any(type(arg) is torch.dtype for arg in args):
            args = tuple(_DOUBLE.get(a, a) if type(a) is torch.dtype else a for a in args)
        if "dtype" in kwargs:
            kwargs = {**kwargs, "dtype": _DOUBLE.get(kwargs["dtype"], kwargs["dtype"])}
        try:
            result = self._replaced.get(func, func)(*args, **kwargs)
        except RuntimeError:  # perhaps of a tensor that the script has made
            if not _are_mixed(again := in_double((args, kwargs)), (args, kwargs)):
                raise
            args, kwargs = again
            result = self._replaced.get(func, func)(*args, **kwargs)
        return in_double(result) if func in _MAKERS else result


def _are_mixed(cast: Any, given: Any) -> bool:
    pairs = zip(pytree.tree_leaves(cast), pytree.tree_leaves(given), strict=True)
    return any(one is not other for one, other in pairs)


def in_double(value: Any) -> Any:
    """Nested data, with its numbers in float64."""
    return pytree.tree_map_only(Tensor, _one, value)


def _one(tensor: Tensor) -> Tensor:
    return tensor.to(_DOUBLE[tensor.dtype]) if tensor.dtype in _DOUBLE else tensor


def double_(module: nn.Module) -> None:
    """Have a module compute in float64."""
    module._apply(_one)  # type: ignore[no-untyped-call]


def watch_autocast(*, is_double: bool) -> list[Any]:
    """Return a list that will not be empty once autocast was used; which does nothing in float64.

    For good.
    """
    kind: Any = torch.amp.autocast_mode.autocast
    begin, used = kind.__init__, list[Any]()

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        begin(self, *args, **kwargs)
        used.append(self.fast_dtype)
        self._enabled = self._enabled and not is_double

    kind.__init__ = __init__
    return used
