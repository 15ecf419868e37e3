"""The norm of all gradients of a model, of which each rank has some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from optuna_fleet.trainer.groups import group_size, wire_device


@torch.no_grad()
def clip_gradients(
    parameters: Mapping[str, nn.Parameter],
    names: Sequence[str],
    max_norm: float,
    *,
    is_copy: bool = False,
) -> None:
    """As ``torch.nn.utils.clip_grad_norm_`` does with the whole model; all ranks must call it.

    Norms of single parameters are gathered, so the result does not depend on who has which.

    Args:
        parameters: Those of this rank.
        names: Of all of them, the same on each rank.
        max_norm: Of all gradients together.
        is_copy: Another rank has the same gradients, and counts them.
    """
    graded = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    own = {name: torch.linalg.vector_norm(g).double() for name, g in graded.items()}
    device = wire_device()
    zero = torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(
        [own[name].to(device) if name in own and not is_copy else zero for name in names]
    )
    if group_size() > 1:
        dist.all_reduce(norms)  # all but one of each are 0
    scale = (max_norm / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1.0)
    for gradient in graded.values():
        gradient.mul_(scale.to(gradient.device, gradient.dtype))
