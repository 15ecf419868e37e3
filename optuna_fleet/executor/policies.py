"""The policies by name: an allocator and when to ask it, the same for executor and replay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
from optuna_fleet.arguments import check_choice
from optuna_fleet.executor.trials import Paradigm, Policy

_WHEN_ALL_ENDED = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPolicy:
    """What a name stands for.

    Attributes:
        new_allocator: Makes the allocator from a seed; most need none.
        paradigm: When it is asked.
        alpha: Share of active devices below which a round ends.
        rate_spread: Largest spread of rates within a flotilla.
        is_coupled: As published, trials of a flotilla advance at the pace of the slowest.
    """

    new_allocator: Callable[[int], Allocator]
    paradigm: Paradigm
    alpha: float = 0.8
    rate_spread: float = 2.0
    is_coupled: bool = False

    def policy(
        self,
        *,
        paradigm: Paradigm | None = None,
        alpha: float | None = None,
        rate_spread: float | None = None,
        **more: Any,
    ) -> Policy:
        """The controller's policy: the user's wishes, else this one's; ``more`` as in `Policy`."""
        return Policy(
            paradigm=self.paradigm if paradigm is None else paradigm,
            alpha=self.alpha if alpha is None else alpha,
            rate_spread=self.rate_spread if rate_spread is None else rate_spread,
            **more,
        )


POLICIES: dict[str, NamedPolicy] = {
    "baseline": NamedPolicy(
        new_allocator=lambda seed: SingleDeviceAllocator(seed=seed), paradigm="local"
    ),
    "homogeneous": NamedPolicy(
        new_allocator=lambda seed: HomogeneousAllocator(seed=seed),
        paradigm="global",
        alpha=_WHEN_ALL_ENDED,
        rate_spread=math.inf,
        is_coupled=True,
    ),
    "fleet-g": NamedPolicy(
        new_allocator=lambda _: FleetAllocator(),
        paradigm="global",
        rate_spread=math.inf,
        is_coupled=True,
    ),
    "fleet-l": NamedPolicy(
        new_allocator=lambda _: FleetAllocator(),
        paradigm="local",
        rate_spread=math.inf,
        is_coupled=True,
    ),
    "greedy": NamedPolicy(new_allocator=lambda _: GreedyAllocator(), paradigm="global"),
    "mip": NamedPolicy(new_allocator=lambda _: MipAllocator(), paradigm="global"),
    "equal-split": NamedPolicy(new_allocator=lambda _: EqualSplitAllocator(), paradigm="elastic"),
    "elastic": NamedPolicy(new_allocator=lambda _: ElasticAllocator(), paradigm="elastic"),
}


def named_policy(name: str) -> NamedPolicy:
    """The policy of that name.

    Raises:
        FleetConfigError: There is none.
    """
    check_choice("policy", name, POLICIES)
    return POLICIES[name]
