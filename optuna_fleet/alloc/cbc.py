"""How CBC is asked (by python-mip), whatever the model says."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from optuna_fleet.alloc.problem import AllocationFailed

_logger = logging.getLogger(__name__)

Key = TypeVar("Key")


def new_model() -> Any:
    """A `mip.Model` whose objective is to be maximised."""
    # Imported late: the driver names what uses CBC, but only the solver process loads it.
    import mip

    model = mip.Model(sense=mip.MAXIMIZE, solver_name=mip.CBC)
    model.verbose = 0
    model.threads = 1
    model.preprocess = 0  # CBC of python-mip 2.0 aborts in its preprocessing on valid models
    return model


def choose(
    make: Callable[[], tuple[Any, Mapping[Key, Any]]], time_limit_s: float
) -> tuple[list[Key], Literal["optimal", "feasible"], float | None]:
    """The binaries that are 1 in the best solution.

    CBC has been seen to abort the process on valid models, see
    :mod:`optuna_fleet.alloc.isolation`.

    Args:
        make: Makes the model, and its binaries by what they stand for.
        time_limit_s: Seconds that CBC may take.

    Returns:
        What they stand for; whether nothing is better, or the time limit came first; the relative
        distance to the solver's bound, None if it has none.

    Raises:
        AllocationFailed: Nothing was found within the time, or the solver failed.
    """
    import mip

    solved = (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE)
    try:
        model, binaries = make()
        status = model.optimize(max_seconds=time_limit_s)
        chosen = [key for key, var in binaries.items() if status in solved and var.x > 0.5]
        gap = float(model.gap) if status in solved else math.inf
    except Exception as error:
        raise AllocationFailed(f"CBC failed: {type(error).__name__}: {error}") from error
    if status not in solved:
        raise AllocationFailed(f"CBC ended with {status.name} after at most {time_limit_s:g} s.")
    _logger.debug("CBC: %s, gap %g, %d binaries", status.name, gap, len(binaries))
    is_optimal = status == mip.OptimizationStatus.OPTIMAL
    return chosen, "optimal" if is_optimal else "feasible", gap if math.isfinite(gap) else None
