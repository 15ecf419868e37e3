"""What an executor was given: refused here if it would fail, or be passed over, hours later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_fleet.accelerator import ACCELERATORS, device_types
from optuna_fleet.alloc import Allocator
from optuna_fleet.arguments import check_choice, check_number, check_that, folder, is_a, path
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.executor.deciding.convergence import Convergence
from optuna_fleet.executor.deciding.trials import PolicyRules
from optuna_fleet.options import Checkpoints, Limits, Preflight
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.policies import policy_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Those of an executor, checked; `checkpoint_dir` is a folder that is there."""

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


def options_of(
    *,
    pipeline: Any,
    devices: Any,
    device_type: Any,
    policy: Any,
    checkpoints: Any,
    limits: Any,
    preflight: Any,
    convergence: Any,
    max_trials: Any,
    predictor: Any,
    setup: Any,
    seed: Any,
) -> Options:
    """Those of `FleetExecutor`.

    Raises:
        FleetConfigError: One of them is not what it must be.
    """
    if pipeline is not None and not isinstance(pipeline, SharedPipeline):
        raise FleetConfigError(
            f"FleetExecutor() was given a `{type(pipeline).__name__}`, but takes a "
            "SharedPipeline: FleetExecutor(SharedPipeline(train=dataset))."
        )
    for name, given, holds, wanted in (
        ("limits", limits, is_a(Limits), "be a Limits, as Limits(hang_s=60), or None"),
        (
            "convergence",
            convergence,
            is_a(Convergence),
            "be a Convergence, as Convergence(patience=5), or None",
        ),
        (
            "predictor",
            predictor,
            callable,
            "be a function from an optuna.trial.FrozenTrial to a number of epochs, or None",
        ),
        ("setup", setup, callable, "be a function without arguments, or None"),
    ):
        check_that(name, given, holds, wanted, optional=True)
    wanted = "be True, False, or a Preflight, as Preflight(share=0.05)"
    check_that("preflight", preflight, is_a(bool, Preflight), wanted)
    if isinstance(devices, (str, list, tuple)):
        raise FleetConfigError(
            f"`devices` is {devices!r}, but must be how many, as 2, or None for all that are "
            f"visible: the variable {ACCELERATORS[0].visible} says which these are."
        )
    check_number("devices", devices, least=1, most=10_000, whole=True, optional=True)
    check_choice("device_type", device_type, device_types(), optional=True)
    seed = seed if seed is not None else (pipeline.seed if pipeline else 0)
    check_number("seed", seed, least=0, whole=True)
    check_number("max_trials", max_trials, least=1, whole=True, optional=True)
    limits, chosen = limits or Limits(), policy_of(policy)
    if not isinstance(checkpoints, Checkpoints):
        checkpoints = Checkpoints(
            None if checkpoints is None else path("checkpoints", checkpoints)
        )
    root = checkpoints.folder
    return Options(
        pipeline=pipeline,
        devices=devices,
        device_type=device_type,
        policy=chosen.rules(max_restarts=limits.max_restarts, max_trials=max_trials),
        allocator=chosen.new_allocator(seed),
        checkpoints=checkpoints,
        checkpoint_dir=None if root is None else folder("checkpoints", root),
        limits=limits,
        preflight=Preflight() if preflight is True else preflight or None,
        convergence=convergence,
        predictor=predictor,
        setup=setup,
        seed=seed,
    )


def check_call(
    func: Any, n_trials: Any = None, timeout: Any = None, catch: Any = (), callbacks: Any = None
) -> tuple[type[Exception], ...]:
    """Look at what `optimize` was given; return the exceptions to `catch`.

    Raises:
        FleetConfigError: An argument can't work.
        TypeError: `catch` has something else than exception classes.
    """
    if not callable(func):
        raise FleetConfigError(f"The objective is {func!r}, but must be callable.")
    check_number("n_trials", n_trials, optional=True)
    check_number("timeout", timeout, optional=True)  # in seconds
    wanted = "be a list of functions, as [callback]"
    check_that("callbacks", callbacks, _may_be_callbacks, wanted, optional=True)
    is_several = isinstance(catch, Iterable) and not isinstance(catch, str)
    kinds = tuple(catch) if is_several else (catch,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError(f"`catch` has {kind!r}, but must be exception classes: (ValueError,).")
    return kinds


def _may_be_callbacks(given: Any) -> bool:
    if isinstance(given, list | tuple):
        return all(map(callable, given))
    return isinstance(given, Iterable) and not isinstance(given, str)
