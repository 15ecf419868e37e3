"""Replicas of a trial's models: made the same on all ranks, and watched, lest they come apart.

Ranks that have come apart train different models, each on a part of the data. What makes them do
so is the objective's: buffers that follow a rank's samples, gradients that are set by hand, a
table per sample, a decision by a rank's own loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from optuna_fleet.trainer.gradients.collectives import are_same, unlike
from optuna_fleet.trainer.gradients.weights import Weights
from optuna_fleet.trainer.groups import group_size, wire_device

_NUMPY = (np.ndarray, np.generic)
_LEAST_TOLERANCE, _MOST_TOLERANCE = 1e-9, 1e-2
_EPSILONS = 100  # unlike devices round in ways of their own

APART = (
    "Its ranks have come apart: {names} differ. What is changed while a trial trains must be "
    "changed alike on all its ranks, but each sees its part of a batch only. Sum up or average "
    "over the ranks what goes there (trial.sum, trial.mean), or let it follow from the gradients."
)


def check_same(module: torch.nn.Module) -> None:
    """Compare the structure of a model over the ranks."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    # A collective on unlike sizes would abort the process.
    if not are_same((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors):
        raise unlike(f"The model {type(module).__name__}")


@torch.no_grad()
def make_same(module: torch.nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.numel():
            data = tensor.detach().contiguous().view(-1).view(torch.uint8)  # any type can travel
            sent = data.to(wire_device())
            dist.broadcast(sent, src=0)  # rank 0 of the trial's group
            tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))


@torch.no_grad()
def check_together(objects: Sequence[Any], state: dict[str, Any], weights: Weights) -> None:
    """Compare what the ranks have, as a whole, if they have trained since; called on all of them.

    At the end of each training pass, and before a checkpoint is made. So none is made, and no
    value reported, of ranks that are apart. Compared are sums: of each parameter, buffer, and
    tensor of an optimizer's state or another object's, the options of optimizers, and numbers and
    tensors in ``trial.state``.

    Raises:
        TrialError: They are apart. The trial goes on from its last checkpoint, on one device.
    """
    if group_size() == 1 or not weights.take_trained():
        return
    weights.begin("the comparison of the ranks")
    values = _values(objects, state)
    found = [one for name, value in values if (one := _sum_of(name, value)) is not None]
    if names := _apart(found):
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise weights.too_wide(APART.format(names=shown))


@dataclass(frozen=True, slots=True)
class _Sum:
    """Of something that ranks have alike."""

    name: str
    total: Tensor
    size: Tensor  # the sum of absolute values
    tolerance: float  # by what part of that the total may differ


def _apart(found: list[_Sum]) -> list[str]:
    """What differs between the ranks; called on all of them alike."""
    if not are_same(one.name for one in found):
        return ["the kinds and numbers of what was prepared, or is in trial.state,"]
    if not found:
        return []
    rows = [torch.stack([one.total, one.size]).to(wire_device()) for one in found]
    totals, sizes = torch.stack(rows).nan_to_num().T
    extremes = torch.cat([totals, -totals, sizes])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    most, least, size = extremes.cpu().chunk(3)
    tolerances = torch.tensor([one.tolerance for one in found], dtype=torch.float64)
    differs = most + least > tolerances * size
    return [one.name for one, apart in zip(found, differs.tolist(), strict=True) if apart]


def _sum_of(name: str, value: Any) -> _Sum | None:
    try:
        if not isinstance(value, Tensor):
            value = torch.as_tensor(value, dtype=torch.float64)
        if value.is_meta:
            return None
        real = torch.view_as_real(value) if value.is_complex() else value
        if real.dtype in (torch.float32, torch.float64):  # the sum itself is added up in pairs
            total, size = real.sum(), torch.linalg.vector_norm(real, 1)
        else:
            total, size = real.sum(dtype=torch.float64), real.abs().sum(dtype=torch.float64)
    except (RuntimeError, OverflowError):  # of a kind that can not be added up
        return None
    epsilon = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
    tolerance = min(max(_EPSILONS * epsilon, _LEAST_TOLERANCE), _MOST_TOLERANCE)
    return _Sum(name, total.double(), size.double(), tolerance)


def _values(objects: Sequence[Any], state: dict[str, Any]) -> list[tuple[str, Any]]:
    """What causes that others come apart first: weights are the last."""
    causes, weights = _leaves(state, "trial.state"), list[tuple[str, Any]]()
    for number, thing in enumerate(objects):
        name = f"{type(thing).__name__} ({number})"
        if isinstance(thing, torch.nn.Module):
            causes += [(f"{name}: {key}", buffer) for key, buffer in thing.named_buffers()]
            weights += [(f"{name}: {key}", param) for key, param in thing.named_parameters()]
        elif isinstance(thing, torch.optim.Optimizer):
            for place, group in enumerate(thing.param_groups):
                options = {key: value for key, value in group.items() if key != "params"}
                causes += _leaves(options, f"{name}: group {place}")
            for place, own in enumerate(thing.state.values()):
                weights += _leaves(own, f"{name}: state of parameter {place}")
        else:
            with suppress(Exception):  # it can't be checkpointed either, which is told of
                leaves = _leaves(thing.state_dict(), name)
                causes += [leaf for leaf in leaves if isinstance(leaf[1], Tensor)]
    return causes + weights


def _leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    """Numbers and tensors in nested dicts, lists and tuples."""
    leaves, _ = pytree.tree_flatten_with_path(value)
    found = [(path + pytree.keystr(keys), leaf) for keys, leaf in leaves]
    return [
        (name, torch.from_numpy(np.asarray(leaf)) if isinstance(leaf, _NUMPY) else leaf)
        for name, leaf in found
        if isinstance(leaf, (Tensor, int, float))
        or (isinstance(leaf, _NUMPY) and leaf.dtype.kind in "biuf")
    ]
