"""Samples compared to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from optuna_fleet.pipeline.chunks.pickling import dumps_outside


def same(left: Any, right: Any) -> bool:
    """Whether two samples are of the same structure, types and bits.

    Objects that are no tensors, arrays or numbers must be equal by ``==``.
    """
    if type(left) is not type(right):
        return False
    if type(left) is dict:
        return [*left] == [*right] and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
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
    try:
        before = copy.deepcopy(sample)  # making it again may write into it
        again = copy.deepcopy(make())  # as a set in it may come in another order then
        return same(before, again) or dumps_outside(before) == dumps_outside(again)
    except Exception:
        return True  # of the moment, perhaps: it says nothing of the sample
