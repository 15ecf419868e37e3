"""How exactly tensors agree that are computed of the whole batch, and of a part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Tolerance:
    """By how much they may differ, relatively.

    Attributes:
        double: Computed in float64.
        single: In float32.
        coarse: With few digits, see `has_few_digits`.
    """

    double: float
    single: float
    coarse: float

    def of(self, dtype: torch.dtype) -> float:
        """What is allowed in that type; whole numbers are as exact as float64."""
        if dtype is torch.float64 or not dtype.is_floating_point:
            return self.double
        return self.single if dtype is torch.float32 else self.coarse


class FewDigits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether anything is computed with few digits while this is active.

    In half precision, as under ``torch.autocast``, or on a GPU in float32: convolutions may be in
    TF32 there, which has the digits of float16, and that for one size and not for another.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self.is_found |= any(map(has_few_digits, tensors))
        return result


def has_few_digits(tensor: Tensor) -> bool:
    """Whether it may be exact to three digits only."""
    is_rounded = tensor.dtype is torch.float32 and tensor.is_cuda
    return is_rounded or tensor.dtype in (torch.bfloat16, torch.float16)


def exact(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, as what changes it must not change what is the objective's."""
    return tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()
