"""Parameters that layers in several stages share, as the embedding and head of a language model.

Each layer that uses one has its gradient by itself, wherever it is. At the flush all stages that
have the parameter add these up, in the order of layers, and step alike: so results do not depend
on where the layers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optuna_fleet.trainer.groups import gloo_group


@dataclass(frozen=True, slots=True)
class Shared:
    """A parameter, and the layers that have it: more than one, in order.

    Attributes:
        layers: Their places.
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


def shared_bytes(model: nn.Sequential) -> int:
    """What a flush sends of their gradients, if all layers that share parameters are parted."""
    return sum(one.parameter.nbytes * len(one.layers) for one in shared_parameters(model))


class _Use(NamedTuple):
    """Of a parameter by a layer: where that is, and if here, what gets its gradient."""

    rank: int
    takes: nn.Parameter | None


class _Tie(NamedTuple):
    parameter: nn.Parameter
    uses: list[_Use]
    group: dist.ProcessGroup | None


class Ties:
    """This rank's shared parameters, with one stage of a pipeline on each rank.

    All ranks of the trial must make one, at the same time. Of layers here that share a parameter
    all but the first get one of their own in the same memory, so that gradients do not mix.

    Args:
        shared: What they shared when all of them were here.
        pipelines: Of each the cuts, and the ranks of its stages.
    """

    def __init__(
        self,
        model: nn.Sequential,
        shared: Sequence[Shared],
        pipelines: Sequence[tuple[Sequence[int], Sequence[int]]],
        rank: int,
    ) -> None:
        self._rank = rank
        self._slots = [one.slots for one in shared]  # without the parameters: some are elsewhere
        self._trained = [one.parameter.requires_grad for one in shared]
        self._ties: list[_Tie] = []
        for cuts, ranks in pipelines:
            for one in shared:
                at = [ranks[stage] for stage in _stages(one, cuts)]
                holders = sorted(set(at))
                group = gloo_group(holders) if len(holders) > 1 else None
                if rank in at:
                    self._ties.append(_Tie(one.parameter, self._uses(model, one, at), group))

    def _uses(self, model: nn.Sequential, one: Shared, at: Sequence[int]) -> list[_Use]:
        uses: list[_Use] = []
        for place, its_rank in zip(one.layers, at, strict=True):
            takes = None
            if its_rank == self._rank:
                is_first = all(use.takes is None for use in uses)
                takes = one.parameter if is_first else _own(model[place], one.parameter)
            uses.append(_Use(its_rank, takes))
        return uses

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
        """Give each layer that has a parameter the gradients of all; all ranks must call it."""
        for tie in self._ties:
            total: Tensor | None = None
            for use in tie.uses:
                gradient = self._gradient(tie, use)
                if gradient is not None:
                    total = gradient if total is None else total + gradient
            for use in tie.uses:
                if use.takes is not None:
                    use.takes.grad = total

    def clear(self) -> None:
        """Leave the gradient with the shared parameter alone, which is the optimizer's."""
        for tie in self._ties:
            for use in tie.uses:
                if use.takes is not None and use.takes is not tie.parameter:
                    use.takes.grad = None

    def close(self) -> None:
        """End the connections: others may wait for this rank, who has failed."""
        self._ties.clear()

    def _gradient(self, tie: _Tie, use: _Use) -> Tensor | None:
        own = None if use.takes is None else use.takes.grad
        if own is not None and own.is_sparse:
            own = own.to_dense()
        if tie.group is None:
            return own
        parameter = tie.parameter
        sent = torch.zeros(parameter.numel() + 1, dtype=parameter.dtype)  # the last: if there is
        if own is not None:
            sent[:-1], sent[-1] = own.reshape(-1), 1
        dist.broadcast(sent, src=use.rank, group=tie.group)
        if not sent[-1]:
            return None
        return sent[:-1].view(parameter.shape).to(parameter.device)


def _own(layer: nn.Module, shared: nn.Parameter) -> nn.Parameter:
    """Give the layer a parameter of its own, in the memory of the shared one."""
    own = nn.Parameter(shared.detach(), requires_grad=shared.requires_grad)
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is shared:
                module._parameters[name] = own
    return own


def _stages(one: Shared, cuts: Sequence[int]) -> list[int]:
    return [sum(cut <= place for cut in cuts) for place in one.layers]
