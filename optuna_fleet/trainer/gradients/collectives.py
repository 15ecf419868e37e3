"""Sums and means over the ranks of a trial, and what else they tell each other.

What ``trial.sum`` and ``trial.mean`` give and refuse is the same in a group of one: what works on
one device works on several. So their results never carry gradients, not even there:
``loss.backward()`` is for the rank's own loss, as gradients are reduced anyhow.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from optuna_fleet.accelerator import ACCELERATORS
from optuna_fleet.exceptions import FleetConfigError, TrialError
from optuna_fleet.trainer.checkpoint import MemoryFile
from optuna_fleet.trainer.groups import group_size, wire_device
from optuna_fleet.trainer.nested import map_leaves

_MESSAGE_BYTES = 64 * 2**20  # of a GPU's memory


def all_reduce_sum(values: Any, *, alone: bool = False) -> Any:
    """Sum over the ranks of the trial; exact for integers, in float64 for everything else.

    Of numbers, tensors, or nested dicts, lists and tuples of them. The structure must be equal on
    every rank; a number on one may be a scalar tensor on another. The sum has the same types
    (``bool`` is counted, so it becomes ``int``; an ``int`` becomes ``float`` if another rank has a
    float there). If it is `alone`, as in a group of one, all ranks have the same.

    Raises:
        FleetConfigError: If a value is no number.
        TrialError: If the structures differ between ranks.
    """
    found = list(_leaves(values, "value"))
    kinds = [torch.float64 if leaf.is_floating_point() else torch.int64 for *_, leaf in found]
    leaves = [leaf.to(kind, copy=True) for (*_, leaf), kind in zip(found, kinds, strict=True)]
    if group_size() > 1 and not alone:
        structure = [f"{path} {shape}" for path, shape, _ in found]
        everyone = gather({"structure": structure, "leaves": [leaf.cpu() for leaf in leaves]})
        if any(one["structure"] != structure for one in everyone):
            raise unlike("The structure of a summed value")
        columns = zip(*(one["leaves"] for one in everyone), strict=True)
        leaves = [reduce(torch.add, column) for column in columns]
    totals = iter(leaves)
    return map_leaves(values, lambda value: _like(value, next(totals)))


def mean(values: Any, weight: float | None = None, *, alone: bool = False) -> Any:
    """Mean over the ranks of the trial, of what `all_reduce_sum` takes; floats.

    None weighs all ranks alike. A value of weight 0 is ignored, even NaN. It is NaN where no rank
    has any weight.

    Raises:
        FleetConfigError: A value is no number, or `weight` is no finite one, or negative.
    """
    own = 1.0 if weight is None else one_weight(weight).item()
    check_weight(own, weight)
    leaves = [leaf.double() for *_, leaf in _leaves(values, "value")]
    if alone or group_size() == 1:
        scaled, weights = leaves, 1.0 if own else 0.0  # exact, unlike a product and its quotient
    else:
        scaled = [leaf * own if own else torch.zeros_like(leaf) for leaf in leaves]
        *scaled, weights = all_reduce_sum([*scaled, own])
    means = iter([part / weights if weights else part * torch.nan for part in scaled])
    return map_leaves(values, lambda value: _like(value, next(means)))


def gather(own: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank of the default group gives, plain values and tensors, on every rank."""
    if group_size() == 1:
        return [own]
    # Not all_gather_object: it unpickles, and torch's connections prove nothing of their peers.
    buffer = io.BytesIO()
    torch.save(own, buffer)
    mine = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).to(wire_device())
    sizes = [torch.tensor(0, device=mine.device) for _ in range(group_size())]
    dist.all_gather(sizes, torch.tensor(len(mine), device=mine.device))
    lengths: list[int] = torch.stack(sizes).tolist()
    most = max(lengths)
    states = [torch.empty(most, dtype=torch.uint8, device=mine.device) for _ in sizes]
    dist.all_gather(states, torch.nn.functional.pad(mine, (0, most - len(mine))))
    has_gpu = any(each.module.is_available() for each in ACCELERATORS)
    where = None if has_gpu else "cpu"  # others may be on GPUs
    data = [state[:n].cpu().numpy().tobytes() for state, n in zip(states, lengths, strict=True)]
    return [torch.load(io.BytesIO(d), map_location=where, weights_only=True) for d in data]


def broadcast(own: MemoryFile | None) -> MemoryFile | None:
    """What rank 0 gives, if anything, on every rank; all must call it."""
    if group_size() == 1:
        return own
    (size,) = of_first_rank([len(own.data) if own else 0])
    if not size:
        return None
    file = own or MemoryFile(size)
    data = file.data
    for begin in range(0, size, _MESSAGE_BYTES):
        part = torch.frombuffer(data[begin : begin + _MESSAGE_BYTES], dtype=torch.uint8)
        sent = part.to(wire_device())
        dist.broadcast(sent, src=0)
        part.copy_(sent)
    return file


def of_first_rank(numbers: Sequence[int]) -> list[int]:
    """Returns the numbers that rank 0 has; all ranks must call it, with as many of them."""
    if group_size() == 1:
        return list(numbers)
    shared = torch.tensor(list(numbers), device=wire_device())
    dist.broadcast(shared, src=0)
    return [int(number) for number in shared.tolist()]


def are_same(items: Iterable[object]) -> bool:
    """Whether the ``repr`` of each of the items is equal on all ranks."""
    digest = hashlib.sha256("\n".join(map(repr, items)).encode()).digest()
    number = int.from_bytes(digest[:7], "big")
    extremes = torch.tensor([number, -number], device=wire_device())
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return bool(extremes.sum() == 0)


def unlike(what: str) -> TrialError:
    """To be raised on every rank."""
    return TrialError(
        f"{what} differs between the ranks of the trial, but must be the same on each. Does the "
        "objective draw numbers that are not seeded, or depend on the rank?"
    )


def one_number(value: Any, name: str) -> Tensor:
    """`value`, a number or a tensor of one element, as a scalar in float64, without gradients.

    Raises:
        FleetConfigError: It is no such thing; calls it `name`.
    """
    leaves = [leaf for *_, leaf in _leaves(value, f"`{name}`")]
    if len(leaves) != 1 or leaves[0].numel() != 1:
        raise FleetConfigError(
            f"`{name}` is {value!r}, but must be one number, or a tensor of one element."
        )
    return leaves[0].reshape(()).double()


def one_weight(value: Any) -> Tensor:
    """`value` as `one_number`, checked where it need not be waited for."""
    own = one_number(value, "weight")
    if own.is_cpu:
        check_weight(own.item(), value)
    return own


def check_weight(own: float, given: Any) -> None:
    """Check that what was given as a weight is a finite number >= 0; raise if it is not."""
    if not 0 <= own < math.inf:  # neither is NaN
        raise FleetConfigError(
            f"`weight` is {given!r}, but must be a finite number >= 0: the number of samples or "
            "tokens that the value is a mean of, as trial.shard_size or mask.sum()."
        )


def share_of_sum(value: Tensor) -> Tensor:
    """This rank's part in the sum of a scalar over the ranks; the parts add up to 1."""
    own = value.to(wire_device())
    total = own.clone()
    dist.all_reduce(total)
    return own / total


def _leaves(values: Any, path: str) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """Path, shape and tensor of every number in `values`, in the order of `map_leaves`."""
    if isinstance(values, (dict, list, tuple)):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        for key, child in items:
            yield from _leaves(child, f"{path}[{key!r}]")
        return
    try:
        # A Python float would become float32.
        dtype = torch.float64 if isinstance(values, float) else None
        device = values.device if isinstance(values, Tensor) else "cpu"  # not torch's default one
        leaf = torch.as_tensor(values, dtype=dtype, device=device).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(values, int):
            raise FleetConfigError(f"{path} is an integer of more than 64 bits.") from error
        leaf = None
    if leaf is None or leaf.is_complex():
        raise FleetConfigError(
            f"The type of {path} is {type(values).__name__}, but only numbers and tensors of real "
            f"numbers, in dicts, lists and tuples, can be reduced over the ranks."
        )
    yield path, tuple(leaf.shape), leaf


def _like(value: Any, total: Tensor) -> Any:
    """`total` in the type, shape and place of `value`, as far as its kind of number allows."""
    if isinstance(value, Tensor):
        dtype = value.dtype
        if dtype == torch.bool or dtype.is_floating_point != total.is_floating_point():
            dtype = torch.get_default_dtype() if total.is_floating_point() else torch.int64
        return total.reshape(value.shape).to(value.device, dtype)
    if isinstance(value, (np.ndarray, np.generic)):
        return _like(torch.from_numpy(np.asarray(value)), total).numpy()[()]
    return total.item()
