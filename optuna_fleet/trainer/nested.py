"""Nested data: dicts, lists and tuples of tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree


def to_device(data: Any, device: torch.device) -> Any:
    """Copy of the nested `data` (dicts, lists, tuples) with every tensor on `device`."""
    return map_tensors(
        data, lambda tensor: tensor.to(device, non_blocking=True), lambda own: own.to(device)
    )


def moves_itself(data: Any) -> bool:
    """Whether `data` has a way of its own to a device: `PackedSequence`, a user's batch class."""
    plain = type(data) in (dict, list, tuple) or isinstance(data, torch.Tensor)
    return not plain and hasattr(data, "to")


def map_tensors(
    data: Any,
    function: Callable[[torch.Tensor], torch.Tensor],
    others: Callable[[Any], Any] = lambda data: data,
) -> Any:
    """The nested `data` with `function` applied to every tensor, `others` to what moves itself."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if moves_itself(data):
        return others(data)
    return _map_children(data, lambda child: map_tensors(child, function, others))


def map_leaves(data: Any, function: Callable[[Any], Any]) -> Any:
    """The nested `data` with `function` applied to all that is no dict, list or tuple."""
    if isinstance(data, (dict, list, tuple)):
        return _map_children(data, lambda child: map_leaves(child, function))
    return function(data)


def _map_children(data: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(data, dict):
        return {key: function(child) for key, child in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(function, data))
    return type(data)(map(function, data)) if isinstance(data, (list, tuple)) else data


def lengths_in(data: Any) -> set[int]:
    """Those of tensors and arrays along their first axis, and of lists and tuples."""
    if isinstance(data, Mapping):
        return set().union(*map(lengths_in, data.values()))
    if isinstance(data, (list, tuple)):
        return {len(data)}.union(*map(lengths_in, data))
    return {len(data)} if getattr(data, "shape", ()) else set()


def tensors_in(data: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested data, also in what is a mapping but no dict (of Transformers, say)."""
    for leaf in pytree.tree_leaves(data):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensors_in(dict(leaf))
