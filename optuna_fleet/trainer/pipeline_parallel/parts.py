"""A model in parts: names stay those of the whole, whatever part a parameter is in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import nn

from optuna_fleet.exceptions import FleetConfigError


def part_of(model: nn.Sequential, first: int, end: int) -> nn.Sequential:
    """Layers `first` up to, without, `end`, as they are in `model`."""
    layers = list(model._modules.items())[first:end]  # `named_children` gives repeated ones once
    return nn.Sequential(OrderedDict((name, layer) for name, layer in layers if layer is not None))


def check_parts(model: nn.Sequential, cuts: Sequence[int]) -> None:
    """Refuse cuts that make no stages, and parameters that several stages would have.

    Raises:
        FleetConfigError: The cuts do not rise within the model, or separate layers that share a
            parameter.
    """
    bounds = [0, *cuts, len(model)]
    if any(end <= first for first, end in pairwise(bounds)):
        raise FleetConfigError(
            f"The value of `cuts` is {list(cuts)}, but must rise from at least 1 to at most "
            f"{len(model) - 1}, as the model has {len(model)} layers and no stage is empty."
        )
    owner: dict[int, tuple[int, str]] = {}
    for stage, (first, end) in enumerate(pairwise(bounds)):
        for name, parameter in part_of(model, first, end).named_parameters():
            other, its_name = owner.setdefault(id(parameter), (stage, name))
            if other != stage:
                raise FleetConfigError(
                    f"The parameters {its_name!r} and {name!r} are the same, but would be in the "
                    f"stages {other} and {stage}. Cut so that they are in one stage, or give the "
                    "layers a parameter each."
                )


def parameters_of(part: nn.Module) -> Mapping[str, nn.Parameter]:
    """Parameters that are trained."""
    return {name: p for name, p in part.named_parameters() if p.requires_grad}
