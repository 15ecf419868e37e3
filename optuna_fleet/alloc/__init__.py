"""Pure decisions: which trials fly, on how many devices, and on which."""

from optuna_fleet.alloc.elastic import ElasticAllocator
from optuna_fleet.alloc.isolation import IsolatedAllocator
from optuna_fleet.alloc.problem import (
    SEVERAL,
    AllocationFailed,
    AllocationProblem,
    Allocator,
    Assignment,
    Candidate,
    Flotilla,
    Plan,
)
from optuna_fleet.alloc.published import (
    EqualSplitAllocator,
    FleetAllocator,
    HomogeneousAllocator,
    SingleDeviceAllocator,
)
from optuna_fleet.alloc.rates import RateProfile
from optuna_fleet.alloc.rounds import GreedyAllocator, MipAllocator
from optuna_fleet.alloc.validation import validate

__all__ = [
    "SEVERAL",
    "AllocationFailed",
    "AllocationProblem",
    "Allocator",
    "Assignment",
    "Candidate",
    "ElasticAllocator",
    "EqualSplitAllocator",
    "FleetAllocator",
    "Flotilla",
    "GreedyAllocator",
    "HomogeneousAllocator",
    "IsolatedAllocator",
    "MipAllocator",
    "Plan",
    "RateProfile",
    "SingleDeviceAllocator",
    "validate",
]
