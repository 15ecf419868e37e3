"""What an executor was given, and who started it: refused here if it would fail hours later."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_fleet.accelerator import ACCELERATORS, device_types
from optuna_fleet.alloc import Allocator
from optuna_fleet.arguments import check_choice, check_number, check_that, folder, is_a, path
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.executor.deciding.state import PolicyRules
from optuna_fleet.options import Checkpoints, Convergence, Limits, Preflight
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


def options_of(**given: Any) -> Options:
    """Those of `FleetExecutor`, by name.

    Raises:
        FleetConfigError: One of them is not what it must be.
    """
    pipeline, devices, seed = given["pipeline"], given["devices"], given["seed"]
    if pipeline is not None and not isinstance(pipeline, SharedPipeline):
        raise FleetConfigError(
            f"FleetExecutor() was given a `{type(pipeline).__name__}`, but takes a "
            "SharedPipeline: FleetExecutor(SharedPipeline(train=dataset))."
        )
    for name, (holds, wanted) in _WANTED.items():
        check_that(name, given[name], holds, wanted, optional=name != "preflight")
    if isinstance(devices, (str, list, tuple)):
        raise FleetConfigError(
            f"`devices` is {devices!r}, but must be how many, as 2, or None for all that are "
            f"visible: the variable {ACCELERATORS[0].visible} says which these are."
        )
    check_number("devices", devices, least=1, most=10_000, whole=True, optional=True)
    check_choice("device_type", given["device_type"], device_types(), optional=True)
    seed = seed if seed is not None else (pipeline.seed if pipeline else 0)
    check_number("seed", seed, least=0, whole=True)
    max_trials = given.pop("max_trials")
    check_number("max_trials", max_trials, least=1, whole=True, optional=True)
    limits, chosen = given["limits"] or Limits(), policy_of(given["policy"])
    preflight, checkpoints = given["preflight"], given["checkpoints"]
    if not isinstance(checkpoints, Checkpoints):
        checkpoints = Checkpoints(
            None if checkpoints is None else path("checkpoints", checkpoints)
        )
    root = checkpoints.folder
    settled = {
        "policy": chosen.rules(max_restarts=limits.max_restarts, max_trials=max_trials),
        "allocator": chosen.new_allocator(seed),
        "checkpoints": checkpoints,
        "checkpoint_dir": None if root is None else folder("checkpoints", root),
        "limits": limits,
        "preflight": Preflight() if preflight is True else preflight or None,
        "seed": seed,
    }
    return Options(**given | settled)


_WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "limits": (is_a(Limits), "be a Limits, as Limits(hang_s=60), or None"),
    "convergence": (is_a(Convergence), "be a Convergence, as Convergence(patience=5), or None"),
    "predictor": (
        callable,
        "be a function from an optuna.trial.FrozenTrial to a number of epochs, or None",
    ),
    "setup": (callable, "be a function without arguments, or None"),
    "preflight": (
        is_a(bool, Preflight),
        "be True, False, or a Preflight, as Preflight(share=0.05)",
    ),
}


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


# By whom, how many processes there are, and which of them this is: the first that fits counts.
_LAUNCHERS = (
    ("`accelerate launch`", "ACCELERATE_MIXED_PRECISION", "WORLD_SIZE", "RANK"),
    ("torchrun", "TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK"),
    ("A launcher", "", "WORLD_SIZE", "RANK"),
    ("mpirun", "", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("mpirun", "", "PMI_SIZE", "PMI_RANK"),
    ("srun", "", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("horovodrun", "", "HOROVOD_SIZE", "HOROVOD_RANK"),
    ("Lightning's Trainer(devices=...)", "", "WORLD_SIZE", "LOCAL_RANK"),
)


def check_is_one_process(variables: Mapping[str, str]) -> None:
    """Raise where each of several processes would run the whole sweep.

    Raises:
        FleetConfigError: A launcher, or an objective, has started this process beside others.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise FleetConfigError(
            "A process that was started by 'spawn' or 'forkserver' runs this script again, up to "
            '`study.optimize(...)`: put that under `if __name__ == "__main__":`.'
        )
    for launcher, mark, size, rank in _LAUNCHERS:
        number, which = variables.get(size, ""), variables.get(rank, "")
        if (not mark or mark in variables) and which and number.isdecimal() and int(number) > 1:
            raise FleetConfigError(
                f"{launcher} has started this script as process {which} of {number} ({rank}, "
                f"{size}), each of which would run the whole sweep. Start it once, as in `python "
                "script.py`: the executor starts the processes of all devices itself, on several "
                "machines with SlurmCluster() or JoinCluster()."
            )
