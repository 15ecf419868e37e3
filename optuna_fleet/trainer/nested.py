"""Nested data: dicts, lists and tuples of tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def to_device(data: Any, device: torch.device) -> Any:
    """Copy of the nested `data` (dicts, lists, tuples) with every tensor on `device`."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if moves_itself(data):
        return data.to(device)
    return map_children(data, lambda child: to_device(child, device))


def moves_itself(data: Any) -> bool:
    """Whether `data` has a way of its own to a device: `PackedSequence`, a user's batch class."""
    plain = type(data) in (dict, list, tuple) or isinstance(data, torch.Tensor)
    return not plain and hasattr(data, "to")


def map_tensors(data: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The nested `data` (dicts, lists, tuples) with `function` applied to every tensor.

    What moves itself stays as it is.
    """
    if isinstance(data, torch.Tensor):
        return function(data)
    if moves_itself(data):
        return data
    return map_children(data, lambda child: map_tensors(child, function))


def map_children(data: Any, function: Callable[[Any], Any]) -> Any:
    """The same container with `function` applied to what it holds directly."""
    if isinstance(data, dict):
        return {key: function(child) for key, child in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(function, data))
    if isinstance(data, (list, tuple)):
        return type(data)(map(function, data))
    return data


def rebuild(values: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure with `function` applied to its leaves."""
    if isinstance(values, (dict, list, tuple)):
        return map_children(values, lambda child: rebuild(child, function))
    return function(values)
