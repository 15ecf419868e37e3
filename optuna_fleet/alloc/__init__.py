"""Pure decisions: which trials fly, on how many devices, and on which."""

from optuna_fleet.alloc.greedy import GreedyAllocator
from optuna_fleet.alloc.isolation import IsolatedAllocator
from optuna_fleet.alloc.mip import MipAllocator
from optuna_fleet.alloc.placement import fleet_score, place
from optuna_fleet.alloc.problem import (
    AllocationFailed,
    AllocationProblem,
    Allocator,
    Assignment,
    Candidate,
    Flotilla,
    Plan,
    validate,
)
from optuna_fleet.alloc.rates import (
    DEFAULT_SCALING,
    PROFILE_BATCHES,
    TIMED_BATCHES,
    RateProfile,
    pooled_scaling,
    profiling_width,
    rate_of,
)

__all__ = [
    "DEFAULT_SCALING",
    "PROFILE_BATCHES",
    "TIMED_BATCHES",
    "AllocationFailed",
    "AllocationProblem",
    "Allocator",
    "Assignment",
    "Candidate",
    "Flotilla",
    "GreedyAllocator",
    "IsolatedAllocator",
    "MipAllocator",
    "Plan",
    "RateProfile",
    "fleet_score",
    "place",
    "pooled_scaling",
    "profiling_width",
    "rate_of",
    "validate",
]
