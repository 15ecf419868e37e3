"""What the controller knows of trials and runs, and the policy it follows. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from optuna_fleet.events import Ending
from optuna_fleet.exceptions import FleetConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When to decide again, and within which bounds.

    Attributes:
        paradigm: "global" re-allocates every trial, "local" only fills free devices.
        alpha: The global paradigm decides again when fewer than this share of a round's devices is
            active.
        rate_spread: Fastest over slowest training rate allowed within one flotilla.
        solver_time_limit_s: Time limit of one decision.
        max_restarts: How often a trial may lose its devices before it is failed.
    """

    paradigm: Literal["global", "local"] = "global"
    alpha: float = 0.8
    rate_spread: float = 2.0
    solver_time_limit_s: float = 1.0
    max_restarts: int = 3

    def __post_init__(self) -> None:
        if self.paradigm not in ("global", "local"):
            raise FleetConfigError(
                f"`paradigm` is {self.paradigm!r}, but must be 'global' or 'local'."
            )
        if not 0 < self.alpha <= 1:
            raise FleetConfigError(f"`alpha` is {self.alpha}, but must be > 0 and <= 1.")
        if not self.rate_spread >= 1:
            raise FleetConfigError(f"`rate_spread` is {self.rate_spread}, but must be >= 1.")
        if not self.solver_time_limit_s > 0:
            raise FleetConfigError(
                f"`solver_time_limit_s` is {self.solver_time_limit_s}, but must be > 0."
            )
        if self.max_restarts < 0:
            raise FleetConfigError(f"`max_restarts` is {self.max_restarts}, but must be >= 0.")


class Status(Enum):
    """Where a trial is; Optuna's storage owns its state."""

    PROPOSED = "proposed"
    PROBING = "probing"
    WAITING = "waiting"
    FLYING = "flying"


@dataclass(slots=True, kw_only=True)
class Run:
    """A run that has not ended on all its devices."""

    run_id: int
    number: int
    devices: tuple[int, ...]
    measured: bool
    leaving: bool = False
    cut: bool = False
    lost: bool = False
    endings: dict[int, Ending] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Trial:
    """A trial that is not done."""

    number: int
    status: Status = Status.PROPOSED
    structure: str | None = None
    resumable: bool = False
    batch_size: int | None = None
    restarts: int = 0
    waited_rounds: int = 0
    run: Run | None = None
