"""What ranks add up, beside what parameter servers do.

Virtual workers that step together add up gradients, in `Columns` of the stages that have the same
piece of the model; and BatchNorm's `Statistics`, as if one of them had had all parts of a batch.
Layers that share a parameter add up its gradients by `Ties`, wherever they are. And what differs
between virtual workers comes to an `Agreement` at a flush.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from optuna_fleet.exceptions import TrialError
from optuna_fleet.trainer.groups import gloo_group
from optuna_fleet.virtual_workers.parameter_server import Directory
from optuna_fleet.virtual_workers.stage_messages import Tensors
from optuna_fleet.virtual_workers.whole import parameters_of

# After the name of a parameter or a buffer, which begins with that of its layer.
_GIVEN, _MOMENTUM, _BUFFER, _ROWS = " given", " momentum", " buffer", " rows"


class Agreement:
    """What a stage gives to a sum over virtual workers at a flush, and takes from it.

    Momenta of SGD are linear in the gradients: their mean is that of one virtual worker which
    trains on whole batches. Buffers that passes change, as BatchNorm's statistics, go as far as
    the mean of what virtual workers have changed; others stay what they are, to the bit.

    Args:
        optimizer: Whose momenta differ between virtual workers; None if they do not.
    """

    def __init__(
        self, part: nn.Module, optimizer: torch.optim.Optimizer | None, share: float
    ) -> None:
        self._part = part
        self._trained = parameters_of(part)
        self._state: Mapping[Any, dict[str, Tensor]] = {} if optimizer is None else optimizer.state
        self._share = share
        self._before = {name: buffer.clone() for name, buffer in _buffers(part).items()}

    @torch.no_grad()
    def rest(self) -> dict[str, Tensor]:
        """To be summed up over the virtual workers."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._trained.items():
            momentum = self._state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                found[name + _MOMENTUM] = self._share * momentum
        for name, buffer in _buffers(self._part).items():
            before = self._before.get(name)
            if before is None or before.shape != buffer.shape:
                continue  # the pass has made it
            moved = torch.where(buffer == before, 0.0, buffer - before)  # also of infinite ones
            found[name + _BUFFER] = self._share * moved
        return found

    @torch.no_grad()
    def take(self, agreed: Tensors) -> None:
        """Weights, and sums of `rest`."""
        for name, parameter in self._trained.items():
            if name in agreed:
                parameter.copy_(agreed[name])
            if name + _MOMENTUM in agreed:
                self._state[parameter]["momentum_buffer"] = agreed[name + _MOMENTUM].clone()
        for name, buffer in _buffers(self._part).items():
            if name + _BUFFER in agreed:
                buffer.copy_(self._before[name] + agreed[name + _BUFFER])
                self._before[name] = buffer.clone()


def _buffers(part: nn.Module) -> dict[str, Tensor]:
    return {name: b for name, b in part.named_buffers() if b.is_floating_point()}


# -- BatchNorm ------------------------------------------------------------------------------------


def can_add_up(module: nn.Module) -> bool:
    """Whether it is a BatchNorm of which `Statistics` can."""
    if not isinstance(module, _BatchNorm) or module.momentum is None:
        return False
    return module.running_mean is not None and module.num_batches_tracked is not None


class Statistics:
    """Of this rank's BatchNorm layers: what all parts of a batch leave behind, in their order.

    They are running means: each part moves them a share of the way to its own. Whatever they are
    before, n parts leave behind (1 - momentum) ** n of that and add something. So all virtual
    workers but the first begin with zero, and each needs to know what every other has added, in
    how many calls: layers may look at a part before they call one.

    Args:
        worker: This virtual worker: those before it have earlier parts of each batch.
    """

    def __init__(self, part: nn.Module, worker: int, num_workers: int) -> None:
        self._part = part
        self._worker = worker
        self._num_workers = num_workers
        self._began: dict[str, int] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """A batch begins."""
        self._began = {name: _calls(module) for name, module in self._modules()}
        for _, module in self._modules() if self._worker > 0 else ():
            for tensor in _running(module).values():
                tensor.zero_()

    @torch.no_grad()
    def rows(self) -> dict[str, Tensor]:
        """Of each virtual worker one: of this one what it knows, of the others zeros."""
        found: dict[str, Tensor] = {}
        for name, module in self._modules():
            calls = torch.tensor(float(_calls(module) - self._began[name]))
            for of, own in {**_running(module), "calls": calls}.items():
                rows = own.new_zeros(self._num_workers, *own.shape)
                rows[self._worker] = own
                found[f"{name}.{of}{_ROWS}"] = rows
        return found

    @torch.no_grad()
    def take(self, sums: Mapping[str, Tensor]) -> None:
        """Rows that are full."""
        for name, module in self._modules():
            assert module.momentum is not None
            assert module.num_batches_tracked is not None
            calls = sums[f"{name}.calls{_ROWS}"].tolist()
            for of, tensor in _running(module).items():
                tensor.zero_()
                for number, added in zip(calls, sums[f"{name}.{of}{_ROWS}"], strict=True):
                    tensor.mul_((1 - module.momentum) ** number).add_(added)
            module.num_batches_tracked.fill_(self._began[name] + int(sum(calls)))

    def _modules(self) -> Iterator[tuple[str, _BatchNorm]]:
        for name, module in self._part.named_modules():
            if isinstance(module, _BatchNorm) and can_add_up(module) and module.training:
                yield name, module


def _running(module: _BatchNorm) -> dict[str, Tensor]:
    assert module.running_mean is not None
    assert module.running_var is not None
    return {"running_mean": module.running_mean, "running_var": module.running_var}


def _calls(module: _BatchNorm) -> int:
    assert module.num_batches_tracked is not None
    return int(module.num_batches_tracked)


# -- gradients of virtual workers -----------------------------------------------------------------


class Meeting(IntEnum):
    """Where ranks add up."""

    STEP = auto()
    FLUSH = auto()

    def __str__(self) -> str:
        return f"pipeline.{self.name.lower()}()"


def parted(rank: int, does: str, other: int, other_does: str) -> TrialError:
    """The error for ranks that do not do the same, in words."""
    return TrialError(
        f"The ranks of the trial went different ways: rank {rank} {does}, while rank {other} "
        f"{other_does}. All must call the pipeline's methods alike."
    )


class Columns:
    """Adds up over the ranks that have a piece of the model, piece by piece.

    By gloo, as everything between stages. Every rank of the trial must make one, at the same time.
    """

    def __init__(self, directory: Directory) -> None:
        self._piece_of = directory.piece_of
        self._groups: dict[int, dist.ProcessGroup] = {}
        for piece in range(len(directory.pieces)):
            if (group := gloo_group(directory.ranks_with(piece))) is not None:
                self._groups[piece] = group

    def meet(self, where: Meeting) -> None:
        """Before all else that they add up: where sums are of unlike sizes, processes end.

        Raises:
            TrialError: Others are elsewhere.
        """
        for group in self._groups.values():
            told = [torch.empty((), dtype=torch.int64) for _ in range(group.size())]
            dist.all_gather(told, torch.tensor(int(where)), group=group)
            for rank, other in zip(dist.get_process_group_ranks(group), told, strict=True):
                if other != where:
                    its = str(Meeting(int(other)))
                    raise parted(rank, f"is at {its}", dist.get_rank(), f"is at {where}")

    @torch.no_grad()
    def add(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their sums; all that have a piece must give the same of it."""
        found: dict[str, Tensor] = {}
        for piece, group in self._groups.items():
            own = {name: t for name, t in tensors.items() if self._piece_of(name) == piece}
            for dtype in dict.fromkeys(tensor.dtype for tensor in own.values()):
                alike = {name: tensor for name, tensor in own.items() if tensor.dtype == dtype}
                found |= _sums(alike, group)
        return found

    @torch.no_grad()
    def add_loss(self, loss: Tensor) -> Tensor:
        """Each virtual worker has its share; all ranks must call it."""
        sums = [_sums({"": loss}, group)[""] for group in self._groups.values()]
        return sums[0]

    def add_gradients(
        self, parameters: Mapping[str, nn.Parameter], beside: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Each virtual worker has those of its parts of the batch.

        Returns:
            The sums of `beside`, too, which go along.
        """
        self.meet(Meeting.STEP)
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        own = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}
        given = {n + _GIVEN: torch.tensor(float(p.grad is not None)) for n, p in trained.items()}
        sums = self.add({**own, **given, **beside})
        for name, parameter in trained.items():
            total = sums[name].to_sparse(1) if own[name].is_sparse else sums[name]
            parameter.grad = total if sums[name + _GIVEN] else None
        return sums

    def close(self) -> None:
        """End the connections with the group: others may wait for this rank, who has failed."""
        self._groups.clear()


def _sums(tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    flat = torch.cat([tensor.detach().to_dense().cpu().reshape(-1) for tensor in tensors.values()])
    dist.all_reduce(flat, group=group)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors.values()])
    return {
        name: part.view(tensor.shape).to(tensor.device)
        for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    }


# -- gradients of what layers share ---------------------------------------------------------------


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
        self.tied = {id(own) for tie in self._ties for own in tie.takes}

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
        for parameter, takes, group in self._ties:
            # A row for each layer; in the end of it how many virtual workers have a gradient.
            rows = torch.zeros(len(takes), parameter.numel() + 1, dtype=parameter.dtype)
            for row, own in zip(rows, takes, strict=True):
                if own is not None and own.grad is not None:
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
