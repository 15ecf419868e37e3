"""Closures of optimizers: what these compare must be the trial's loss, not that of a rank's part.

A line search (LBFGS) goes by the loss that its closure returns. Each rank's own would send the
ranks different ways, although their gradients are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optuna_fleet.trainer.gradients.weights import Weights
from optuna_fleet.trainer.groups import group_size, wire_device

_WEIGHTED = (
    "An optimizer is given a closure whose loss went through trial.weighted, and which is not the "
    "same on all ranks. Let the closure return the trial's: `return trial.mean(loss.item(), "
    "weight=...)`, with the weight that trial.weighted was given."
)


def with_shared_loss(
    optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, weights: Weights
) -> tuple[Any, Any] | None:
    """Arguments of ``optimizer.step`` with a closure that gives the same loss on all ranks.

    Args:
        optimizer: It is about to step.
        args: Its arguments, itself before all others, as hooks are given them.
        kwargs: Those by keyword.
        weights: Of the batch that the loss is of.

    Returns:
        None where nothing need be changed. Most of torch's optimizers compare no losses.
    """
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    if group_size() == 1 or (is_torchs and not isinstance(optimizer, torch.optim.LBFGS)):
        return None
    if len(args) > 1 and callable(args[1]):
        return (args[0], _shared(args[1], weights), *args[2:]), kwargs
    if callable(closure := kwargs.get("closure")):
        return args, kwargs | {"closure": _shared(closure, weights)}
    return None


def _shared(closure: Callable[..., Any], weights: Weights) -> Callable[..., Any]:
    def shared(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            own = loss.detach().to(wire_device(), torch.float64).reshape(1)
            return _mean(own, weights).reshape(loss.shape).to(loss.device, loss.dtype)
        if isinstance(loss, float):
            own = torch.tensor([loss], dtype=torch.float64, device=wire_device())
            return _mean(own, weights).item()
        return loss

    return shared


@torch.no_grad()
def _mean(own: Tensor, weights: Weights) -> Tensor:
    """Over the global batch; one that is the same on all ranks stays as it is.

    Raises:
        TrialError: It is not the same, and was weighted otherwise.
    """
    weights.begin("optimizer.step")
    share = weights.settle()
    part = torch.zeros_like(own) if share.dummy else own * share.weight
    dist.all_reduce(part)
    if weights.was_weighted:
        extremes = torch.cat([own, -own])
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        most, least = extremes.tolist()
        if most != -least:
            raise weights.too_wide(_WEIGHTED)
        return own
    return part
