"""Samples compared to the last bit, and their size; images included.

Some that came from the decoded store are made again, to see whether they agree.
"""

from __future__ import annotations

import copy
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from optuna_fleet.pipeline.chunks.columns import is_picture, leaf_bytes
from optuna_fleet.pipeline.chunks.structure import flatten

EVERY = 500
"""One in so many is made again."""

SHARE = 0.004
"""Most of this process' time that may be spent on it: some samples take long to make."""


def nbytes(sample: Any) -> int:
    """Returns about how many bytes the sample's leaves take."""
    leaves: list[Any] = []
    flatten(sample, leaves)
    return sum(map(leaf_bytes, leaves))


def same(left: Any, right: Any) -> bool:
    """Whether two samples are of the same structure, types and bits.

    Objects that are no tensors, arrays, images or numbers must be equal by ``==``.
    """
    lefts: list[Any] = []
    rights: list[Any] = []
    if flatten(left, lefts) != flatten(right, rights):
        return False
    return all(map(_same_leaf, lefts, rights))


def _same_leaf(left: Any, right: Any) -> bool:
    if is_picture(left) and is_picture(right):
        return bool(
            (left.mode, left.size) == (right.mode, right.size)
            and left.getpalette() == right.getpalette()
            and left.tobytes() == right.tobytes()
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        looks = ("dtype", "shape", "device", "layout", "requires_grad")
        alike = all(getattr(left, look) == getattr(right, look) for look in looks)
        # What tv_tensors know beside their values: the format and canvas of boxes.
        return alike and vars(left) == vars(right) and torch.equal(_bits(left), _bits(right))
    if isinstance(left, (np.ndarray, np.generic)):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        is_equal = (left == right).all() if left.dtype.hasobject else None
        return left.tobytes() == right.tobytes() if is_equal is None else bool(is_equal)
    return bool(left == right or (left != left and right != right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor).contiguous().reshape(-1).view(torch.uint8)


def comes_again(sample: Any, make: Callable[[], Any]) -> bool:
    """Returns whether a sample that is made again is the same, or can't be told to be another.

    Objects without an ``__eq__`` of their own equal only themselves: they are compared as pickled.
    """
    from optuna_fleet.pipeline.preprocessor.decoded_samples import pack

    try:
        before = copy.deepcopy(sample)  # making it again may write into it
        again = make()
        return same(before, again) or b"".join(pack(before)) == b"".join(pack(again))
    except Exception:
        return True  # of the moment, perhaps: it says nothing of the sample


class Audit:
    """Finds data sets that depend on what the pipeline can't see; for one preprocessor.

    Attributes:
        mismatches: By data set, the first sample that came out differently.
    """

    def __init__(self, busy_s: Callable[[], float] = time.process_time) -> None:
        self._busy_s = busy_s
        self._spent_s = 0.0
        self._last_s = 0.0
        self.mismatches: dict[str, int] = {}

    def is_due(self, epoch: int, index: int) -> bool:
        """Returns whether to make this sample again: of each epoch others."""
        if zlib.crc32(struct.pack("<QQ", epoch, index)) % EVERY:
            return False
        return self._spent_s + self._last_s <= SHARE * self._busy_s()

    def agrees(self, name: str, index: int, ours: Any, make: Callable[[], Any]) -> bool:
        """Returns whether a sample is what ``make`` gives, and notes it if not."""
        began = time.perf_counter()
        try:
            agrees = same(ours, make())
        except Exception:
            agrees = True  # of the moment, perhaps: it says nothing of the store
        self._last_s = time.perf_counter() - began
        self._spent_s += self._last_s
        if not agrees:
            self.mismatches.setdefault(name, index)
        return agrees
