"""The objective of a call, which each node keeps for its trainers."""

from __future__ import annotations

from optuna_fleet.executor.call.runs import Job
from optuna_fleet.executor.fleet.runtime import Runtime
from optuna_fleet.wire.node_messages import KeepObjective, ObjectiveKept


class ObjectiveCopies:
    """Sends it to each node once."""

    def __init__(self, runtime: Runtime, job: Job) -> None:
        self._runtime = runtime
        self._job = job
        self._at: dict[str, str | None] = {}  # by agent; None until it has answered

    def on_device(self, device: int) -> str | None:
        """Where it is on a device's node; None until that has it."""
        process = self._runtime.trainers.process_on(device)
        if process is None:
            return None
        if process.agent not in self._at:
            self._at[process.agent] = None
            job = self._job
            message = KeepObjective(
                objective_id=job.objective_id, objective=job.objective, settings=job.settings
            )
            self._runtime.agents.tell(process.agent, message)
        return self._at[process.agent]

    def kept(self, message: ObjectiveKept) -> None:
        """A node has an objective."""
        if message.objective_id == self._job.objective_id:
            self._at[message.agent] = message.path
