"""An objective in float64 on the CPU, whatever precision and device it asks for."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from optuna_fleet.accelerator import device_types

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
