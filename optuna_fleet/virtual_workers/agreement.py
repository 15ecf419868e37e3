"""What virtual workers come to agree on beside the weights: momenta and buffers, as means.

And BatchNorm's statistics, where ranks have some parts of each batch: as if one had them all. They
are running means: each part moves them a share of the way to its own. Whatever they are before,
parts in a row leave behind (1 - momentum) ** n of that and add something. So the ranks with later
parts begin with zero, and in the end all that is left of each is added up. `Columns` do that, as
they add up gradients where virtual workers step together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from optuna_fleet.exceptions import TrialError
from optuna_fleet.trainer.groups import gloo_group
from optuna_fleet.virtual_workers.directory import Directory
from optuna_fleet.virtual_workers.stage_messages import StageAddress, Tensors
from optuna_fleet.virtual_workers.whole import parameters_of, part_of

BUFFER = "buffer "
_MOMENTUM = "momentum of "


def names_of(part: nn.Module) -> tuple[str, ...]:
    """All that virtual workers add up of some layers."""
    parameters = tuple(name for name, _ in part.named_parameters())
    momenta = (_MOMENTUM + name for name in parameters)
    return (*parameters, *momenta, *(BUFFER + name for name in _buffers(part)))


def names_by_piece(
    model: nn.Sequential, directory: Directory, address: StageAddress
) -> dict[int, tuple[str, ...]]:
    """Those of each piece of a stage."""
    return {
        place: names_of(part_of(model, *directory.pieces[place]))
        for place in directory.users[address]
    }


class Agreement:
    """What a stage gives to a sum over virtual workers, and takes from it.

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
        self._optimizer = optimizer
        self._share = share
        self._before = {name: buffer.clone() for name, buffer in _buffers(part).items()}

    @torch.no_grad()
    def rest(self) -> dict[str, Tensor]:
        """To be summed up over the virtual workers."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._trained.items():
            state = self._state.get(parameter, {})
            if (momentum := state.get("momentum_buffer")) is not None:
                found[_MOMENTUM + name] = self._share * momentum
        for name, buffer in _buffers(self._part).items():
            before = self._before.get(name)
            if before is None or before.shape != buffer.shape:
                continue  # the pass has made it
            moved = torch.where(buffer == before, 0.0, buffer - before)  # also of infinite ones
            found[BUFFER + name] = self._share * moved
        return found

    @torch.no_grad()
    def take(self, agreed: Tensors) -> None:
        """Weights, and sums of `rest`."""
        for name, parameter in self._trained.items():
            if name in agreed:
                parameter.copy_(agreed[name])
            if _MOMENTUM + name in agreed:
                self._state[parameter]["momentum_buffer"] = agreed[_MOMENTUM + name].clone()
        for name, buffer in _buffers(self._part).items():
            if BUFFER + name in agreed:
                buffer.copy_(self._before[name] + agreed[BUFFER + name])
                self._before[name] = buffer.clone()

    @property
    def _state(self) -> Mapping[Any, dict[str, Tensor]]:
        return {} if self._optimizer is None else self._optimizer.state


def _buffers(part: nn.Module) -> dict[str, Tensor]:
    return {name: b for name, b in part.named_buffers() if b.is_floating_point()}


def can_add_up(module: nn.Module) -> bool:
    """Whether it is a BatchNorm of that kind."""
    if not isinstance(module, _BatchNorm) or module.momentum is None:
        return False
    return module.running_mean is not None and module.num_batches_tracked is not None


def writes_weights(module: nn.Module) -> bool:
    """Whether its passes do, other than training."""
    embeddings = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return any(embedding.max_norm for embedding in embeddings)


def leaves_something(layer: nn.Module, before: nn.Module) -> bool:
    """Whether passes have changed buffers of a copy otherwise, or made some, or write weights."""
    if writes_weights(layer):
        return True
    kept = dict(before.named_buffers())
    return any(
        name not in kept or not torch.equal(buffer.cpu(), kept[name].cpu())
        for path, module in layer.named_modules()
        if not can_add_up(module)
        for name, buffer in module.named_buffers(path, recurse=False)
    )


class Statistics:
    """Those of this rank's layers.

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
        if self._worker > 0:
            for _, module in self._modules():
                for tensor in _of(module).values():
                    tensor.zero_()

    def calls(self) -> dict[str, Tensor]:
        """How often each module was called, here in this rank's place; by names of a buffer.

        Ranks need not call it alike: a layer may look at a part before it does.
        """
        found: dict[str, Tensor] = {}
        for name, module in self._modules():
            numbers = torch.zeros(self._num_workers)
            numbers[self._worker] = _calls(module) - self._began[name]
            found[_key(name, "running_mean")] = numbers
        return found

    @torch.no_grad()
    def left(self, calls: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is left of them here at the batch's end, by names as `Agreement` has them.

        Args:
            calls: The sums over the ranks.
        """
        found: dict[str, Tensor] = {}
        for name, module in self._modules():
            assert module.momentum is not None
            later = calls[_key(name, "running_mean")][self._worker + 1 :].sum().item()
            for of, tensor in _of(module).items():
                found[_key(name, of)] = (1 - module.momentum) ** later * tensor
        return found

    @torch.no_grad()
    def take(self, sums: Mapping[str, Tensor], calls: Mapping[str, Tensor]) -> None:
        """The sums over the ranks of what is left."""
        for name, module in self._modules():
            for of, tensor in _of(module).items():
                tensor.copy_(sums[_key(name, of)])
            assert module.num_batches_tracked is not None
            called = int(calls[_key(name, "running_mean")].sum())
            module.num_batches_tracked.fill_(self._began[name] + called)

    def _modules(self) -> Iterator[tuple[str, _BatchNorm]]:
        for name, module in self._part.named_modules():
            if isinstance(module, _BatchNorm) and can_add_up(module) and module.training:
                yield name, module


def _key(name: str, of: str) -> str:
    return f"{BUFFER}{name}.{of}"


def _of(module: _BatchNorm) -> dict[str, Tensor]:
    assert module.running_mean is not None
    assert module.running_var is not None
    return {"running_mean": module.running_mean, "running_var": module.running_var}


def _calls(module: _BatchNorm) -> int:
    assert module.num_batches_tracked is not None
    return int(module.num_batches_tracked)


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

    def __init__(self, directory: Directory, names: Mapping[int, Sequence[str]]) -> None:
        self._names = names
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
            own = {name: tensors[name] for name in self._names[piece] if name in tensors}
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
        self, parameters: Mapping[str, nn.Parameter], numbers: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Each virtual worker has those of its parts of the batch.

        Returns:
            The sums of `numbers`, which go along with which gradients there are.
        """
        self.meet(Meeting.STEP)
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        own = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}
        given = {n: torch.tensor(float(p.grad is not None)) for n, p in trained.items()}
        sums, told = self.add(own), self.add({**given, **numbers})
        for name, parameter in trained.items():
            total = sums[name].to_sparse(1) if own[name].is_sparse else sums[name]
            parameter.grad = total if told[name] else None
        return {name: told[name] for name in numbers}

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
