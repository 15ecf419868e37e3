"""The fluid relaxation with several device types, as a linear program (python-mip with CBC).

As in :mod:`optuna_fleet.alloc.fluid`, a trial shares its time out between widths, but it is on
devices of one type at a time: its shares add up to at most 1 over all types. To be on n_k of m
devices of each type k counts as a share n_k / m of the time on m of them, so that trials that span
types are part of it, if more of a type than there are count as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from optuna_fleet.alloc.cbc import new_model
from optuna_fleet.alloc.fluid import Rates
from optuna_fleet.alloc.problem import AllocationFailed

_SLACK = 1e-5  # relative; what CBC's tolerances let through


def fluid_seconds(
    rates: Sequence[Mapping[str, Rates]], work: Sequence[float], num_by_kind: Mapping[str, int]
) -> float:
    """No schedule does the work sooner; moves are free, and every length is known.

    Args:
        rates: Device type -> rates of each trial there, on as many devices as it may have.
        work: Samples each has to train, > 0.
        num_by_kind: Devices of each type, >= 1.

    Returns:
        The fluid optimum, or less by what a solver's tolerance may hide.

    Raises:
        AllocationFailed: The solver failed.
    """
    import mip

    model = new_model()
    model.add_var(var_type=mip.BINARY)  # CBC tells standard output about models without integers
    # Alone on the devices that suit it best, each trial has this rate; it scales all numbers.
    alone = [max(max(own[kind]) for kind in num_by_kind) for own in rates]
    slowest = max(samples / rate for samples, rate in zip(work, alone, strict=True))
    pace = model.add_var(ub=1.0)
    used: dict[str, list[Any]] = defaultdict(list)
    for own, samples, best in zip(rates, work, alone, strict=True):
        shares, done = [], []
        for kind in num_by_kind:
            for m, rate in enumerate(own[kind], 1):
                share = model.add_var()
                shares.append(share)
                done.append(rate / best * share)
                used[kind].append(m * share)
        model += mip.xsum(shares) <= 1
        model += mip.xsum(done) >= samples / best / slowest * pace
    for kind, terms in used.items():
        model += mip.xsum(terms) <= num_by_kind[kind]
    model.objective = pace
    if model.optimize() != mip.OptimizationStatus.OPTIMAL or not pace.x:
        raise AllocationFailed("CBC did not solve the fluid relaxation.")
    return float(slowest / pace.x) * (1 - _SLACK)
