"""Parameters that layers share, wherever these are: their gradients are added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from optuna_fleet.virtual_workers.edges import Edges
from optuna_fleet.virtual_workers.parameter_server import Directory
from optuna_fleet.virtual_workers.stage_messages import StageAddress, Tensors


@dataclass(frozen=True, slots=True)
class Shared:
    """A parameter, as the embedding of a language model, and the layers that have it, in order.

    Attributes:
        layers: Their places; more than one.
        slots: Modules that have it, by which names; also those of one layer.
    """

    parameter: nn.Parameter
    layers: list[int] = field(default_factory=list)
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)


def shared_parameters(model: nn.Sequential) -> list[Shared]:
    """Those of a model, in the order in which the layers come to them.

    A module that is in several layers has one gradient, and counts for the first of them.
    """
    found: dict[int, Shared] = {}
    seen: set[nn.Module] = set()
    for place, layer in enumerate(model):
        new = [module for module in layer.modules() if module not in seen]
        seen.update(new)
        own = [(m, name, p) for m in new for name, p in m._parameters.items() if p is not None]
        for module, name, parameter in own:
            one = found.setdefault(id(parameter), Shared(parameter))
            one.slots.append((module, name))
            if place not in one.layers:
                one.layers.append(place)
    return [one for one in found.values() if len(one.layers) > 1]


class _Tie(NamedTuple):
    """``own``: what gradients of layers that are here come to; ``ring``: ranks with some."""

    parameter: nn.Parameter
    own: list[nn.Parameter]
    ring: list[int]


class Ties:
    """This rank's shared parameters.

    Each layer has its gradient by itself. All stages with such a layer add these up, in the order
    of layers, and step alike: so results do not depend on where the layers are.

    Of layers here that share a parameter all but the first get one of their own in the same
    memory, so that gradients do not mix.

    Args:
        shared: What they shared when all of them were here.
        address: Of this rank's stage.
    """

    def __init__(
        self,
        model: nn.Sequential,
        shared: Sequence[Shared],
        directory: Directory,
        address: StageAddress,
        edges: Edges,
    ) -> None:
        self._edges = edges
        self._slots = [one.slots for one in shared]  # without the parameters: some are elsewhere
        self._trained = [one.parameter.requires_grad for one in shared]
        self._ties: dict[int, _Tie] = {}
        pieces = [*directory.layers.values()]
        rank = directory.stages[address]
        for number, one in enumerate(shared):
            ranks = [directory.ranks_with(pieces[layer])[address.worker] for layer in one.layers]
            here = [layer for layer, its in zip(one.layers, ranks, strict=True) if its == rank]
            if here:
                copies = [_own(model[layer], one.parameter) for layer in here[1:]]
                tie = _Tie(one.parameter, [one.parameter, *copies], list(dict.fromkeys(ranks)))
                self._ties[-1 - number] = tie  # other sums' numbers begin at 0

    def heed(self) -> None:
        """Whose `requires_grad` was changed in one layer, here or not, is changed in all."""
        for number, slots in enumerate(self._slots):
            its = [p for module, name in slots if (p := module._parameters[name]) is not None]
            if any(parameter.requires_grad != self._trained[number] for parameter in its):
                self._trained[number] = not self._trained[number]
                for parameter in its:
                    parameter.requires_grad_(self._trained[number])

    @torch.no_grad()
    def add_up(self) -> None:
        """Of all layers, to the shared parameter, which is the optimizer's; all must call it."""
        rings = {number: tie.ring for number, tie in self._ties.items()}
        for number, sums in self._edges.around(rings, self._with_own).items():
            parameter = self._ties[number].parameter
            for total in sums.values():
                parameter.grad = total.to(parameter.device, copy=True)

    def _with_own(self, number: int, before: Tensors) -> Tensors:
        sums = dict(before)
        for parameter in self._ties[number].own:
            if parameter.grad is not None:
                gradient = parameter.grad.to_dense().cpu()
                sums[""] = sums[""] + gradient if sums else gradient
                parameter.grad = None
        return sums


def _own(layer: nn.Module, shared: nn.Parameter) -> nn.Parameter:
    """Give the layer a parameter of its own, in the memory of the shared one."""
    own = nn.Parameter(shared.detach(), requires_grad=shared.requires_grad)
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is shared:
                module._parameters[name] = own
    return own
