"""The same stage of virtual workers that make their steps together: exact, as data parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

_FOREVER = timedelta(days=365)  # who is lost closes its connections; who hangs is seen by others


class Column:
    """Adds up over it. By gloo, as everything between stages.

    Every rank of the trial must make one, at the same time.

    Args:
        columns: Ranks of the same stage of each virtual worker, stage by stage.
        stage: Of this rank.
    """

    def __init__(self, columns: Sequence[Sequence[int]], stage: int) -> None:
        groups = [dist.new_group(list(c), timeout=_FOREVER, backend="gloo") for c in columns]
        group = groups[stage]
        assert isinstance(group, dist.ProcessGroup)
        self._group = group

    @torch.no_grad()
    def add(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Their sums over the column; each must have as many of the same shapes and types."""
        found: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = torch.cat([tensors[i].detach().cpu().reshape(-1) for i in alike])
            dist.all_reduce(flat, group=self._group)
            parts = torch.split(flat, [tensors[i].numel() for i in alike])
            for i, part in zip(alike, parts, strict=True):
                found[i] = part.view(tensors[i].shape).to(tensors[i].device)
        return [found[i] for i in range(len(tensors))]

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Each virtual worker has those of its part of the batch."""
        trained = list(parameters)
        given = torch.tensor([float(p.grad is not None) for p in trained])
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        (given, *sums) = self.add([given, *own])
        for parameter, total, number in zip(trained, sums, given.tolist(), strict=True):
            parameter.grad = total if number else None
