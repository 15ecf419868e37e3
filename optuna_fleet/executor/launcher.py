"""Launches runs: tells each trainer what it needs to know, once it can be told."""

from __future__ import annotations

from dataclasses import replace

from optuna_fleet.events import Launch
from optuna_fleet.executor.runs import Job
from optuna_fleet.executor.runtime import Runtime
from optuna_fleet.messages import RunTrial


class Launcher:
    """Sends `RunTrial` to the trainers of one call.

    Attributes:
        launched: Numbers of the trials that were launched at least once.
        checkpointed: Those that have a checkpoint to go on from.
    """

    def __init__(self, runtime: Runtime, job: Job) -> None:
        self._runtime = runtime
        self._job = job
        self._waiting: list[tuple[int, RunTrial]] = []
        self._knows_objective: set[int] = set()
        self.launched: set[int] = set()
        self.checkpointed: set[int] = set()

    def launch(self, launch: Launch, *, trial_id: int) -> None:
        """Start a run on its devices."""
        self.launched.add(launch.number)
        for rank, device in enumerate(launch.devices):
            self._waiting.append((device, self._order(launch, rank, device, trial_id)))
        self.send_waiting()

    def _order(self, launch: Launch, rank: int, device: int, trial_id: int) -> RunTrial:
        job = self._job
        objective = None if device in self._knows_objective else job.objective
        self._knows_objective.add(device)
        path = str(self._runtime.checkpoint_of(job.study_name, launch.number))
        return RunTrial(
            run_id=launch.run_id,
            number=launch.number,
            trial_id=trial_id,
            rank=rank,
            world_size=len(launch.devices),
            seed=job.seed,
            objective_id=job.objective_id,
            objective=objective,
            measure=launch.measure,
            group=self._runtime.group_name(launch.run_id),
            store=None,
            checkpoint=path if launch.number in self.checkpointed else None,
            checkpoint_to=path,
            gc_after_trial=job.gc_after_trial,
            pulse_s=job.limits.pulse_s,
        )

    def send_waiting(self) -> None:
        """Send what can be sent: runs on several devices wait for the store of the rendezvous."""
        kept = []
        for device, order in self._waiting:
            if order.world_size > 1 and self._runtime.store is None:
                self._runtime.open_store()
                kept.append((device, order))
            else:
                self._runtime.send(device, replace(order, store=self._runtime.store))
        self._waiting = kept

    def trainer_died(self, device: int) -> None:
        """The device's next trainer knows nothing."""
        self._knows_objective.discard(device)
