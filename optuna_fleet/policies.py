"""Who trains where, and when that is decided: an allocator, and when it is asked.

The same for executor and replay. A policy is named (``policy="mip"``) or made with options of its
own (``policy=policies.Mip(alpha=0.5)``); docs/allocation.md says what each does and how well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from optuna_fleet.alloc import (
    Allocator,
    ElasticAllocator,
    EqualSplitAllocator,
    FleetAllocator,
    GreedyAllocator,
    HomogeneousAllocator,
    MipAllocator,
    SingleDeviceAllocator,
)
from optuna_fleet.alloc.elastic import Objective
from optuna_fleet.arguments import (
    check_choice,
    check_number,
    check_that,
    did_you_mean,
    is_a,
)
from optuna_fleet.executor.deciding.state import PARADIGMS, Paradigm, PolicyRules

_WHEN_ALL_ENDED = 1e-9


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What all policies have in common.

    Args:
        paradigm: "global" re-allocates all trials at each round; "local" only fills freed devices;
            "elastic" decides at each event.
        alpha: A global round ends when fewer than this share of its devices is active.
        rate_spread: Fastest over slowest training rate allowed within one flotilla.
        rescale_s: What moving a trial costs, in seconds of its training, until moves have been
            measured; then its last one counts, or the median of the other trials' moves.
        time_limit_s: Time limit of one allocation, in seconds; an allocator that hangs is killed
            a little later, and a greedy plan serves.
        phases: Only trials in the same epoch may share a stream of data within a flotilla.
        preprocess_samples_per_s: What the preprocessors can deliver to all streams of data; plans
            keep to it. None if that never limits.
        moves_within_epochs: Trials that read ``trial.batches(..., movable=True)`` move between two
            batches, others at the end of an epoch.

    Raises:
        FleetConfigError: An argument is out of range.
    """

    is_coupled: ClassVar[bool] = False
    """As published, trials of a flotilla advance at the pace of the slowest."""
    looks_ahead: ClassVar[bool] = True
    """Its plans may widen trials, or move them."""
    allocator_type: ClassVar[type[Allocator]]
    """Class of the allocator, where that takes no arguments."""

    paradigm: Paradigm = "global"
    alpha: float = 0.8
    rate_spread: float = 2.0
    rescale_s: float = 1.0
    time_limit_s: float = 1.0
    phases: bool = False
    preprocess_samples_per_s: float | None = None
    moves_within_epochs: bool = False

    def __post_init__(self) -> None:
        check_choice("paradigm", self.paradigm, PARADIGMS)
        check_number("alpha", self.alpha, above=0, most=1)
        check_number("rate_spread", self.rate_spread, least=1)
        check_number("rescale_s", self.rescale_s, least=0)
        check_number("time_limit_s", self.time_limit_s, above=0)
        for name in ("phases", "moves_within_epochs"):
            check_that(name, getattr(self, name), is_a(bool), "be True or False")
        given = self.preprocess_samples_per_s
        check_number("preprocess_samples_per_s", given, above=0, optional=True)

    def new_allocator(self, seed: int) -> Allocator:
        """The allocator that is asked; most need no seed."""
        return self.allocator_type()

    def rules(self, **more: Any) -> PolicyRules:
        """What the controller goes by; ``more`` as in `PolicyRules`."""
        own = {field.name: getattr(self, field.name) for field in fields(Policy)}
        return PolicyRules(**own, looks_ahead=self.looks_ahead, **more)


@dataclass(frozen=True, kw_only=True)
class Baseline(Policy):
    """One device for each trial.

    Args:
        own_preprocessors: How many each trial has for itself; it then shares nothing of what they
            make with the others, as in FLEET's baseline. None: all trials share.
    """

    looks_ahead: ClassVar[bool] = False
    paradigm: Paradigm = "local"
    own_preprocessors: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.own_preprocessors
        check_number("own_preprocessors", given, least=1, most=1000, whole=True, optional=True)

    def rules(self, **more: Any) -> PolicyRules:
        """See `Policy`."""
        return super().rules(own_preprocessors=self.own_preprocessors, **more)

    def new_allocator(self, seed: int) -> Allocator:
        """See `Policy`."""
        return SingleDeviceAllocator(seed=seed)


@dataclass(frozen=True, kw_only=True)
class Homogeneous(Policy):
    """Trials that all have the same number of devices, and end together (Pittman et al.)."""

    is_coupled: ClassVar[bool] = True
    alpha: float = _WHEN_ALL_ENDED
    rate_spread: float = math.inf

    def new_allocator(self, seed: int) -> Allocator:
        """See `Policy`."""
        return HomogeneousAllocator(seed=seed)


@dataclass(frozen=True, kw_only=True)
class FleetG(Policy):
    """FLEET's allocation in rounds, as published (FLEET 4.3.2).

    Args:
        delta: How far from the fastest trial's rate that of a flotilla's members may be, in
            samples/s (FLEET Alg. 2).
    """

    is_coupled: ClassVar[bool] = True
    rate_spread: float = math.inf
    delta: float = FleetAllocator().delta

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("delta", self.delta, above=0)

    def new_allocator(self, seed: int) -> Allocator:
        """See `Policy`."""
        return FleetAllocator(delta=self.delta)


@dataclass(frozen=True, kw_only=True)
class FleetL(FleetG):
    """FLEET's allocation of freed devices, as published (FLEET 4.3.3)."""

    paradigm: Paradigm = "local"


@dataclass(frozen=True, kw_only=True)
class Greedy(Policy):
    """Rounds, planned by a heuristic."""

    allocator_type: ClassVar[type[Allocator]] = GreedyAllocator


@dataclass(frozen=True, kw_only=True)
class Mip(Policy):
    """Rounds, planned with python-mip."""

    allocator_type: ClassVar[type[Allocator]] = MipAllocator


@dataclass(frozen=True, kw_only=True)
class EqualSplit(Policy):
    """As many devices for everyone, re-decided at each event."""

    allocator_type: ClassVar[type[Allocator]] = EqualSplitAllocator
    paradigm: Paradigm = "elastic"
    moves_within_epochs: bool = True


@dataclass(frozen=True, kw_only=True)
class Elastic(Policy):
    """All widths re-decided at each event (BFTrainer, section 3).

    Args:
        objective: "makespan", to be done soon; "throughput" or "scaling-efficiency", to get most
            done; or a function (candidate, devices) -> outcome per second, for the same.
        forward_looking_s: Seconds for which a decision is expected to last, so that what a move
            gains within them must be more than it costs (T_fwd); not for "makespan".
    """

    paradigm: Paradigm = "elastic"
    moves_within_epochs: bool = True
    objective: str | Objective = "makespan"
    forward_looking_s: float = ElasticAllocator().forward_looking_s

    def __post_init__(self) -> None:
        super().__post_init__()
        self.new_allocator(0)  # checks the arguments

    def new_allocator(self, seed: int) -> Allocator:
        """See `Policy`."""
        return ElasticAllocator(objective=self.objective, forward_looking_s=self.forward_looking_s)


@dataclass(frozen=True, kw_only=True)
class Own(Policy):
    """An allocator of your own, or one of `optuna_fleet.alloc` with options of its own.

    Args:
        allocator: See `optuna_fleet.alloc.Allocator`.
    """

    allocator: Allocator

    def __post_init__(self) -> None:
        super().__post_init__()
        check_that(
            "allocator",
            self.allocator,
            lambda value: hasattr(value, "allocate") and not isinstance(value, type),
            "have a method `allocate`, as the object optuna_fleet.alloc.MipAllocator()",
        )

    def new_allocator(self, seed: int) -> Allocator:
        """See `Policy`."""
        return self.allocator


POLICIES: dict[str, type[Policy]] = {
    "baseline": Baseline,
    "homogeneous": Homogeneous,
    "fleet-g": FleetG,
    "fleet-l": FleetL,
    "greedy": Greedy,
    "mip": Mip,
    "equal-split": EqualSplit,
    "elastic": Elastic,
}


def policy_of(given: str | Policy) -> Policy:
    """The policy that a user named or made.

    Raises:
        FleetConfigError: It is neither.
    """
    if isinstance(given, Policy):
        return given
    question = did_you_mean(given, POLICIES) if isinstance(given, str) else ""
    wanted = (
        f"be one of {', '.join(map(repr, POLICIES))}, or an object as "
        f"optuna_fleet.policies.Mip(alpha=0.5){question}"
    )
    check_that("policy", given, lambda name: isinstance(name, str) and name in POLICIES, wanted)
    return POLICIES[str(given)]()
