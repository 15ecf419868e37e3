"""What an executor asks of a cluster, whatever kind it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from optuna_fleet.alloc import Allocator
from optuna_fleet.executor.call.summary import FleetSummary
from optuna_fleet.executor.deciding.convergence import Convergence
from optuna_fleet.executor.deciding.trials import PolicyRules
from optuna_fleet.options import Checkpoints, Limits, Preflight
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.sampler_bridge.loop import Loop


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


class Runner(Protocol):
    """Runs the calls of one executor.

    Attributes:
        makes_checkpoints: Whether calls are recorded, for the same call to go on with.
        summary: The last call in numbers; None if it broke off, or nothing was counted.
    """

    makes_checkpoints: bool
    summary: FleetSummary | None

    def run(self, loop: Loop, func: Callable[[Any], Any]) -> None:
        """Run trials until `loop` proposes no more.

        Raises:
            BaseException: The first failure of a trial that `catch` does not cover.
        """
        ...

    def close(self) -> None:
        """End all processes; they start again with the next `run`. May be called again."""
        ...


@runtime_checkable
class Cluster(Protocol):
    """Where trials run. It only describes that: several executors may be given the same one.

    A cluster of agents returns a `fleet_runner.FleetRunner` with the `engine.Engine` that places
    them.
    """

    def new_runner(self, options: Options) -> Runner:
        """Make what runs the calls of an executor; no process starts before the first.

        Raises:
            FleetConfigError: The devices asked for do not exist.
        """
        ...
