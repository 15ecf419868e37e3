"""What trainers and agents say, and what is found out about them, as events for the controller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from optuna_fleet.events import (
    CheckpointSaved,
    DataRequested,
    DeviceGone,
    DeviceLeaving,
    DeviceLost,
    Ending,
    Event,
    GrowthExpected,
    MoveMeasured,
    MoveRefused,
    PreprocessingMeasured,
    RankEnded,
    RateMeasured,
    RunFailed,
    RunLingers,
    WidthLimited,
)
from optuna_fleet.executor.call.held import Start
from optuna_fleet.executor.call.parts import Parts
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.executor.call.waits import GATHER_S, LEAVE_S, Deadlines, Joins
from optuna_fleet.executor.call.watchdog import Broken, Hung
from optuna_fleet.executor.fleet.faults import NodeFaults
from optuna_fleet.executor.fleet.pipelines import Capacity
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.wire.calls import EndEpoch, RankCall, Report
from optuna_fleet.wire.messages import (
    AtStep,
    CheckpointFailed,
    Ended,
    Heartbeat,
    Leaving,
    Remark,
    Trained,
    TrainerReady,
)
from optuna_fleet.wire.node_messages import (
    Checked,
    NodeLeaving,
    NodeLost,
    ObjectiveKept,
    PipelineNotice,
    PipelineReport,
    TrainerExited,
)


class Receiver:
    """Takes messages, in order, notes what they say and answers calls; returns what is news."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._runtime, self._runs = parts.runtime, parts.runs
        self._exclusion = parts.runtime.exclusion
        self._joins = Joins(lambda: bool(self._runs) and self._runtime.are_starting)
        self._endings = Deadlines()  # of runs in which a rank has ended, or will
        self._node_faults = NodeFaults()
        self._capacity = Capacity()
        self._may_grow = not parts.runtime.may_grow

    # -- messages ---------------------------------------------------------------------------------

    def take(self, message: Any) -> list[Event]:
        """Take a message; what ended runs still say is dropped."""
        run = self._runs.get(getattr(message, "run_id", -1))
        return self._take(message) if run is None else self._take_of_run(run, message)

    def _take_of_run(self, run: RunRecord, message: Any) -> list[Event]:  # noqa: C901 - one arm each
        parts, number = self._parts, run.launch.number
        run.has_met |= isinstance(message, RankCall | DataRequested | Trained)
        match message:
            case RankCall() | Remark():
                return self._called(run, message)
            case AtStep():
                parts.stop_lines.at_step(run, message.rank, message.place)
            case DataRequested():
                return self._data_requested(run, message)
            case RateMeasured() | WidthLimited() | MoveRefused():
                return [message]
            case CheckpointSaved():
                return [message, *self._checkpoint_told(message, number)]
            case CheckpointFailed():
                return self._checkpoint_told(message, number)
            case Leaving():
                parts.journal.note(message)
                parts.held.leaves(message.run_id)
            case Trained():
                parts.journal.note(message)
                if (seconds := parts.moves.take_cost_s(number)) is not None:
                    return [MoveMeasured(run_id=message.run_id, seconds=seconds)]
            case Heartbeat():
                parts.watchdog.hear(message)
            case Ended():
                return self._rank_ended(run, message)
        return []

    def _take(self, message: Any) -> list[Event]:
        """What is of no run, or of one that has stopped."""
        parts = self._parts
        match message:
            case TrainerReady() | TrainerExited():
                return self._trainer_changed(message)
            case CheckpointSaved() | CheckpointFailed():
                number = parts.held.trial_of(message.run_id)
                return [] if number is None else self._checkpoint_told(message, number)
            case PipelineNotice():
                compat.fleet_logger.warning(message.text)
            case ObjectiveKept():
                parts.copies.kept(message)
                parts.launcher.send_waiting()
                parts.checks.send_waiting()
            case Checked():
                return parts.checks.checked(message)
            case NodeLeaving():
                compat.fleet_logger.info(message.text)
                return self._node_leaving(message.devices)
            case NodeLost():
                return self._node_lost(message)
            case PipelineReport():
                parts.pipeline_log.note(self._runtime.reports.total, parts.journal.now())
                if self._capacity.heard(self._runtime.reports.last):
                    return [PreprocessingMeasured(samples_per_s=self._capacity.samples_per_s)]
            case _:
                parts.launcher.send_waiting()
        return []

    def _data_requested(self, run: RunRecord, message: DataRequested) -> list[Event]:
        self._runtime.prepare_groups()
        run.is_movable |= message.model.movable
        message = self._parts.checks.note(run.launch.number, message)
        return [message, *self._parts.outcomes.propose(again=True)]

    def _called(self, run: RunRecord, call: RankCall | Remark) -> list[Event]:
        news: list[Event] = []
        if (ended := self._parts.calls.take(run, call)) is not None:
            number = run.launch.number
            news.append(self._parts.evaluator.epoch_ended(number, ended))
        if isinstance(call, Report | EndEpoch):
            news += self._progressed(run, run.launch.devices)
        return news + self._parts.outcomes.propose(again=True)

    def _rank_ended(self, run: RunRecord, message: Ended) -> list[Event]:
        parts, device = self._parts, message.device
        run.end_rank(message)
        parts.watchdog.rank_ended(message)
        parts.calls.leave(run, message.rank)
        parts.deadlines.drop(device)
        parts.stop_lines.at_step(run, message.rank)
        parts.held.rank_ended(run, message)
        parts.journal.note(message)
        ended = RankEnded(
            run_id=message.run_id,
            device=device,
            ending=message.ending,
            is_leaving=message.is_last or self._runtime.trainers.is_killed(device),
        )
        if run.remaining():
            self._endings.begin(message.run_id, GATHER_S)
        else:
            self._endings.drop(message.run_id)
        lost: list[Event] = []
        if message.is_last:  # before anything else is launched there
            lost = [*self._device_lost(device), DeviceLost(device=device)]
        self._runtime.rank_ended(message)
        news = [ended, *lost]
        if message.has_device_failed and message.error is not None:
            return self._lost(run, device, message.error.description) + news
        if message.ending in (Ending.RETURNED, Ending.YIELDED, Ending.RAISED):
            return self._progressed(run, [device]) + news
        return news

    def _checkpoint_told(
        self, message: CheckpointSaved | CheckpointFailed, number: int
    ) -> list[Event]:
        """A run has made a checkpoint, or can't: what follows if it has left its devices."""
        if isinstance(message, CheckpointSaved):
            self._parts.retention.folder.saved(message.location)
        else:
            self._parts.launcher.checkpoint_failed(number, message)
        match self._parts.held.take(message):
            case Start() as start:
                return self._parts.start(start)
            case CheckpointSaved() as saved:
                return [saved]
        return []

    def _device_lost(self, device: int) -> list[Event]:
        """No run begins there, and nothing is waited for that was there."""
        self._parts.launcher.trainer_died(device)
        starts = self._parts.held.device_lost(device)
        return [event for start in starts for event in self._parts.start(start)]

    # -- the fleet --------------------------------------------------------------------------------

    def _trainer_changed(
        self, message: TrainerReady | TrainerExited, *, is_with_node: bool = False
    ) -> list[Event]:
        device, trainers, news = message.device, self._runtime.trainers, list[Event]()
        if isinstance(message, TrainerExited) and message.process == trainers.process_on(device):
            self._parts.deadlines.drop(device)
            news += self._device_lost(device)
            for run in [run for run in self._runs.values() if device in run.remaining()]:
                is_killed = trainers.is_killed(device)
                error = run.lose_rank(message, is_killed=is_killed)
                if error is not None:
                    news.append(_fail(run, error))
                elif not is_killed and not is_with_node:
                    news += self._lost(run, device, f"its trainer ended with {message.cause}")
        return news + self._change_fleet(self._runtime.device_events(message))

    def _node_leaving(self, devices: Sequence[int]) -> list[Event]:
        for run_id, run in self._runs.items():
            if not set(devices).isdisjoint(run.remaining()):
                self._endings.begin(run_id, LEAVE_S)
        return self._change_fleet([DeviceLeaving(device=device) for device in devices])

    def _node_lost(self, message: NodeLost) -> list[Event]:
        compat.fleet_logger.warning(message.text)
        news: list[Event] = []
        if not message.is_replaced:  # first: what is lost with its node counts against no trial
            news += self._change_fleet([DeviceGone(device=device) for device in message.devices])
        for exited in message.exits:  # at once: nothing is placed where all is dead
            news += self._trainer_changed(exited, is_with_node=True)
        news += self._parts.checks.node_lost(message.devices)
        return news + (self._store_lost() if message.had_store else [])

    def _store_lost(self) -> list[Event]:
        """Those that look for each other there may do so for ever: it need not refuse them."""
        news: list[Event] = []
        for run_id, run in self._runs.items():
            is_joining = not run.has_met and self._parts.watchdog.may_be_joining(run_id)
            if is_joining and len(run.launch.devices) > 1:
                run.causes.append("the node where its ranks look for each other was lost")
                for device in run.remaining():
                    self._runtime.kill(device)
                    news.append(DeviceLost(device=device, with_node=True))
        return news

    def _lost(self, run: RunRecord, device: int, cause: str) -> list[Event]:
        self._node_faults.lost(self._exclusion.node_of(device), run.launch.number, cause)
        return self._leave_out_nodes()

    def _progressed(self, run: RunRecord, devices: Iterable[int]) -> list[Event]:
        if not self._node_faults.any_lost:
            return []
        nodes = {self._exclusion.node_of(device) for device in devices}
        self._node_faults.progressed(nodes, run.launch.number)
        return self._leave_out_nodes()

    def _leave_out_nodes(self) -> list[Event]:
        """Leave out nodes that lose all trials; what flies there counts as lost with its node."""
        news: list[Event] = []
        for name, why in self._node_faults.take_bad(self._exclusion.nodes_in_use):
            devices = self._exclusion.leave_out_node(name, why)
            for run in self._runs.values():
                if not set(devices).isdisjoint(run.remaining()):
                    run.causes.append(f"node {name} is left out")
            news += self._change_fleet([DeviceGone(device=device) for device in devices])
        return news

    def _change_fleet(self, events: list[Event]) -> list[Event]:
        return self._joins.held_back(events, at_once=not self._parts.launcher.launched)

    # -- what no message tells --------------------------------------------------------------------

    def waits_s(self) -> list[float]:
        """Seconds until `due` has more to tell, if that is known."""
        checks = self._parts.checks
        return [*self._joins.waits_s(), *self._endings.waits_s(), *checks.waits_s()]

    def due(self) -> list[Event]:
        """What is to be told now, though nobody has said anything."""
        return [
            *self.growth(),
            *self._joins.due(),
            *self._parts.checks.due(),
            *(RunLingers(run_id=run_id) for run_id in self._endings.take_expired()),
            *(DeviceGone(device=d) for d in self._runtime.faults.left_out),
        ]

    def growth(self) -> list[Event]:
        """Whether devices may join that were never there, if that has changed."""
        if self._may_grow == (now := self._runtime.may_grow):
            return []
        self._may_grow = now
        return self._change_fleet([GrowthExpected(is_expected=now)])

    def stop_faulty(self, fault: Hung | Broken) -> list[Event]:
        """End a run that hangs or breaks a limit of its trial."""
        run = self._runs[fault.run_id]
        if isinstance(fault, Broken):
            return [_fail(run, fault.error)]
        run.causes.append(str(fault))
        devices, news = run.launch.devices, list[Event]()
        if len({self._exclusion.node_of(device) for device in devices}) == 1:
            news = self._lost(run, devices[0], str(fault))
        if fault.is_rendezvous and len(run.launch.devices) > 1:
            run.causes.append(self._runtime.replace_store())
        for device in run.remaining():
            self._runtime.kill(device)
        return news


def _fail(run: RunRecord, error: BaseException) -> Event:
    """End a run at once, and its trial with this error."""
    run.verdict = error
    return RunFailed(run_id=run.launch.run_id)
