"""Runs an executor's `optimize` calls on its cluster, in trainers that agents start there."""

from __future__ import annotations

import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from optuna_fleet.alloc import IsolatedAllocator
from optuna_fleet.alloc.rounds import CAUTIOUS
from optuna_fleet.arguments import check_choice
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.executor.call.driver import Driver
from optuna_fleet.executor.call.runs import Job
from optuna_fleet.executor.call.summary import FleetSummary
from optuna_fleet.executor.call.sweep import Sweep
from optuna_fleet.executor.cluster.config import NodeSetups
from optuna_fleet.executor.cluster.engine import Cluster, Engine
from optuna_fleet.executor.cluster.inline import InlineRunner
from optuna_fleet.executor.cluster.local import LocalCluster
from optuna_fleet.executor.cluster.ray import RayCluster
from optuna_fleet.executor.cluster.slurm.cluster import SlurmCluster, hint_at_slurm
from optuna_fleet.executor.deciding.controller import Controller
from optuna_fleet.executor.fleet.agents import DRIVER_LEASE_S
from optuna_fleet.executor.fleet.runtime import Runtime
from optuna_fleet.executor.given import Options
from optuna_fleet.preflight.findings import Findings, digest
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.loop import Loop
from optuna_fleet.sampler_bridge.objective_code import digest_of
from optuna_fleet.sampler_bridge.retention import CheckpointRetention
from optuna_fleet.settings import packed_setup, settings_here
from optuna_fleet.wire.packing import pack_objective
from optuna_fleet.wire.unpicklable import explained

_objective_ids = itertools.count()
CLUSTERS: dict[str, type[Cluster] | None] = {
    "local": LocalCluster,
    "inline": None,  # nothing is placed
    "slurm": SlurmCluster,
    "ray": RayCluster,
}


class FleetRunner:
    """Runs calls on agents and trainers that stay up in between.

    Attributes:
        makes_checkpoints: Whether calls are recorded, so that an identical later call can resume
            them.
        summary: The last call in numbers; None if it broke off.
    """

    makes_checkpoints = True

    def __init__(self, options: Options, engine: Engine) -> None:
        self.summary: FleetSummary | None = None
        self._options = options
        self._engine = engine
        self._runtime: Runtime | None = None
        self._findings: Findings | None = None
        self._setup = packed_setup(options.setup)

    def run(self, loop: Loop, func: Callable[[Any], Any]) -> None:
        """Run trials until `loop` proposes no more.

        Raises:
            BaseException: The first failure of a trial that `catch` does not cover.
        """
        __tracebackhide__ = True
        began = time.time()
        _check_decorators(func)
        options, objective = self._options, _packed(func, loop.study)
        runtime = self._started(_uses_torch(func, objective))
        job = Job(
            options=options,
            objective_id=next(_objective_ids),
            objective=objective,
            settings=settings_here(self._setup),
            gc_after_trial=loop.gc_after_trial,
            maximize=loop.maximize,
        )
        checkpoints = options.checkpoints
        folder = runtime.folder_of(loop.study.study_name)
        num_kept = 0 if loop.folder is None else checkpoints.keep
        kept = folder, num_kept, checkpoints.max_bytes
        retention = CheckpointRetention(loop.study, *kept, loop.patiently)
        findings = self._findings_of(func, loop)
        sweep = Sweep(
            *(runtime, loop.ledger, loop.proposals, job, retention, findings), began=began
        )
        driver = Driver(sweep, self._new_controller(runtime, findings))
        try:
            with driver.interrupts:
                driver.run()
            stats = runtime.pipeline_stats() if options.pipeline else None
            self.summary = sweep.summary(stats)
            compat.fleet_logger.info(str(self.summary))
        except KeyboardInterrupt as interrupt:
            # The driver's own frames tell the user nothing, and a notebook would print them all.
            raise interrupt.with_traceback(None)  # noqa: B904 - the same
        finally:
            if not driver.has_freed_devices:
                self.close()
            del self  # see `FleetExecutor._run`
        if sweep.failure is not None:
            raise sweep.failure

    def _new_controller(self, runtime: Runtime, findings: Findings) -> Controller:
        return Controller(
            self._options.policy,
            profiles=runtime.profiles,
            run_ids=runtime.run_ids,
            findings=findings.all,
        )

    def _findings_of(self, func: Callable[[Any], Any], loop: Loop) -> Findings:
        """What was found of the objective by checks: in this process, or by other ones."""
        known, pipeline = self._findings, self._options.pipeline
        of = digest(digest_of(func), pipeline.spec() if pipeline else None)
        store = None if loop.folder is None else loop.folder.store
        if known is None or known.of != of or not of or store not in (None, known.store):
            self._findings = known = Findings(of, store)
        return known

    def _started(self, preload: bool) -> Runtime:
        if self._runtime is None or not self._runtime.is_ours:
            options, pipeline = self._options, self._options.pipeline
            if pipeline is not None and (own := options.policy.own_preprocessors) is not None:
                pipeline = pipeline.unshared(own)
            setups = NodeSetups(
                pipeline=pipeline,
                setup=self._setup,
                preload=preload or pipeline is not None,
                stuck_s=options.limits.stuck_s,
                silence_s=DRIVER_LEASE_S if self._engine.has_leases else None,
            )
            self._runtime = Runtime(
                self._engine,
                IsolatedAllocator(options.allocator, CAUTIOUS),
                options.checkpoint_dir,
                options.limits,
                setups,
            )
            self._finalizer = weakref.finalize(self, self._runtime.close)
        return self._runtime

    def close(self) -> None:
        """End all processes; they start again with the next `run`. May be called again."""
        if self._runtime is not None:
            self._runtime = None
            self._finalizer()


def _check_decorators(func: Any) -> None:
    """Refuse decorators of trackers: they can't be pickled, or begin a run per rank and move."""
    while func is not None:
        module = getattr(func, "__globals__", {}).get("__name__", "")
        for tracker in ("mlflow", "wandb"):
            if module.startswith(f"optuna_integration.{tracker}"):
                raise FleetConfigError(
                    f"The objective is decorated by `track_in_{tracker}()`, which would begin a "
                    "run on each device of a trial, and after each move. Leave it out, and log as "
                    f"docs/recipes.md does, 'MLflow' and 'Weights & Biases': one run per trial. "
                    "The callback itself works, as `callbacks=`."
                )
        func = getattr(func, "__wrapped__", None)


def _packed(func: Any, study: Any) -> bytes:
    names = compat.names_of(study)
    try:
        return pack_objective(func, names)
    except Exception as error:
        whole, dumps = {"objective": func}, partial(pack_objective, names=names)
        reason = explained(whole, "what `optimize` was given", error, dumps)
        raise FleetConfigError(
            f"The objective can't be sent to the trainers, which are other processes: {reason} "
            "Create such a thing inside the objective, or when it is first used there."
        ) from error


def _uses_torch(func: Any, pickled: bytes) -> bool:
    """Whether to import torch once for all trainers.

    A wrong guess costs the time of an import, and changes nothing: see `trainer.objective`.
    """
    by_reference = getattr(func, "__module__", "__main__") != "__main__"
    return b"torch" in pickled or (by_reference and "torch" in sys.modules)


def cluster_of(given: str | Cluster | Engine) -> Cluster | Engine | None:
    """The cluster or engine that `FleetExecutor(cluster=)` stands for; None for "inline".

    Raises:
        FleetConfigError: `given` is neither.
    """
    if isinstance(given, Cluster | Engine) and not isinstance(given, type):
        return given
    check_choice("cluster", given, CLUSTERS)
    if given == "local":
        hint_at_slurm(os.environ)
    kind = CLUSTERS[str(given)]
    return None if kind is None else kind()


def runner_of(cluster: Cluster | Engine | None, options: Options) -> FleetRunner | InlineRunner:
    """What runs calls there."""
    if cluster is None:
        return InlineRunner(options)
    engine = cluster.engine(options) if isinstance(cluster, Cluster) else cluster
    return FleetRunner(options, engine)
