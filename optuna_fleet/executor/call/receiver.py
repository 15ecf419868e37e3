"""What trainers and agents say, and what is found out about them, as events for the controller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from optuna_fleet.executor.call import launches, stop_lines
from optuna_fleet.executor.call.call_handler import CallHandler
from optuna_fleet.executor.call.checks import Checks
from optuna_fleet.executor.call.outcomes import EpochEvaluator, propose
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.executor.call.sweep import Due, Sweep
from optuna_fleet.executor.call.watchdog import Hung, may_be_joining
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
    PipelineReport,
    TrainerExited,
)

GATHER_S = 0.15
"""Seconds to wait for more devices to join, or more ranks to end: one plan serves all."""


class Receiver:
    """Takes messages in order: notes what they say, answers calls, returns the events of it."""

    def __init__(self, sweep: Sweep, calls: CallHandler, checks: Checks) -> None:
        self._sweep = sweep
        self._calls = calls
        self._checks = checks
        self._evaluator = EpochEvaluator(
            sweep.job.options, sweep.ledger, maximize=sweep.job.maximize
        )
        self._runtime, self._runs = sweep.runtime, sweep.runs
        self._agents = sweep.runtime.agents
        self._held: list[Event] = []  # devices that join
        self._node_faults = NodeFaults()
        self._capacity = Capacity()
        self._may_grow: bool | None = None
        self._left_out: set[int] = set()
        self._remarks: set[str] = set()  # keys of remarks that were shown

    # -- messages ---------------------------------------------------------------------------------

    def take(self, message: Any) -> Sequence[Event]:
        """Take a message; those of ended runs are dropped.

        It is None where the fleet heard something that makes no message for a call.
        """
        run = self._runs.get(getattr(message, "run_id", -1))
        if run is None:
            if isinstance(message, Due):
                return self._sweep.do(message)
            news = self._take(message)
            self._checks.send_waiting()
            return [*news, *launches.send_waiting(self._sweep), *self.changes()]
        if isinstance(message, RankCall):
            return self._called(run, message)
        return self._take_of_run(run, message)

    def _called(self, run: RunRecord, call: RankCall) -> Sequence[Event]:
        sweep, news = self._sweep, list[Event]()
        if (ended := self._calls.carry_out(run, run.calls.take(call))) is not None:
            news.append(self._evaluator.epoch_ended(run.launch.number, ended))
        if isinstance(call, Report | EndEpoch) and self._node_faults.any_lost:
            news += self._progressed(run, run.launch.devices)
        if sweep.proposals.is_delayed:
            news += propose(sweep, again=True)
        return news

    def _take_of_run(self, run: RunRecord, message: Any) -> list[Event]:  # noqa: C901 - one arm each
        sweep = self._sweep
        match message:
            case Heartbeat():
                error = sweep.watchdog.hear(run, message)
                return [] if error is None else [run.fail(error)]
            case Remark():
                self._remark(run, message)
            case AtStep():
                stop_lines.at_step(sweep, run, message.rank, message.place)
            case DataRequested():
                return self._data_requested(run, message)
            case RateMeasured() | WidthLimited():
                return [message]
            case MoveRefused():
                run.leaving = None
                return [message]
            case CheckpointSaved() | CheckpointFailed():
                return launches.checkpoint_told(sweep, message)
            case Leaving():
                self.leaves(run)
            case Trained():
                return self._trained(run)
            case Ended():
                return self._rank_ended(run, message)
        return []

    def _take(self, message: Any) -> list[Event]:
        """What is of no run, or of one that has stopped."""
        sweep = self._sweep
        match message:
            case TrainerReady() | TrainerExited():
                return self._trainer_changed(message)
            case CheckpointSaved() | CheckpointFailed():
                return launches.checkpoint_told(sweep, message)
            case ObjectiveKept() if message.objective_id == sweep.job.objective_id:
                sweep.objective_at[message.agent] = message.path
            case Checked():
                return self._checks.checked(message)
            case NodeLeaving():
                compat.fleet_logger.info(message.text)
                return self._change_fleet([DeviceLeaving(device=d) for d in message.devices])
            case NodeLost():
                return self._node_lost(message)
            case PipelineReport():
                if self._capacity.heard(self._runtime.reports.last):
                    return [PreprocessingMeasured(samples_per_s=self._capacity.samples_per_s)]
        return []

    def _remark(self, run: RunRecord, remark: Remark) -> None:
        """Say it once, though each rank of each trial may find it."""
        if not (remark.keys and self._remarks.issuperset(remark.keys)):
            self._remarks.update(remark.keys)
            compat.fleet_logger.warning(f"Trial {run.launch.number}: {remark.text}")

    def _data_requested(self, run: RunRecord, message: DataRequested) -> list[Event]:
        self._runtime.prepare_groups()
        run.is_movable |= message.model.movable
        stop_lines.save_in_time(self._sweep, run)
        message = self._checks.note(run.trial, message)
        return [message, *propose(self._sweep, again=True)]

    def leaves(self, run: RunRecord) -> None:
        """A run leaves its devices: the next checkpoint it reports is the state it left with."""
        run.leaving = run.leaving or self._sweep.journal.now()
        run.has_told = False

    def _trained(self, run: RunRecord) -> list[Event]:
        if run.trial.moved_s is None:
            return []
        seconds = run.trial.moved_s + self._sweep.journal.now() - run.start
        run.trial.moved_s = None
        return [MoveMeasured(run_id=run.launch.run_id, seconds=seconds)]

    def _rank_ended(self, run: RunRecord, message: Ended) -> list[Event]:
        sweep, device = self._sweep, message.device
        run.end_rank(message)
        run.calls.leave(message.rank)  # this rank makes no more calls: don't wait for them
        self._calls.carry_out(run, run.calls.next_call())
        stop_lines.at_step(sweep, run, message.rank)
        launches.rank_ended(run, message)
        if run.remaining() and not run.will_linger:  # more may follow: one plan serves all
            run.will_linger = True
            lingers = RunLingers(run_id=run.launch.run_id)
            sweep.later_of(GATHER_S, run, lambda run: [lingers])
        news: list[Event] = [
            RankEnded(
                run_id=message.run_id,
                device=device,
                ending=message.ending,
                is_leaving=message.is_last or self._runtime.trainers.is_killed(device),
            )
        ]
        if message.is_last:  # before anything else is launched there
            news += [*launches.device_lost(sweep, device), DeviceLost(device=device)]
        self._runtime.rank_ended(message)
        if message.has_device_failed and message.error is not None:
            news = self._lost(run, device, message.error.description) + news
        elif message.ending in (Ending.RETURNED, Ending.YIELDED, Ending.RAISED):
            news = self._progressed(run, [device]) + news
        return [*news, *sweep.fail_if_faulty(run), *self.changes()]

    # -- the fleet --------------------------------------------------------------------------------

    def _trainer_changed(
        self, message: TrainerReady | TrainerExited, *, is_with_node: bool = False
    ) -> list[Event]:
        device, trainers, news = message.device, self._runtime.trainers, list[Event]()
        if isinstance(message, TrainerExited) and message.process == trainers.process_on(device):
            news += launches.device_lost(self._sweep, device)
            for run in [run for run in self._runs.values() if device in run.remaining()]:
                is_killed = trainers.is_killed(device)
                error = run.lose_rank(message, is_killed=is_killed)
                if error is not None:
                    news.append(run.fail(error))
                elif not is_killed and not is_with_node:
                    news += self._lost(run, device, f"its trainer ended with {message.cause}")
        return news + self._change_fleet(self._runtime.device_events(message))

    def _node_lost(self, message: NodeLost) -> list[Event]:
        compat.fleet_logger.warning(message.text)
        news: list[Event] = []
        # First: a trial that loses its node is not charged with a restart.
        if not message.is_replaced:
            news += self._change_fleet([DeviceGone(device=device) for device in message.devices])
        for exited in message.exits:  # at once: nothing is placed where all is dead
            news += self._trainer_changed(exited, is_with_node=True)
        news += self._checks.node_lost(message.devices)
        return news + (self._store_lost() if message.had_store else [])

    def _store_lost(self) -> list[Event]:
        """End runs whose ranks may still be meeting at the lost store: they may never notice."""
        news: list[Event] = []
        for run in self._runs.values():
            if may_be_joining(run) and len(run.launch.devices) > 1:
                run.causes.append("the node where its ranks look for each other was lost")
                for device in run.remaining():
                    self._runtime.kill(device)
                    news.append(DeviceLost(device=device, with_node=True))
        return news

    def _lost(self, run: RunRecord, device: int, cause: str) -> list[Event]:
        self._node_faults.lost(self._agents.node_of(device), run.launch.number, cause)
        return self._leave_out_nodes()

    def _progressed(self, run: RunRecord, devices: Iterable[int]) -> list[Event]:
        nodes = {self._agents.node_of(device) for device in devices}
        self._node_faults.progressed(nodes, run.launch.number)
        return self._leave_out_nodes()

    def _leave_out_nodes(self) -> list[Event]:
        """Stop using nodes that lose every trial; trials there now count as lost with the node."""
        for name, why in self._node_faults.take_bad(self._agents.in_use):
            devices = self._runtime.trainers.leave_out_node(name, why)
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
        """Hold back devices that join, for a moment: more may follow, and one plan serves all.

        Any other change is passed on at once, after them; and all is, until a trial has run.
        """
        is_first = not self._held
        self._held += events
        if not self._sweep.has_launched or any(
            type(one) is not DeviceJoined for one in self._held
        ):
            return self._let_go()
        if is_first and events:
            self._sweep.later(GATHER_S, self._let_go)
        return []

    def _let_go(self) -> list[Event]:
        held, self._held = self._held, []
        return held

    # -- what no message tells --------------------------------------------------------------------

    def look(self) -> list[Event]:
        """End runs that hang; say what else has changed."""
        for run in self._runs.values():
            self._sweep.keep_to_time(run)
        hung = self._sweep.watchdog.hung(self._runs.values())
        return [*(event for each in hung for event in self._end_hung(each)), *self.changes()]

    def _end_hung(self, hung: Hung) -> list[Event]:
        run, news = hung.run, list[Event]()
        run.causes.append(hung.words)
        devices = run.launch.devices
        if len({self._agents.node_of(device) for device in devices}) == 1:
            news = self._lost(run, devices[0], hung.words)
        if hung.is_rendezvous and len(devices) > 1:
            run.causes.append(self._runtime.replace_store())
        for device in run.remaining():
            self._runtime.kill(device)
        return news
