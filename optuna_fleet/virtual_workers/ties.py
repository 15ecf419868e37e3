"""Parameters that layers share, wherever these are: their gradients are added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from optuna_fleet.trainer.groups import gloo_group
from optuna_fleet.virtual_workers.parameter_server import Directory


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
    """``takes``: what each layer's gradient comes to, if it is here."""

    parameter: nn.Parameter
    takes: list[nn.Parameter | None]
    group: dist.ProcessGroup | None


class Ties:
    """This rank's shared parameters.

    Each layer has its gradient by itself. All stages with such a layer add these up, in the order
    of layers, and step alike: so results do not depend on where the layers are.

    All ranks of the trial must make one, at the same time. Of layers here that share a parameter
    all but the first get one of their own in the same memory, so that gradients do not mix.

    Args:
        shared: What they shared when all of them were here.
    """

    def __init__(
        self, model: nn.Sequential, shared: Sequence[Shared], directory: Directory, rank: int
    ) -> None:
        self._slots = [one.slots for one in shared]  # without the parameters: some are elsewhere
        self._trained = [one.parameter.requires_grad for one in shared]
        self._ties: list[_Tie] = []
        pieces = [*directory.layers.values()]
        for one in shared:
            ranks_of = {place: directory.ranks_with(pieces[place]) for place in one.layers}
            holders = sorted({its for ranks in ranks_of.values() for its in ranks})
            group = gloo_group(holders) if len(holders) > 1 else None
            if rank not in holders:
                continue
            here = [place for place, ranks in ranks_of.items() if rank in ranks]
            own = {place: _own(model[place], one.parameter) for place in here[1:]}
            own[here[0]] = one.parameter
            takes = [own.get(place) for place in one.layers]
            self._ties.append(_Tie(one.parameter, takes, group))

    def heed(self) -> None:
        """Whose `requires_grad` was changed in one layer, here or not, is changed in all."""
        for number, slots in enumerate(self._slots):
            its = [p for module, name in slots if (p := module._parameters[name]) is not None]
            if any(parameter.requires_grad != self._trained[number] for parameter in its):
                self._trained[number] = not self._trained[number]
                for parameter in its:
                    parameter.requires_grad_(self._trained[number])

    @torch.no_grad()
    def add_up(self, *, is_copy: bool) -> None:
        """Of all layers, to the shared parameter, which is the optimizer's; all must call it.

        Args:
            is_copy: Another virtual worker gives the same, and is counted.
        """
        for parameter, takes, group in self._ties:
            # A row for each layer; in the end of it whether that has a gradient.
            rows = torch.zeros(len(takes), parameter.numel() + 1, dtype=parameter.dtype)
            for row, own in zip(rows, takes, strict=True):
                if own is not None and own.grad is not None:
                    if not is_copy:
                        row[:-1], row[-1] = own.grad.to_dense().reshape(-1), 1
                    own.grad = None
            if group is not None:
                dist.all_reduce(rows, group=group)
            if given := [row[:-1] for row in rows if row[-1]]:
                total = reduce(torch.add, given).view_as(parameter)
                parameter.grad = total.to(parameter.device)

    def close(self) -> None:
        """End the connections: others may wait for this rank, who has failed."""
        self._ties.clear()


def _own(layer: nn.Module, shared: nn.Parameter) -> nn.Parameter:
    """Give the layer a parameter of its own, in the memory of the shared one."""
    own = nn.Parameter(shared.detach(), requires_grad=shared.requires_grad)
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is shared:
                module._parameters[name] = own
    return own
