"""The paper's way to partition: a mixed-integer program for each order of the devices (section 7).

Binaries z[q, e]: stage q ends with layer e. The time and the memory of a stage are differences of
prefix sums at its two ends, so they are linear in z; the time of the slowest stage is minimised.
Slow: a check for :mod:`optuna_fleet.virtual_workers.partition`, which finds the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optuna_fleet.alloc.problem import AllocationFailed
from optuna_fleet.virtual_workers.partition import (
    DoesNotFit,
    Partition,
    PartitionProblem,
    StageDevice,
    partition_of,
)

_RELATIVE_GAP = 1e-9

FloatArray = NDArray[np.float64]


def best_partition_by_mip(problem: PartitionProblem, time_limit_s: float) -> Partition:
    """The same as :func:`optuna_fleet.virtual_workers.partition.best_partition`.

    Args:
        problem: Few devices: their orders are tried one by one.
        time_limit_s: Seconds that CBC may take for one order.

    Raises:
        DoesNotFit: No partition fits.
        AllocationFailed: CBC came to no end in time, or failed.
    """
    found = [
        solved for order in orders(problem) if (solved := _solve(problem, order, time_limit_s))
    ]
    if not found:
        raise DoesNotFit("No order of the devices has a partition that fits into their memory.")
    return min(found, key=lambda partition: partition.slowest_s)


def orders(problem: PartitionProblem) -> Iterator[tuple[StageDevice, ...]]:
    """Orders of the devices, without those that differ in equal devices only."""
    seen = set()
    for order in permutations(sorted(problem.devices)):
        key = tuple((device.node, device.kind, device.memory_bytes) for device in order)
        if key not in seen:
            seen.add(key)
            yield order


def _solve(
    problem: PartitionProblem, order: tuple[StageDevice, ...], time_limit_s: float
) -> Partition | None:
    # Imported late: importing the package must not load CBC.
    import mip

    ended = mip.OptimizationStatus
    try:
        model, z = _model(problem, order)
        status = model.optimize(max_seconds=time_limit_s)
        solved = status == ended.OPTIMAL
        cuts = tuple(e for row in z for e, var in enumerate(row) if solved and var.x > 0.5)
    except Exception as error:
        raise AllocationFailed(f"CBC failed: {type(error).__name__}: {error}") from error
    if status in (ended.INFEASIBLE, ended.INT_INFEASIBLE):
        return None
    if not solved:
        raise AllocationFailed(f"CBC ended with {status.name} after at most {time_limit_s:g} s.")
    return partition_of(problem, order, cuts)


def _model(problem: PartitionProblem, order: tuple[StageDevice, ...]) -> tuple[Any, list[Any]]:
    import mip

    model = mip.Model(sense=mip.MINIMIZE, solver_name=mip.CBC)
    model.verbose = 0
    model.threads = 1
    model.preprocess = 0  # CBC of python-mip 2.0 aborts in its preprocessing on valid models
    model.max_mip_gap = _RELATIVE_GAP
    num = len(problem.layers)
    z = [[model.add_var(var_type=mip.BINARY) for _ in range(num + 1)] for _ in order[:-1]]
    for row in z:
        model += mip.xsum(row) == 1

    def at_bound(values: FloatArray, q: int) -> Any:
        """The value where stage q begins."""
        if q in (0, len(order)):
            return float(values[0 if q == 0 else -1])
        return mip.xsum(float(v) * var for v, var in zip(values, z[q - 1], strict=True))

    slowest = model.objective = model.add_var()
    position = np.arange(num + 1, dtype=np.float64)
    for q in range(len(order)):
        length = at_bound(position, q + 1) - at_bound(position, q)
        model += length >= 1
        seconds, memory, received, returned = _of_stage(problem, order, q)
        model += slowest >= (at_bound(seconds + returned, q + 1) - at_bound(seconds - received, q))
        model += at_bound(memory, q + 1) - at_bound(memory, q) <= 1
    return model, z


def _of_stage(
    problem: PartitionProblem, order: tuple[StageDevice, ...], q: int
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """By bound: sums of times and of memory so far, and the times of what crosses there.

    CBC's tolerances are absolute: times are in thousandths of the whole model's, memory as a share
    of the device's.
    """
    layers, device, links = problem.layers, order[q], problem.links
    seconds = _sums(np.add(layers.forward_s[device.kind], layers.backward_s[device.kind]))
    cut = (0.0, *layers.cut_bytes)
    received = np.zeros(len(cut))
    returned = np.zeros(len(cut))
    if q > 0:
        received += [links.of(order[q - 1], device).seconds(b) for b in cut]
    if q + 1 < len(order):
        returned += [links.of(order[q + 1], device).seconds(b) for b in cut]
    memory = problem.bytes_of(q, 1.0, 0.0) * _sums(np.array(layers.parameter_bytes))
    memory += problem.held(q) * _sums(np.array(layers.kept_bytes))
    scale = 1e3 / max(1e-12, _whole_model_s(problem))
    room = max(device.memory_bytes, 1e-12)
    return scale * seconds, memory / room, scale * received, scale * returned


def _whole_model_s(problem: PartitionProblem) -> float:
    layers = problem.layers
    return max(sum(layers.forward_s[k]) + sum(layers.backward_s[k]) for k in layers.forward_s)


def _sums(numbers: FloatArray) -> FloatArray:
    return np.concatenate(([0.0], np.cumsum(numbers)))
