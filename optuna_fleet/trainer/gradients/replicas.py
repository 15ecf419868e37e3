"""Notices that the ranks of a trial have come apart: they would train different models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from optuna_fleet.trainer.groups import group_size, wire_device
from optuna_fleet.trainer.parts import Parts

_TOLERANCE = 1e-9  # unlike devices add up in an order of their own


def tell_if_apart(parts: Parts) -> None:
    """Tell the user if what was prepared is not the same. Called on all ranks."""
    if not (apart := find_divergence(parts.objects)):
        return
    shown = ", ".join(apart[:3]) + (", ..." if len(apart) > 3 else "")
    parts.session.remark(
        [f"ranks of trial {parts.run.number} are apart"],
        f"Its ranks have come apart: {shown}. On another number of "
        "devices it would give other results. What decides must be alike on all ranks: use "
        "trial.mean(loss) for it; prepare layers when the model is complete.",
    )


@torch.no_grad()
def find_divergence(objects: Sequence[Any]) -> list[str]:
    """Returns what differs between the ranks; called on all of them alike, one collective.

    Args:
        objects: The prepared objects: of modules parameters and buffers are compared, of
            optimizers the learning rates.
    """
    if group_size() == 1:
        return []
    found = dict(_numbers(objects))
    if not found:
        return []
    device = wire_device()
    values = torch.stack(
        [torch.as_tensor(v, dtype=torch.float64, device=device) for v in found.values()]
    ).nan_to_num()
    extremes = torch.cat([values, -values])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, smallest = extremes.cpu().chunk(2)
    differs = largest + smallest > _TOLERANCE * (1 + largest.abs())
    return [name for name, apart in zip(found, differs.tolist(), strict=True) if apart]


def _numbers(objects: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for position, thing in enumerate(objects):
        name = f"{type(thing).__name__} ({position})"
        if isinstance(thing, torch.nn.Module):
            for key, tensor in [*thing.named_parameters(), *thing.named_buffers()]:
                if (total := _total(tensor)) is not None:
                    yield f"{name}: {key}", total
        elif isinstance(thing, torch.optim.Optimizer):
            for number, group in enumerate(thing.param_groups):
                yield f"{name}: learning rate {number}", group.get("lr", 0.0)


def _total(tensor: Tensor) -> Tensor | None:
    if tensor.is_meta:
        return None
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    try:
        return real.sum(dtype=torch.float64)
    except RuntimeError:  # of a kind that can not be added up
        return None
