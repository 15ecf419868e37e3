"""What an executor was given, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_fleet.alloc import Allocator
from optuna_fleet.executor.deciding.convergence import Convergence
from optuna_fleet.executor.deciding.trials import PolicyRules
from optuna_fleet.options import Checkpoints, Limits, Preflight
from optuna_fleet.pipeline import SharedPipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What an executor was given, checked; `checkpoint_dir` is a folder that is there."""

    pipeline: SharedPipeline | None
    devices: int | None
    device_type: str | None
    policy: PolicyRules
    allocator: Allocator
    checkpoints: Checkpoints
    checkpoint_dir: Path | None
    limits: Limits
    preflight: Preflight | None
    convergence: Convergence | None
    predictor: Callable[[Any], float | None] | None
    setup: Callable[[], object] | None
    seed: int
