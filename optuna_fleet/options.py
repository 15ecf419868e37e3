"""What a user sets beside the policy: checkpoints, limits, checks, when a trial has converged."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from optuna_fleet.arguments import check_number, path

NUM_HEARTBEATS = 4
"""Signs of life that a rank gives within the time after which it counts as hung."""

_SHORTEST_COLLECTIVE_S = 600.0  # a peer may import, and download, before it takes part
_LONGEST_COLLECTIVE_S = 10 * 86400.0
_LONGEST_HEARTBEAT_S = 2.0
_SHORTEST_START_S = 60.0  # it imports torch
_SHORTEST_HEARTBEAT_S = 0.02


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where and when trials are checkpointed, and what they leave behind.

    Args:
        folder: Made if need be. With it, the same call made again goes on where a killed or
            interrupted one stopped, and the best trials leave their weights for `load_best_model`.
            None for a private folder that goes with the executor.
        interval_s: Seconds after which a trial is checkpointed, at the end of its epoch or between
            two batches that are `movable`; and always when it moves and none of its processes
            stays. What a killed process may cost it. 0 for as often as can be.
        keep: How many of the best trials leave a final checkpoint in `folder`: with the weights
            of their best report, if that is the value they return, else with their last.
        max_bytes: How many bytes these may have in all; the worst of them go first. None for no
            limit.

    Raises:
        FleetConfigError: An argument is out of range, or the folder can't be made.
    """

    folder: str | os.PathLike[str] | None = None
    interval_s: float = 60.0
    keep: int = 1
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.folder is not None:
            object.__setattr__(self, "folder", path("folder", self.folder))
        check_number("interval_s", self.interval_s, least=0)
        check_number("keep", self.keep, least=0, whole=True)
        check_number("max_bytes", self.max_bytes, above=0, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What trials may take, and how long is waited for what is gone.

    Args:
        hang_s: A run is ended, and its trial run again from its last checkpoint, when one of its
            processes gives no sign of life for this long, or when none of them asks for a batch or
            makes a call meanwhile (after its first batch); None for never. Preprocessors that
            work on one chunk for half as long are replaced.
        trial_s: Seconds on devices, over all its runs, after which a trial fails with a
            `TrialTimeoutError`; None for never.
        trial_memory_bytes: A trial fails with an `OutOfMemoryError` when one of its processes has
            more private memory than this; looked at every few seconds. None for no limit.
        max_restarts: How often a trial may lose its devices (killed processes, hangs) before it
            is failed. Once it has done more epochs than ever before, it counts anew.
        storage_patience_s: Seconds to wait for the study's storage when it is gone (a database
            restarted or locked, a gRPC proxy down); then the call ends with `StorageLostError`.

    Raises:
        FleetConfigError: An argument is out of range.
    """

    hang_s: float | None = 600.0
    trial_s: float | None = None
    trial_memory_bytes: int | None = None
    max_restarts: int = 3
    storage_patience_s: float = 300.0

    def __post_init__(self) -> None:
        check_number("hang_s", self.hang_s, above=0, optional=True)
        check_number("trial_s", self.trial_s, above=0, optional=True)
        check_number("trial_memory_bytes", self.trial_memory_bytes, above=0, optional=True)
        check_number("max_restarts", self.max_restarts, least=0, whole=True)
        check_number("storage_patience_s", self.storage_patience_s, least=0)

    @property
    def stuck_s(self) -> float | None:
        """Seconds after which a preprocessor is replaced: before trials are taken for hung."""
        return None if self.hang_s is None else self.hang_s / 2

    @property
    def start_s(self) -> float | None:
        """Seconds after which a process of the fleet that is not ready is replaced."""
        return None if self.hang_s is None else max(self.hang_s, _SHORTEST_START_S)

    @property
    def collective_s(self) -> float:
        """Seconds after which a collective fails by itself: when its run was ended long ago."""
        least_s = max(2 * (self.hang_s or math.inf), _SHORTEST_COLLECTIVE_S)
        return min(least_s, _LONGEST_COLLECTIVE_S)

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two signs of life: without limits, too, ranks that part show in them."""
        if self.hang_s is None:
            return _LONGEST_HEARTBEAT_S
        wanted_s = max(self.hang_s / NUM_HEARTBEATS, _SHORTEST_HEARTBEAT_S)
        return min(wanted_s, _LONGEST_HEARTBEAT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """Checks of whether trials give the same on several devices, and when they are moved.

    Args:
        share: The part of the devices' time that checks may take; past it what is unchecked stays
            on one device, and where it is. The first that a plan needs is made at once.
        limit_s: Seconds that the objective may take on one device, cut short as it is then.

    Raises:
        FleetConfigError: An argument is out of range.
    """

    share: float = 0.02
    limit_s: float = 300.0

    def __post_init__(self) -> None:
        check_number("share", self.share, above=0, most=1)
        check_number("limit_s", self.limit_s, above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Convergence:
    """A trial has converged once its reported value stopped improving (FLEET 4.3.2, "Training").

    Attributes:
        patience: Number of reports in a row without an improvement.
        min_improvement: By how much a value must beat the best so far to count as an improvement.
    """

    patience: int
    min_improvement: float = 0.0

    def __post_init__(self) -> None:
        check_number("patience", self.patience, least=1, whole=True)
        check_number("min_improvement", self.min_improvement, least=0)

    def is_reached(self, values: Sequence[float], *, maximize: bool) -> bool:
        """Whether none of the last `patience` of `values` improved on the best before them."""
        best, stale = -math.inf, 0
        for value in values:
            gain = value if maximize else -value
            if gain > best + self.min_improvement:  # never true of NaN
                best, stale = gain, 0
            else:
                stale += 1
        return stale >= self.patience
