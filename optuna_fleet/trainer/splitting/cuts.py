"""The rows that a tensor has for the whole batch and for its parts, as `worlds` follow them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optuna_fleet.pipeline.machine_memory import available_bytes
from optuna_fleet.trainer.splitting.errors import CannotFollowError, MixedError, TooLargeError
from optuna_fleet.trainer.splitting.precision import Tolerance, exact, has_few_digits

MOST_NUMBERS = 2**25
"""Of an output or a model that is followed whole: three copies of 256 MB in float64."""

_BYTES_PER_NUMBER = 32  # a float32, its copy, what the loss makes of it, its gradient; twice
_TOLERANCE = Tolerance(double=1e-9, single=1e-5, coarse=1e-2)


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
    close = _TOLERANCE.coarse if has_few_digits(whole) else _TOLERANCE.of(whole.dtype)
    are_all = len(first) + len(second) == len(whole)
    if are_all and _are_close(torch.cat([first, second]), whole, close):
        found = [everything[: len(first)], everything[len(first) :]]
    else:
        error = MixedError if are_all else CannotFollowError
        found = [_places(whole, part, close, error) for part in parts]
        if len(set(torch.cat(found).tolist())) < len(whole):
            raise CannotFollowError("rows that are alike")
    rough = _TOLERANCE.of(tensor.dtype)
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
