"""The facade: what a user constructs and hands to ``study.optimize(..., executor=...)``."""

from __future__ import annotations

import contextlib
import io
import itertools
import multiprocessing
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal

import optuna

from optuna_fleet.alloc import ByKind, GreedyAllocator, IsolatedAllocator
from optuna_fleet.arguments import (
    asks_what_was_meant,
    check_choice,
    check_number,
    check_that,
    folder,
    is_a,
)
from optuna_fleet.checkpoints.folder import FolderLock, StudyFolder
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.executor.cluster.devices import find_fleet
from optuna_fleet.executor.controller import Controller
from optuna_fleet.executor.convergence import Convergence
from optuna_fleet.executor.driver import Driver
from optuna_fleet.executor.runs import Job
from optuna_fleet.executor.runtime import Runtime
from optuna_fleet.executor.summary import FleetSummary
from optuna_fleet.options import Checkpoints, Limits
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.policies import Policy, policy_of
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.loop import Loop
from optuna_fleet.sampler_bridge.retention import CheckpointRetention
from optuna_fleet.settings import settings_here
from optuna_fleet.wire.packing import ObjectivePickler, pack_objective
from optuna_fleet.wire.unpicklable import explained, variable

ObjectiveFunc = Callable[[optuna.Trial], float | Sequence[float]]

_objective_ids = itertools.count()


class FleetExecutor:
    """Runs the trials of Optuna studies on a set of devices.

    One executor serves many calls of `optimize`; its processes start with the first one and stay
    up in between. Use it as a context manager, or call `close`; it also ends with the interpreter.

    Args:
        pipeline: The data of all trials; needed for `trial.batches`.
        devices: Number of devices; None for all visible GPUs, or one CPU slot per core without
            any.
        device_type: "cuda", "cpu", or None for "cuda" where there are GPUs.
        slots_per_device: Trainers on each device: several small trials may share a GPU.
        policy: Who trains where, and when that is decided: "mip" (rounds, python-mip), "elastic"
            (at each event), "greedy", "fleet-g" and "fleet-l" (as published), "homogeneous" (all
            alike), "equal-split" (as many for everyone), "baseline" (one device each), or one of
            `optuna_fleet.policies` with options of its own; see docs/allocation.md.
        cluster: "local" runs trials in processes on this machine; "inline" runs them one by one in
            the calling process, on the CPU, under your debugger.
        checkpoints: Where trials are checkpointed while they run: a `Checkpoints`, or a folder.
            With a folder, the same call made again goes on where a killed one stopped, and the
            best trials leave their weights (`load_best_model`): docs/reliability.md.
        limits: What trials may take; a `Limits`.
        convergence: When a trial has converged and ends before its last epoch; None for never.
        max_trials: Most trials under way at once; None for no limit but the devices.
        predictor: From a running trial (`optuna.trial.FrozenTrial`) to the epochs it will take in
            all, or None; "elastic" then plans with that, within a factor of what the sweep itself
            tells.
        seed: Seeds each trial together with its number; None for the pipeline's seed, or 0.

    Raises:
        FleetConfigError: An argument is out of range, or the devices asked for do not exist.
    """

    @asks_what_was_meant
    def __init__(
        self,
        pipeline: SharedPipeline | None = None,
        *,
        devices: int | None = None,
        device_type: Literal["cpu", "cuda"] | None = None,
        slots_per_device: int = 1,
        policy: str | Policy = "mip",
        cluster: Literal["local", "inline"] = "local",
        checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
        limits: Limits | None = None,
        convergence: Convergence | None = None,
        max_trials: int | None = None,
        predictor: Callable[[optuna.trial.FrozenTrial], float | None] | None = None,
        seed: int | None = None,
    ) -> None:
        if pipeline is not None and not isinstance(pipeline, SharedPipeline):
            raise FleetConfigError(
                f"FleetExecutor() was given a `{type(pipeline).__name__}`, but takes a "
                "SharedPipeline: FleetExecutor(SharedPipeline(train=dataset))."
            )
        _check_objects(limits, convergence, predictor)
        check_choice("cluster", cluster, ("local", "inline"))
        if cluster == "local" and not hasattr(os, "pidfd_open"):
            raise FleetConfigError(
                f"cluster='local' needs Linux 5.3 or later, but this is {sys.platform!r}; "
                "cluster='inline' runs everywhere."
            )
        self._cluster = cluster
        self._pipeline = pipeline
        self._convergence = convergence
        self._predictor = predictor
        self._seed = seed if seed is not None else (pipeline.seed if pipeline else 0)
        check_number("seed", self._seed, least=0, whole=True)
        self._limits = limits or Limits()
        chosen = policy_of(policy)
        self._allocator = chosen.new_allocator(self._seed)
        self._policy = chosen.rules(max_restarts=self._limits.max_restarts, max_trials=max_trials)
        self._checkpoints = _checkpoints(checkpoints)
        root = self._checkpoints.folder
        self._checkpoint_dir = None if root is None else folder("checkpoints", root)
        self.fleet = find_fleet(devices, device_type, slots_per_device)
        self.summary: FleetSummary | None = None
        self._runtime: Runtime | None = None
        self._busy = False

    def optimize(
        self,
        study: optuna.Study,
        func: ObjectiveFunc,
        n_trials: int | None = None,
        timeout: float | None = None,
        catch: Iterable[type[Exception]] | type[Exception] = (),
        callbacks: Iterable[Callable[[optuna.Study, optuna.trial.FrozenTrial], None]]
        | None = None,
        gc_after_trial: bool = False,
        show_progress_bar: bool = False,
    ) -> None:
        """Optimize `func` as `optuna.Study.optimize` does, with the trials on this fleet.

        The arguments are those of `optuna.Study.optimize`. Afterwards `summary` holds the call in
        numbers (None if it broke off, and with `cluster="inline"`).

        Raises:
            FleetConfigError: The objective can't be sent to the trainers.
            FleetConfigError: Another driver uses the checkpoint folder, or it can't be written to.
            RuntimeError: The study, or this executor, is already optimizing.
            LaunchError: The processes of the fleet can't be started or kept up.
            StorageLostError: The study's storage was gone for longer than `storage_patience_s`.
            BaseException: The first failure of a trial that `catch` does not cover.
        """
        _check_not_importing_main()
        if self._busy:
            raise RuntimeError("This FleetExecutor is already optimizing; use one per thread.")
        if not callable(func):
            raise FleetConfigError(f"The objective is {func!r}, but must be callable.")
        lock = None if self._checkpoint_dir is None else FolderLock(self._checkpoint_dir)
        loop = Loop(
            study,
            n_trials=n_trials,
            timeout=timeout,
            catch=tuple(catch) if isinstance(catch, Iterable) else (catch,),
            callbacks=callbacks,
            gc_after_trial=gc_after_trial,
            show_progress_bar=show_progress_bar,
            storage_patience_s=self._limits.storage_patience_s,
            folder=self._folder_of(study),
            lock=lock,
        )
        self._busy, self.summary = True, None
        try:
            with lock or contextlib.nullcontext(), loop:
                if self._cluster == "inline":
                    self._run_inline(loop, func)
                else:
                    self._run(loop, _packed(func, study), func)
        finally:
            self._busy = False

    def _run(self, loop: Loop, objective: bytes, func: ObjectiveFunc) -> None:
        runtime = self._started(_uses_torch(func, objective))
        controller = self._new_controller(runtime)
        job = Job(
            objective_id=next(_objective_ids),
            objective=objective,
            settings=settings_here(),
            seed=self._seed,
            gc_after_trial=loop.gc_after_trial,
            convergence=self._convergence,
            predictor=self._predictor,
            checkpoint_interval_s=self._checkpoints.interval_s,
            maximize=loop.maximize,
            limits=self._limits,
        )
        folder = runtime.folder_of(loop.study.study_name)
        num_kept = 0 if self._checkpoint_dir is None else self._checkpoints.keep
        retention = CheckpointRetention(loop.study, folder, num_kept, self._checkpoints.max_bytes)
        driver = Driver(runtime, controller, loop.ledger, loop.proposals, job, retention)
        try:
            with driver.interrupts:
                driver.run()
            report = runtime.pipeline_report() if self._pipeline else None
            used = driver.pipeline_log.finish(report, time.time()) if report else None
            self.summary = driver.tally.summary(len(self.fleet), used)
            compat.fleet_logger.info(str(self.summary))
        finally:
            if not (driver.has_freed_devices and runtime.is_alive()):
                self.close()
        if driver.failure is not None:
            raise driver.failure

    def _folder_of(self, study: optuna.Study) -> StudyFolder | None:
        """Where calls are recorded, to be gone on with; trials that run inline are not."""
        if self._checkpoint_dir is None or self._cluster == "inline":
            return None
        return StudyFolder(self._checkpoint_dir, study.study_name)

    def _run_inline(self, loop: Loop, func: ObjectiveFunc) -> None:
        from optuna_fleet.executor.cluster.inline import run_inline

        run_inline(
            loop, func, pipeline=self._pipeline, seed=self._seed, convergence=self._convergence
        )

    def _new_controller(self, runtime: Runtime) -> Controller:
        return Controller(
            self.fleet, self._policy, profiles=runtime.profiles, run_ids=runtime.run_ids
        )

    def _started(self, preload: bool) -> Runtime:
        if self._runtime is not None and not self._runtime.is_alive():
            self.close()
        if self._runtime is None:
            self._runtime = Runtime(
                self.fleet,
                self._pipeline,
                IsolatedAllocator(
                    ByKind(inner=self._allocator),
                    ByKind(inner=GreedyAllocator(keep_flying=True), cautious=True),
                ),
                self._checkpoint_dir,
                preload=preload or self._pipeline is not None,
                stuck_s=self._limits.stuck_s,
                start_s=self._limits.start_s,
            )
            self._finalizer = weakref.finalize(self, self._runtime.close_if_owner)
        return self._runtime

    def close(self) -> None:
        """End all processes of the executor; a later `optimize` starts new ones."""
        if self._runtime is not None:
            self._runtime = None
            self._finalizer()

    def __enter__(self) -> FleetExecutor:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _checkpoints(given: Any) -> Checkpoints:
    return given if isinstance(given, Checkpoints) else Checkpoints(given)


def _check_objects(limits: Any, convergence: Any, predictor: Any) -> None:
    """Refuse what would fail, or be passed over, in the midst of a sweep."""
    wanted = "be a Limits, as Limits(hang_s=60), or None"
    check_that("limits", limits, is_a(Limits), wanted, optional=True)
    wanted = "be a Convergence, as Convergence(patience=5), or None"
    check_that("convergence", convergence, is_a(Convergence), wanted, optional=True)
    check_that(
        "predictor",
        predictor,
        callable,
        "be a function from an optuna.trial.FrozenTrial to a number of epochs, or None",
        optional=True,
    )


def _check_not_importing_main() -> None:
    """Raise in a process that an objective spawned, or each such process would start a fleet."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise FleetConfigError(
            "A process that was started by 'spawn' or 'forkserver' runs this script again, up to "
            '`study.optimize(...)`: put that under `if __name__ == "__main__":`.'
        )


def _packed(func: Any, study: optuna.Study) -> bytes:
    names = compat.names_of(study)
    try:
        return pack_objective(func, names)
    except Exception as error:
        whole = variable("objective", func, "what `optimize` was given")
        reason = explained([whole], error, ObjectivePickler(io.BytesIO(), names))
        raise FleetConfigError(
            f"The objective can't be sent to the trainers, which are other processes: {reason} "
            "Create such a thing inside the objective, or when it is first used there."
        ) from error


def _uses_torch(func: Any, pickled: bytes) -> bool:
    """Whether to import torch once for all trainers; a wrong guess costs time, nothing else."""
    by_reference = getattr(func, "__module__", "__main__") != "__main__"
    return b"torch" in pickled or (by_reference and "torch" in sys.modules)
