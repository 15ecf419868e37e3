"""The same layers of virtual workers that step together: exact, as data parallelism is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum, auto

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optuna_fleet.exceptions import TrialError
from optuna_fleet.trainer.groups import gloo_group
from optuna_fleet.virtual_workers.engine.directory import Directory


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
