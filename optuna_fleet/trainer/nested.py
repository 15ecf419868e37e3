"""Nested data: dicts, lists and tuples of tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def to_device(data: Any, device: torch.device) -> Any:
    """Copy of the nested `data` (dicts, lists, tuples) with every tensor on `device`."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if hasattr(data, "to") and not isinstance(data, (dict, list, tuple)):
        return data.to(device)  # a batch class of the user's collate_fn
    return map_children(data, lambda child: to_device(child, device))


def map_tensors(data: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The nested `data` (dicts, lists, tuples) with `function` applied to every tensor."""
    if isinstance(data, torch.Tensor):
        return function(data)
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
