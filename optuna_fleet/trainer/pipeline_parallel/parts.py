"""A model in parts: names stay those of the whole, whatever part a parameter is in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from torch import nn


def part_of(model: nn.Sequential, first: int, end: int) -> nn.Sequential:
    """Layers `first` up to, without, `end`, as they are in `model`."""
    layers = list(model._modules.items())[first:end]  # `named_children` gives repeated ones once
    return nn.Sequential(OrderedDict((name, layer) for name, layer in layers if layer is not None))


def parameters_of(part: nn.Module) -> Mapping[str, nn.Parameter]:
    """Parameters that are trained."""
    return {name: p for name, p in part.named_parameters() if p.requires_grad}
