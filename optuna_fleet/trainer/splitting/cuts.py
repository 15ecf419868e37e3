"""The rows that a tensor has for the whole batch and for its parts, as `worlds` follow them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from optuna_fleet.pipeline.machine_memory import available_bytes
from optuna_fleet.trainer.checkpoints.states import uncompiled

MOST_NUMBERS = 2**25
"""Of an output or a model that is followed whole: three copies of 256 MB in float64."""

_BYTES_PER_NUMBER = 32  # a float32, its copy, what the loss makes of it, its gradient; twice
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5}
_COARSE = 1e-2


class CannotFollowError(Exception):
    """It can't be told what a part of the batch would give."""


class MixedError(CannotFollowError):
    """Samples are made of several samples of the batch."""


class TooLargeError(CannotFollowError):
    """It would take too much memory.

    Attributes:
        num_samples: As many could be followed; 0 if not even two.
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__("too large")
        self.num_samples = num_samples


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Where samples are along a dimension of a tensor of the objective's.

    Attributes:
        whole: Its rows that are followed.
        parts: Which of these are in each of the two parts.
    """

    whole: Tensor
    parts: Sequence[Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A tensor of the objective's, as leaves of the graphs of the worlds.

    Attributes:
        leaves: It in each world.
        rows: Which rows of the whole are in the two parts.
        axis: The dimension that these rows are along.
    """

    leaves: Sequence[Tensor]
    rows: Sequence[Tensor]
    axis: int

    @classmethod
    def of(cls, tensor: Tensor, rows: Rows, axis: int, dtype: torch.dtype) -> Cut:
        """Copies the rows of `tensor`, in that type if they are no whole numbers."""
        device = tensor.device
        parts = [part.to(device) for part in rows.parts]
        chosen = tensor.detach().index_select(axis, rows.whole.to(device))
        leaves = [
            exact(some, dtype).requires_grad_(tensor.requires_grad)
            for some in (chosen, *(chosen.index_select(axis, part) for part in parts))
        ]
        return cls(leaves, parts, axis)


def check_fits(tensors: list[Tensor], size: int, num_followed: int | None) -> None:
    """Check that outputs of a batch can be followed in the memory that there is.

    Args:
        tensors: The outputs.
        size: Samples of the batch.
        num_followed: How many of them are followed; all if None.

    Raises:
        TooLargeError: They can't.
    """
    largest = max(tensors, key=Tensor.numel)
    if num_followed is None:
        if largest.numel() > MOST_NUMBERS:
            raise TooLargeError(max(2, MOST_NUMBERS * size // largest.numel()))
        return
    numbers = sum(tensor.numel() for tensor in tensors) * num_followed // max(size, 1)
    if numbers * _BYTES_PER_NUMBER > _room(largest.device):
        raise TooLargeError(0)


def _room(device: torch.device) -> int:
    if device.type != "cuda":
        return available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def find_rows(tensor: Tensor, whole: Tensor, parts: Sequence[Tensor]) -> Rows:
    """Where the rows of the whole are in a tensor, and those of its parts in the whole.

    Raises:
        CannotFollowError: Some are not to be found, or several alike.
        MixedError: Those of the parts are others than those of the whole.
    """
    first, second = parts
    everything = torch.arange(len(whole), device=whole.device)
    close = _COARSE if has_few_digits(whole) else _CLOSE.get(whole.dtype, _CLOSE[torch.float64])
    are_all = len(first) + len(second) == len(whole)
    if are_all and _are_close(torch.cat([first, second]), whole, close):
        found = [everything[: len(first)], everything[len(first) :]]
    else:
        error = MixedError if are_all else CannotFollowError
        found = [_places(whole, part, close, error) for part in parts]
        if len(set(torch.cat(found).tolist())) < len(whole):
            raise CannotFollowError("rows that are alike")
    rough = _CLOSE.get(tensor.dtype, _COARSE)
    if len(tensor) == len(whole) or _are_close(tensor[: len(whole)], whole, rough):
        return Rows(everything, found)
    kept = _places(tensor, whole, max(rough, close))
    if len(set(kept.tolist())) < len(whole):
        raise CannotFollowError("rows that are alike")
    return Rows(kept, found)


def _are_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if not other.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one.to(other.dtype), other, rtol=tolerance, atol=0, equal_nan=True)


def _places(
    whole: Tensor, part: Tensor, tolerance: float, error: type[Exception] = CannotFollowError
) -> Tensor:
    """Which row of the whole each row of the part is."""
    marks = [some.reshape(len(some), -1).double() for some in (whole, part)]
    line = torch.linspace(1, 2, marks[0].shape[1], dtype=torch.float64, device=whole.device).sin()
    ours, theirs = (mark @ line for mark in marks)
    gaps = (theirs[:, None] - ours[None, :]).abs()
    if bool((gaps.amin(1) > tolerance * ours.abs().amax()).any()):
        raise error("rows")
    return gaps.argmin(1)


def twin_of(module: torch.nn.Module, *, shares_weights: bool) -> torch.nn.Module:
    """A copy, in eval mode and not compiled, that does not tell anybody what it does.

    Raises:
        CannotFollowError: It would call the original.
    """
    memo: dict[int, Any] = {}
    if shares_weights:
        memo = {
            id(own): torch.nn.Parameter(own.detach(), requires_grad=own.requires_grad)
            for own in module.parameters()
        }
    with uncompiled(module) as own:
        twin: torch.nn.Module = copy.deepcopy(own, memo).eval()
    for part in twin.modules():
        if "forward" in vars(part) and getattr(part.forward, "__self__", None) is not part:
            raise CannotFollowError("forward")
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
            hooks.clear()
    return twin


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


class WeightsUnchanged(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, what would write to parameters of a module raises CannotFollowError."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shared = {own.untyped_storage().data_ptr() for own in module.parameters()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments if func._schema.is_mutable else []
        given = {**dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}
        written = [given.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
        for leaf in pytree.tree_leaves(written):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in self._shared:
                raise CannotFollowError("weights")
        return func(*args, **kwargs)


def exact(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, as what changes it must not change what is the objective's."""
    return tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()
