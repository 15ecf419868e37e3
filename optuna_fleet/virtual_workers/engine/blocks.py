"""Where a model can be cut."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def blocks_of(model: nn.Sequential, *, may_part_ties: bool) -> tuple[int, ...]:
    """Where runs of layers end that can't be cut, as they share something.

    Args:
        model: Its layers.
        may_part_ties: Whether layers that share a parameter may be in several stages. Those that
            share a module with parameters or buffers never are.
    """
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for place, layer in enumerate(model):
        for key in _held_by(layer, may_part_ties=may_part_ties):
            first.setdefault(key, place)
            last[key] = place
    spans = [(first[key], last[key]) for key in first]
    return tuple(
        end
        for end in range(1, len(model) + 1)
        if not any(begins < end <= ends for begins, ends in spans)
    )


def _held_by(layer: nn.Module, *, may_part_ties: bool) -> Iterator[int]:
    for module in layer.modules():
        if module._parameters or module._buffers:
            yield id(module)
    if not may_part_ties:
        yield from map(id, layer.parameters())
