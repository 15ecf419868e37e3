"""What trainers and agents say, and what is found out about them, as events for the controller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from optuna_fleet.events import (
    CheckpointSaved,
    DataRequested,
    DeviceGone,
    DeviceJoined,
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
    RunLingers,
    WidthLimited,
)
from optuna_fleet.executor.call.held import Start
from optuna_fleet.executor.call.parts import Due, Parts
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.executor.call.watchdog import Hung, may_be_joining
from optuna_fleet.executor.fleet.capacity import Capacity
from optuna_fleet.executor.fleet.faults import NodeFaults
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

GATHER_S = 0.15
"""For so long others are waited for that may join, or end: one plan serves all of them."""

AWAIT_S = 1.0
"""For so long in all those that are known to come, while trials run."""

LEAVE_S = 0.5
"""For so long trials that have left a node that goes wait for the others there."""


class Joins:
    """Holds back devices that join, until no more of them are waited for.

    Args:
        are_starting: Whether others are on their way, for which trials that run can wait.
        later: Has `due` asked so many seconds from now.
    """

    def __init__(
        self,
        are_starting: Callable[[], bool],
        later: Callable[[float, Callable[[], list[Event]]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._are_starting = are_starting
        self._later = later
        self._clock = clock
        self._held: list[Event] = []
        self._first = 0.0

    def held_back(self, events: Sequence[Event], *, at_once: bool = False) -> list[Event]:
        """What to tell now: nothing of devices that join; anything else comes after these.

        If no trial has run yet, all is told `at_once`.
        """
        is_first = not self._held
        self._held += events
        if at_once or not all(isinstance(event, DeviceJoined) for event in events):
            return self._all()
        if is_first and self._held:
            self._first = self._clock()
            self._later(GATHER_S, self.due)
            self._later(AWAIT_S, self.due)
        return self.due()

    def due(self) -> list[Event]:
        """Devices that have waited long enough."""
        waited_s = self._clock() - self._first
        if waited_s < GATHER_S or (waited_s < AWAIT_S and self._are_starting()):
            return []
        return self._all()

    def _all(self) -> list[Event]:
        events, self._held = self._held, []
        return events


class Receiver:
    """Takes messages, in order, notes what they say and answers calls; returns what is news."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._runtime, self._runs = parts.runtime, parts.runs
        self._exclusion = parts.runtime.exclusion
        self._joins = Joins(lambda: bool(self._runs) and self._runtime.are_starting, parts.later)
        self._node_faults = NodeFaults()
        self._are_any_lost = False  # else it makes no difference who gets on
        self._capacity = Capacity()
        self._may_grow: bool | None = None
        self._left_out: set[int] = set()

    # -- messages ---------------------------------------------------------------------------------

    def take(self, message: Any) -> Sequence[Event]:
        """Take a message; what ended runs still say is dropped."""
        if isinstance(message, Due):
            return self._parts.do(message)
        run = self._runs.get(getattr(message, "run_id", -1))
        if run is not None:
            return self._take_of_run(run, message)
        return [*self._take(message), *self.changes()]

    def _take_of_run(self, run: RunRecord, message: Any) -> list[Event]:  # noqa: C901 - one arm each
        parts, number = self._parts, run.launch.number
        run.has_met |= isinstance(message, RankCall | DataRequested | Trained)
        match message:
            case RankCall() | Remark():
                return self._called(run, message)
            case Heartbeat():
                error = parts.watchdog.hear(run, message)
                return [] if error is None else [run.fail(error)]
            case AtStep():
                parts.stop_lines.at_step(run, message.rank, message.place)
            case DataRequested():
                return self._data_requested(run, message)
            case RateMeasured() | WidthLimited():
                return [message]
            case MoveRefused():
                run.leaving = None
                return [message]
            case CheckpointSaved():
                return [message, *self._checkpoint_told(message, number)]
            case CheckpointFailed():
                return self._checkpoint_told(message, number)
            case Leaving():
                run.leaving = run.leaving or parts.journal.now()
                parts.held.leaves(message.run_id)
            case Trained() if run.trial.moved_s is not None:
                seconds = run.trial.moved_s + parts.journal.now() - run.start
                run.trial.moved_s = None
                return [MoveMeasured(run_id=message.run_id, seconds=seconds)]
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
                if self._capacity.heard(self._runtime.reports.last):
                    return [PreprocessingMeasured(samples_per_s=self._capacity.samples_per_s)]
            case _:
                parts.launcher.send_waiting()
        return []

    def _data_requested(self, run: RunRecord, message: DataRequested) -> list[Event]:
        self._runtime.prepare_groups()
        run.is_movable |= message.model.movable
        self._parts.stop_lines.save_in_time(run)
        message = self._parts.checks.note(run.trial, message)
        return [message, *self._parts.outcomes.propose(again=True)]

    def _called(self, run: RunRecord, call: RankCall | Remark) -> list[Event]:
        parts, news = self._parts, list[Event]()
        if (ended := parts.calls.take(run, call)) is not None:
            news.append(parts.evaluator.epoch_ended(run.launch.number, ended))
        if self._are_any_lost and isinstance(call, Report | EndEpoch):
            news += self._progressed(run, run.launch.devices)
        if parts.proposals.is_delayed:
            news += parts.outcomes.propose(again=True)
        return news

    def _rank_ended(self, run: RunRecord, message: Ended) -> list[Event]:
        parts, device = self._parts, message.device
        run.end_rank(message)
        parts.calls.leave(run, message.rank)
        parts.stop_lines.at_step(run, message.rank)
        parts.held.rank_ended(run, message)
        self._will_linger(run, GATHER_S)
        news: list[Event] = [
            RankEnded(
                run_id=message.run_id,
                device=device,
                ending=message.ending,
                is_leaving=message.is_last or self._runtime.trainers.is_killed(device),
            )
        ]
        if message.is_last:  # before anything else is launched there
            news += [*self._device_lost(device), DeviceLost(device=device)]
        self._runtime.rank_ended(message)
        if message.has_device_failed and message.error is not None:
            news = self._lost(run, device, message.error.description) + news
        elif message.ending in (Ending.RETURNED, Ending.YIELDED, Ending.RAISED):
            news = self._progressed(run, [device]) + news
        return [*news, *parts.fail_if_faulty(run), *self.changes()]

    def _will_linger(self, run: RunRecord, seconds: float) -> None:
        """What its ranks leave is not free at once: others may end, for one plan."""
        if run.remaining() and not run.will_linger:
            run.will_linger = True
            lingers = RunLingers(run_id=run.launch.run_id)
            self._parts.later_of(seconds, run, lambda run: [lingers])

    def _checkpoint_told(
        self, message: CheckpointSaved | CheckpointFailed, number: int
    ) -> list[Event]:
        """A run has made a checkpoint, or can't: what follows if it has left its devices."""
        if isinstance(message, CheckpointSaved):
            self._parts.retention.folder.saved(message.location)
        else:
            self._checkpoint_failed(number, message)
        match self._parts.held.take(message):
            case Start() as start:
                return self._parts.start(start)
            case CheckpointSaved() as saved:
                return [saved]
        return []

    def _checkpoint_failed(self, number: int, message: CheckpointFailed) -> None:
        """Say so, once per trial."""
        trial = self._parts.trials[number]
        if not trial.has_complained:
            trial.has_complained = True
            compat.fleet_logger.warning(
                f"Trial {number} goes on without a new checkpoint. {message.problem} Until "
                "that is mended, it can't change its devices, and should its process die, it is "
                "run again from its last good checkpoint, or without one from its beginning."
            )

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
            news += self._device_lost(device)
            for run in [run for run in self._runs.values() if device in run.remaining()]:
                is_killed = trainers.is_killed(device)
                error = run.lose_rank(message, is_killed=is_killed)
                if error is not None:
                    news.append(run.fail(error))
                elif not is_killed and not is_with_node:
                    news += self._lost(run, device, f"its trainer ended with {message.cause}")
        news += self._change_fleet(self._runtime.device_events(message))
        self._parts.checks.send_waiting()  # one may have waited for a trainer there
        return news

    def _node_leaving(self, devices: Sequence[int]) -> list[Event]:
        for run in self._runs.values():
            if not set(devices).isdisjoint(run.remaining()):
                self._will_linger(run, LEAVE_S)
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
        for run in self._runs.values():
            if not run.has_met and may_be_joining(run) and len(run.launch.devices) > 1:
                run.causes.append("the node where its ranks look for each other was lost")
                for device in run.remaining():
                    self._runtime.kill(device)
                    news.append(DeviceLost(device=device, with_node=True))
        return news

    def _lost(self, run: RunRecord, device: int, cause: str) -> list[Event]:
        self._are_any_lost = True
        self._node_faults.lost(self._exclusion.node_of(device), run.launch.number, cause)
        return self._leave_out_nodes()

    def _progressed(self, run: RunRecord, devices: Iterable[int]) -> list[Event]:
        nodes = {self._exclusion.node_of(device) for device in devices}
        self._node_faults.progressed(nodes, run.launch.number)
        self._are_any_lost = self._node_faults.any_lost
        return self._leave_out_nodes()

    def _leave_out_nodes(self) -> list[Event]:
        """Leave out nodes that lose all trials; what flies there counts as lost with its node."""
        for name, why in self._node_faults.take_bad(self._exclusion.nodes_in_use):
            devices = self._exclusion.leave_out_node(name, why)
            for run in self._runs.values():
                if not set(devices).isdisjoint(run.remaining()):
                    run.causes.append(f"node {name} is left out")
        return self._newly_left_out()

    def _newly_left_out(self) -> list[Event]:
        new = self._runtime.faults.left_out - self._left_out
        self._left_out |= new
        return self._change_fleet([DeviceGone(device=device) for device in sorted(new)])

    def changes(self) -> list[Event]:
        """What has changed in the fleet that nobody tells: who is left out, who may still join."""
        news = self._newly_left_out()
        if self._may_grow != (now := self._runtime.may_grow):
            self._may_grow = now
            news += self._change_fleet([GrowthExpected(is_expected=now)])
        return news

    def _change_fleet(self, events: Sequence[Event]) -> list[Event]:
        return self._joins.held_back(events, at_once=not self._parts.launcher.has_launched)

    # -- what no message tells --------------------------------------------------------------------

    def look(self) -> list[Event]:
        """End runs that hang; say what else has changed."""
        for run in self._runs.values():
            self._parts.keep_to_time(run)
        hung = self._parts.watchdog.hung(self._runs.values())
        return [*(event for each in hung for event in self._end_hung(each)), *self.changes()]

    def _end_hung(self, hung: Hung) -> list[Event]:
        run, news = hung.run, list[Event]()
        run.causes.append(hung.words)
        devices = run.launch.devices
        if len({self._exclusion.node_of(device) for device in devices}) == 1:
            news = self._lost(run, devices[0], hung.words)
        if hung.is_rendezvous and len(devices) > 1:
            run.causes.append(self._runtime.replace_store())
        for device in run.remaining():
            self._runtime.kill(device)
        return news
