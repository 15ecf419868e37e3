"""What stages add up at a flush: parts of a batch, and gradients of what layers share.

The bits are those of one stage with all parts and all layers: sums pass from stage to stage, and
each adds what it has, in the order of parts and layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from optuna_fleet.virtual_workers.edges import Edges
from optuna_fleet.virtual_workers.parameter_server import Directory
from optuna_fleet.virtual_workers.stage_messages import StageAddress, Tensors

_LOSS = ""  # beside names of parameters and buffers, which begin with that of their layer
_RUNNING = "running_mean", "running_var"


def has_statistics(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether it is a BatchNorm with running means, each of a fixed share."""
    if not isinstance(module, _BatchNorm) or module.momentum is None:
        return False
    return module.running_mean is not None and module.num_batches_tracked is not None


class PartSums:
    """This stage's losses, gradients and statistics of BatchNorm, of the parts of one batch.

    Those of each part are kept, in the host's memory, until the flush.

    Args:
        part: The stage's layers.
        address: Of the stage.
    """

    def __init__(
        self, part: nn.Module, directory: Directory, address: StageAddress, edges: Edges
    ) -> None:
        self._edges = edges
        self._buffers = dict(part.named_buffers())
        self._terms: dict[str, list[tuple[float, Tensor]]] = {}
        self._names = [*directory.layers]
        self._rings = {
            number: directory.ranks_with(piece)
            for number, piece in enumerate(directory.layers.values())
            if piece in directory.users[address]
        }
        self._aside: list[tuple[float, list[Tensor]]] = []
        self._handles: list[Any] = []
        for name, module in part.named_modules():
            if has_statistics(module):
                begin = module.register_forward_pre_hook(self._put_aside)
                end = partial(self._note_statistics, name)
                self._handles += [begin, module.register_forward_hook(end, always_call=True)]

    def close(self) -> None:
        """The layers are what they were."""
        for handle in self._handles:
            handle.remove()

    def note(self, loss: Tensor, gradients: Tensors) -> None:
        """Of one more part."""
        self._note(_LOSS, loss)
        for name, gradient in gradients.items():
            self._note(name, gradient)

    def _note(self, name: str, added: Tensor, kept: float = 1.0) -> None:
        self._terms.setdefault(name, []).append((kept, added.detach().to_dense().cpu()))

    @torch.no_grad()
    def add_up(self, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        """Each parameter gets its gradient, if it has one; the loss is returned."""
        of_layers = self._edges.around(self._rings, self._with_own)
        self._terms.clear()
        sums = {name: total for sums in of_layers.values() for name, total in sums.items()}
        for name, total in sums.items():
            if name in self._buffers:
                self._buffers[name].copy_(total)
            elif name != _LOSS:
                # A copy, as that which is on its way must not change.
                parameters[name].grad = total.to(parameters[name].device, copy=True)
        return sums[_LOSS].clone()

    def meet(self) -> None:
        """Before something that all do, other than a step.

        Raises:
            TrialError: Others make a step.
        """
        self._edges.around(self._rings, lambda *_: {}, is_step=False)

    def _with_own(self, number: int, before: Tensors) -> Tensors:
        found = dict(before)
        for name, terms in self._terms.items():
            if name.partition(".")[0] not in (self._names[number], _LOSS):  # that is with each
                continue
            if name not in found and name in self._buffers:
                found[name] = self._buffers[name].cpu()
            for kept, added in terms:
                total = found.get(name)
                if total is not None and kept != 1.0:
                    total = kept * total
                found[name] = added if total is None else total + added
        return found

    # -- BatchNorm --------------------------------------------------------------------------------

    def _put_aside(self, module: Any, _: Any) -> None:
        """Have the pass leave behind its own statistics, instead of a mean of these and older."""
        if module.training:
            running = [getattr(module, name) for name in _RUNNING]
            self._aside.append((module.momentum, running))
            module.momentum = 1.0
            for name, tensor in zip(_RUNNING, running, strict=True):
                setattr(module, name, torch.zeros_like(tensor))

    @torch.no_grad()
    def _note_statistics(self, path: str, module: Any, *_: Any) -> None:
        if module.training:
            share, running = self._aside.pop()
            module.momentum = share
            for name, tensor in zip(_RUNNING, running, strict=True):
                own = getattr(module, name)
                self._note(f"{path}.{name}", share * own, 1 - share)
                setattr(module, name, tensor)
            module.num_batches_tracked.sub_(1)
            one = torch.ones_like(module.num_batches_tracked)
            self._note(f"{path}.num_batches_tracked", one)


# -- what layers share ----------------------------------------------------------------------------


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
