"""The facade: what a user constructs and hands to ``study.optimize(..., executor=...)``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import optuna

from optuna_fleet.arguments import plain
from optuna_fleet.checkpoints.folder import StudyFolder
from optuna_fleet.checkpoints.store import Store
from optuna_fleet.executor.call.summary import FleetSummary
from optuna_fleet.executor.cluster.engine import Cluster, Engine
from optuna_fleet.executor.fleet_runner import cluster_of, runner_of
from optuna_fleet.executor.given import check_call, check_is_one_process, options_of
from optuna_fleet.options import Checkpoints, Convergence, Limits, Preflight
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.policies import Policy
from optuna_fleet.preflight.verdict import Verdict
from optuna_fleet.sampler_bridge.loop import Loop
from optuna_fleet.sampler_bridge.objective_code import digest_of
from optuna_fleet.sampler_bridge.one_trial import study_of, value_of
from optuna_fleet.settings import packed_setup

ObjectiveFunc = Callable[[optuna.Trial], float | Sequence[float]]


class FleetExecutor:
    """Runs the trials of Optuna studies on a set of devices.

    One executor serves many calls of `optimize`; its processes start with the first one and stay
    up in between. Use it as a context manager, or call `close`; it also ends with the interpreter.

    Args:
        pipeline: The data of all trials; needed for `trial.batches`.
        devices: Number of devices; None for all visible GPUs, or one CPU slot per core without
            any.
        device_type: "cuda", "cpu", or None for "cuda" where there are GPUs.
        policy: Who trains where, and when that is decided: "elastic" (at each event), "mip"
            (rounds, python-mip), "greedy", "fleet-g" and "fleet-l" (as published), "homogeneous"
            (all alike), "equal-split" (as many for everyone), "baseline" (one device each), or one
            of `optuna_fleet.policies` with options of its own; see docs/allocation.md.
        cluster: "local" runs trials in processes on this machine; "inline" runs them one by one in
            the calling process, on the CPU, under your debugger; or a cluster with options, as
            `LocalCluster(slots_per_device=2)`, or of your own
            (`optuna_fleet.executor.cluster.engine.Engine`).
        checkpoints: Where trials are checkpointed while they run: a `Checkpoints`, or a folder.
            With a folder, the same call made again goes on where a killed or interrupted one
            stopped, and the best trials leave their weights (`load_best_model`):
            docs/reliability.md.
        limits: What trials may take; a `Limits`.
        preflight: Whether it is checked, before trials get several devices or move, that this does
            not change their results: docs/objective.md. A `Preflight`; or False, if you know that
            they do.
        convergence: When a trial has converged and ends before its last epoch; None for never.
        max_trials: Most trials under way at once; None for no limit but the devices.
        predictor: From a running trial (`optuna.trial.FrozenTrial`) to the epochs it will take in
            all, or None; "elastic" plans with it, but lets it differ from the sweep's own estimate
            by a bounded factor only.
        setup: A function without arguments that each process calls once, before all else of yours:
            registrations, settings of libraries; docs/objective.md.
        seed: Seeds each trial together with its number; None for the pipeline's seed, or 0.

    Raises:
        FleetConfigError: An argument is out of range, or the devices asked for do not exist.
    """

    def __init__(
        self,
        pipeline: SharedPipeline | None = None,
        *,
        devices: int | None = None,
        device_type: str | None = None,
        policy: str | Policy = "elastic",
        cluster: str | Cluster | Engine = "local",
        checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
        limits: Limits | None = None,
        preflight: bool | Preflight = True,
        convergence: Convergence | None = None,
        max_trials: int | None = None,
        predictor: Callable[[optuna.trial.FrozenTrial], float | None] | None = None,
        setup: Callable[[], object] | None = None,
        seed: int | None = None,
    ) -> None:
        chosen_cluster = cluster_of(cluster)
        self._options = options_of(
            pipeline=pipeline,
            devices=devices,
            device_type=device_type,
            policy=policy,
            checkpoints=checkpoints,
            limits=limits,
            preflight=preflight,
            convergence=convergence,
            max_trials=max_trials,
            predictor=predictor,
            setup=setup,
            seed=seed,
        )
        self._runner = runner_of(chosen_cluster, self._options)
        self._busy = False

    @property
    def summary(self) -> FleetSummary | None:
        """The last call in numbers; None if it broke off, and with `cluster="inline"`."""
        return self._runner.summary

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
            FleetConfigError: An argument can't work; the objective can't be sent to the trainers;
                another driver uses the checkpoint folder, or it can't be written to.
            TypeError: `catch` has something else than exception classes.
            RuntimeError: The study, or this executor, is already optimizing.
            LaunchError: The processes of the fleet can't be started or kept up.
            StorageLostError: The study's storage was gone for longer than `storage_patience_s`.
            BaseException: The first failure of a trial that `catch` does not cover.
        """
        __tracebackhide__ = True  # from IPython's and pytest's tracebacks
        kinds = check_call(func, n_trials, timeout, catch, callbacks)
        try:
            self._run(
                study,
                func,
                n_trials=plain(n_trials),
                timeout=plain(timeout),
                catch=kinds,
                callbacks=callbacks,
                gc_after_trial=gc_after_trial,
                show_progress_bar=show_progress_bar,
            )
        finally:
            del self  # see `_run`

    def evaluate(
        self,
        func: ObjectiveFunc,
        params_or_trial: Mapping[str, Any] | optuna.trial.BaseTrial,
        *,
        study: optuna.Study | None = None,
    ) -> float | Sequence[float]:
        """Run `func` once, outside of a sweep, and return its value.

        Nothing is written to a study, nor kept in the checkpoint folder. What it raises is raised.

        Args:
            func: As for `optimize`.
            params_or_trial: What is suggested to it: parameters by name, or a trial that has them
                (``study.best_trial``, a ``FixedTrial``) or suggests them (``study.ask()``). With a
                trial it has that one's number, and so its seeds, and gives the same value.
            study: What the objective may ask its study for is taken from here: directions, user
                attributes. None for one whose single objective is minimized.

        Raises:
            FleetConfigError: It asks for a parameter that was not given; and as `optimize`.
        """
        __tracebackhide__ = True
        check_call(func)
        once = study_of(params_or_trial, study)
        try:
            self._run(once, func, n_trials=1, is_recorded=False)
        finally:
            del self  # see `_run`
        return value_of(once)

    def _run(
        self,
        study: optuna.Study,
        func: ObjectiveFunc,
        *,
        is_recorded: bool = True,
        **arguments: Any,
    ) -> None:
        """Run one call; if it `is_recorded`, with checkpoints, an identical one can resume it.

        The `arguments` are those of `Loop`.
        """
        __tracebackhide__ = True
        check_is_one_process(os.environ)
        if self._busy:
            raise RuntimeError("This FleetExecutor is already optimizing; use one per thread.")
        root = self._options.checkpoint_dir if self._runner.makes_checkpoints else None
        lock = None if root is None else Store(root).hold()
        is_recorded = is_recorded and root is not None
        loop = Loop(
            study,
            storage_patience_s=self._options.limits.storage_patience_s,
            folder=StudyFolder(root, study.study_name) if root and is_recorded else None,
            digest=digest_of(func) if is_recorded else None,
            **arguments,
        )
        self._busy, self._runner.summary = True, None
        try:
            with lock or contextlib.nullcontext(), loop:
                self._runner.run(loop, func)
        finally:
            self._busy = False
            # A notebook keeps the last traceback, whose frames hold `self`: the executor's
            # processes would survive a re-run of the cell.
            del self

    def preflight(
        self,
        study: optuna.Study,
        func: ObjectiveFunc,
        params: Mapping[str, Any] | None = None,
    ) -> Verdict:
        """Check whether trials of `func` give the same on several devices, and over moves.

        Its beginning is run several times in processes on the CPU that are thrown away: on one
        device, on one between moves, on several; what results depend on is compared. Neither the
        study nor its sampler is touched, and nothing that is running is disturbed. See
        docs/objective.md.

        Args:
            study: What the objective may ask its study for is taken from here.
            func: As for `optimize`.
            params: What is suggested to it; None for values drawn at random.

        Returns:
            What was found, and how it can be mended; `print` it, or show it in a notebook.

        Raises:
            FleetConfigError: The objective, or the data, can't be sent to other processes.
            LaunchError: Processes can't be started.
        """
        from optuna_fleet.preflight.checker import Checker
        from optuna_fleet.preflight.rehearsals import facts_of

        check_is_one_process(os.environ)
        check_call(func)
        pipeline, seed = self._options.pipeline, self._options.seed
        limit_s = (self._options.preflight or Preflight()).limit_s
        with Checker(first_limit_s=limit_s) as checker:
            return checker.check(
                func,
                pipeline,
                params,
                study=facts_of(study),
                setup=packed_setup(self._options.setup),
                seed=seed,
            )

    def close(self) -> None:
        """End all processes of the executor; a later `optimize` starts new ones.

        Raises:
            RuntimeError: It is optimizing.
        """
        if self._busy:
            raise RuntimeError(
                "This FleetExecutor is optimizing: end that with `study.stop()`, and close it "
                "when `optimize` has returned."
            )
        self._runner.close()

    def __enter__(self) -> FleetExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
