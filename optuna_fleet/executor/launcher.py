"""Launches runs: tells each trainer what it needs to know, once it can be told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from optuna_fleet.events import Launch
from optuna_fleet.executor.runs import Job
from optuna_fleet.executor.runtime import Runtime
from optuna_fleet.resources import share_gpu
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.retention import CheckpointRetention
from optuna_fleet.settings import Settings
from optuna_fleet.wire.messages import CheckpointFailed, RunTrial


class Launcher:
    """Sends `RunTrial` to the trainers of one call.

    Attributes:
        launched: Numbers of the trials that were launched at least once, be it by a driver that
            is dead.
    """

    def __init__(
        self, runtime: Runtime, job: Job, retention: CheckpointRetention, *, adopted: Iterable[int]
    ) -> None:
        self._runtime = runtime
        self._job = job
        self._retention = retention
        self._waiting: list[tuple[int, RunTrial]] = []
        self._knows_objective: set[int] = set()
        self.launched: set[int] = set(adopted)
        self._without_checkpoint: set[int] = set()

    def launch(self, launch: Launch, *, trial_id: int, parameters: Mapping[str, Any]) -> None:
        """Start a run of a trial, with what was suggested to it before, on its devices."""
        if launch.number not in self.launched:
            self._retention.folder.drop(launch.number)  # of another study of that name
            self.launched.add(launch.number)
        for rank, device in enumerate(launch.devices):
            order = self._order(launch, rank, trial_id, parameters)
            self._waiting.append((device, order))
        self.send_waiting()

    def _order(
        self, launch: Launch, rank: int, trial_id: int, parameters: Mapping[str, Any]
    ) -> RunTrial:
        job, options, device = self._job, self._job.options, launch.devices[rank]
        is_new = device not in self._knows_objective
        self._knows_objective.add(device)
        folder, keeps_any = self._retention.folder, self._retention.keeps_any
        return RunTrial(
            run_id=launch.run_id,
            number=launch.number,
            trial_id=trial_id,
            rank=rank,
            world_size=len(launch.devices),
            seed=options.seed,
            objective_id=job.objective_id,
            objective=job.objective if is_new else None,
            settings=job.settings if is_new else Settings(),
            measure=launch.measure,
            group=self._runtime.group_name(launch.run_id),
            store=None,
            study_name=folder.study_name,
            shares_gpu=share_gpu(self._runtime.fleet.devices[d] for d in launch.devices),
            parameters=parameters,
            checkpoint=launch.checkpoint,
            checkpoint_to=str(folder.checkpoint(launch.number)),
            final_to=str(folder.final(launch.number)) if keeps_any else None,
            best_to=str(folder.best(launch.number)) if keeps_any else None,
            gc_after_trial=job.gc_after_trial,
            maximize=job.maximize,
            heartbeat_s=options.limits.heartbeat_s,
            collective_s=options.limits.collective_s,
            num_devices=self._runtime.widest,
        )

    def send_waiting(self) -> None:
        """Send what can be sent: runs on several devices wait for the store of the rendezvous."""
        kept = []
        for device, order in self._waiting:
            if order.world_size > 1 and self._runtime.rendezvous.store is None:
                self._runtime.rendezvous.open()
                kept.append((device, order))
            else:
                self._runtime.send(device, replace(order, store=self._runtime.rendezvous.store))
        self._waiting = kept

    def checkpoint_failed(self, launch: Launch, message: CheckpointFailed) -> None:
        """Say so once per trial."""
        if launch.number not in self._without_checkpoint:
            self._without_checkpoint.add(launch.number)
            compat.fleet_logger.warning(
                f"Trial {launch.number} goes on without a new checkpoint. {message.problem} Until "
                "that is mended, it can't change its devices, and should its process die, it is "
                "run again from its last good checkpoint."
            )

    def trainer_died(self, device: int) -> None:
        """The device's next trainer knows nothing, and no run that waited for its store begins."""
        self._knows_objective.discard(device)
        over = {order.run_id for waiting, order in self._waiting if waiting == device}
        self._waiting = [item for item in self._waiting if item[1].run_id not in over]
