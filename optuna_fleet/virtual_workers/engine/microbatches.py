"""A batch in parts, each of which goes through the pipeline by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.nested import map_tensors


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Some samples of a batch, and their share in the mean over it."""

    inputs: Any
    targets: Any
    weight: float


def num_samples(values: Any) -> int:
    """Length of the first tensor's first dimension.

    Raises:
        FleetConfigError: There is none.
    """
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.extend(tensor.shape[:1])
        return tensor

    map_tensors(values, note)
    if not sizes or not sizes[0]:
        raise FleetConfigError(
            f"The inputs are {values!r:.80}, but must be a batch: tensors, also in dicts, lists "
            "and tuples, whose first dimension counts its samples."
        )
    return sizes[0]


def microbatches(inputs: Any, targets: Any, number: int) -> Iterator[Microbatch]:
    """So many of them, whose sizes differ by 1 at most.

    A batch of fewer samples has stand-ins of weight 0. Tensors of another length go along whole.
    """
    size = num_samples(inputs)
    for place in range(number):
        if size >= number:
            first, end = place * size // number, (place + 1) * size // number
            weight = (end - first) / size
        else:
            first = min(place, size - 1)
            end, weight = first + 1, float(place < size) / size
        yield Microbatch(_cut(inputs, first, end, size), _cut(targets, first, end, size), weight)


def _cut(values: Any, first: int, end: int, size: int) -> Any:
    def some(tensor: Tensor) -> Tensor:
        return tensor[first:end] if tensor.shape[:1] == (size,) else tensor

    return map_tensors(values, some)
