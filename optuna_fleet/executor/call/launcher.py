"""Launches runs: tells each trainer what it needs to know, once it can be told."""

from __future__ import annotations

from dataclasses import replace

from optuna_fleet.checkpoints.store import mark
from optuna_fleet.events import Launch
from optuna_fleet.executor.call.held import Start
from optuna_fleet.executor.call.runs import Job, TrialRecord
from optuna_fleet.executor.fleet.runtime import Runtime
from optuna_fleet.resources import needs_gloo
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.sampler_bridge.proposals import Proposals
from optuna_fleet.sampler_bridge.retention import CheckpointRetention
from optuna_fleet.wire.messages import RunTrial
from optuna_fleet.wire.node_messages import KeepObjective, ObjectiveKept


class ObjectiveCopies:
    """The objective of a call, which each node keeps for its trainers: it is sent there once."""

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


class Launcher:
    """Sends `RunTrial` to the trainers of one call.

    Attributes:
        has_launched: Any trial was launched, be it by a driver that is dead.
    """

    def __init__(
        self,
        runtime: Runtime,
        job: Job,
        retention: CheckpointRetention,
        ledger: Ledger,
        proposals: Proposals,
        copies: ObjectiveCopies,
    ) -> None:
        self._runtime = runtime
        self._copies = copies
        self._job = job
        self._retention = retention
        self._ledger = ledger
        self._proposals = proposals
        self._waiting: list[tuple[int, RunTrial]] = []
        self.has_launched = bool(proposals.adopted())
        self._token = mark(retention.folder.root)

    def run_name(self, run_id: int) -> str:
        """Name of a run, in what it writes, unlike that of any run of another call or driver."""
        return f"{self._token[:8]}-{run_id}"

    def launch(self, what: Start, trial: TrialRecord) -> None:
        """Start a run of a trial, with what was suggested to it before, on its devices."""
        if not trial.was_launched:
            self._retention.drop(what.launch.number)  # of another study of that name
        trial.was_launched = self.has_launched = True
        order = replace(self._order(what.launch), held=what.held)
        for rank, device in enumerate(what.launch.devices):
            self._waiting.append((device, replace(order, rank=rank)))
        self.send_waiting()

    def _order(self, launch: Launch) -> RunTrial:
        """What the ranks of a run are told alike."""
        job, options, location = self._job, self._job.options, launch.checkpoint
        agents = self._runtime.agents
        folder, keeps_any = self._retention.folder, self._retention.keeps_any
        return RunTrial(
            run_id=launch.run_id,
            number=launch.number,
            trial_id=compat.id_of(self._proposals[launch.number]),
            rank=0,
            world_size=len(launch.devices),
            seed=options.seed,
            objective_id=job.objective_id,
            measure=launch.measure,
            group=self._runtime.group_name(launch.run_id),
            store=None,
            study_name=folder.study_name,
            by_gloo=needs_gloo((agents.devices[d] for d in launch.devices), agents.nodes.here()),
            parameters=self._ledger.suggested(launch.number),
            run_name=self.run_name(launch.run_id),
            folder=str(folder.path),
            folder_token=self._token,
            checkpoints=() if location is None else folder.resumable(location),
            bests=() if location is None else folder.bests(launch.number),
            leaves_final=keeps_any,
            gc_after_trial=job.gc_after_trial,
            maximize=job.maximize,
            heartbeat_s=options.limits.heartbeat_s,
            collective_s=options.limits.collective_s,
            num_devices=self._runtime.most_devices(spans_types=False),
            num_of_all_types=self._runtime.most_devices(spans_types=True),
        )

    def send_waiting(self) -> None:
        """Send what can be sent.

        Runs wait until their nodes have the objective, those on several devices for the store of
        the rendezvous too.
        """
        kept, rendezvous = [], self._runtime.rendezvous
        for device, order in self._waiting:
            objective_at = self._copies.on_device(device)
            if order.world_size > 1:
                rendezvous.open()
            if objective_at is None or (order.world_size > 1 and rendezvous.store is None):
                kept.append((device, order))
            else:
                order = replace(order, store=rendezvous.store, objective_at=objective_at)
                self._runtime.send(device, order)
        self._waiting = kept

    def trainer_died(self, device: int) -> None:
        """No run that waited to be sent there begins."""
        over = {order.run_id for waiting, order in self._waiting if waiting == device}
        self._waiting = [item for item in self._waiting if item[1].run_id not in over]
