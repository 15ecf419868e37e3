"""The driver of one `optimize` call: waits for events, asks the controller, does what it says.

The only code that blocks. Everything that touches the study happens here, on the caller's thread.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from typing_extensions import assert_never

from optuna_fleet.events import (
    Abort,
    Allocate,
    AnswerEpoch,
    CheckpointSaved,
    DataRequested,
    DeviceJoined,
    DeviceLeftOut,
    DeviceLost,
    EpochDecision,
    Event,
    FinishTrial,
    GiveUp,
    Instruction,
    Interrupt,
    Launch,
    MoveMeasured,
    MoveRefused,
    PlanDecided,
    ProposalsExhausted,
    Propose,
    RankEnded,
    RateMeasured,
    Requeue,
    ReturnToQueue,
    RunFailed,
    StartRound,
    WidthLimited,
)
from optuna_fleet.exceptions import StorageLostError, TrainerLostError
from optuna_fleet.executor.abandoning import end_all
from optuna_fleet.executor.call_handler import CallHandler
from optuna_fleet.executor.calls import RunCalls
from optuna_fleet.executor.controller import Controller
from optuna_fleet.executor.deadlines import Deadlines
from optuna_fleet.executor.epoch_evaluator import EpochEvaluator
from optuna_fleet.executor.interrupts import Interrupts
from optuna_fleet.executor.launcher import Launcher
from optuna_fleet.executor.pipeline_log import PipelineLog
from optuna_fleet.executor.runs import Job, RunRecord, decision_of, model_of
from optuna_fleet.executor.runtime import Runtime
from optuna_fleet.executor.summary import Tally
from optuna_fleet.executor.watchdog import Broken, Hung, Watchdog
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.sampler_bridge.proposals import Proposals
from optuna_fleet.sampler_bridge.retention import CheckpointRetention
from optuna_fleet.wire.calls import RankCall
from optuna_fleet.wire.messages import (
    AgentLost,
    CheckpointFailed,
    Ended,
    FirstBatchRequested,
    Heartbeat,
    PipelineNotice,
    PipelineReport,
    Remark,
    Trained,
    TrainerExited,
    TrainerReady,
)

_ABORT_GRACE_S = 10.0


class Driver:
    """Connects study, controller, solver and trainers for one call.

    Attributes:
        failure: The first failure of a trial that `catch` did not cover.
        has_freed_devices: Whether no trainer is still at work for this call.
    """

    def __init__(
        self,
        runtime: Runtime,
        controller: Controller,
        ledger: Ledger,
        proposals: Proposals,
        job: Job,
        retention: CheckpointRetention,
    ) -> None:
        self.tally = Tally()
        self._runtime = runtime
        self._controller = controller
        self._ledger = ledger
        self._proposals = proposals
        self._job = job
        self._evaluator = EpochEvaluator(job.options, ledger, maximize=job.maximize)
        self._retention = retention
        self._calls = CallHandler(runtime.send, ledger, retention)
        self.pipeline_log = PipelineLog(ledger.record_span, runtime.last_report, time.time())
        self._events: list[Event] = []
        self._runs: dict[int, RunRecord] = {}
        self._watchdog = Watchdog(job.options.limits, runtime.process_state)
        self._deadlines = Deadlines()
        self._launcher = Launcher(runtime, job, retention, adopted=proposals.adopted())
        self._deciding = False
        self.interrupts = Interrupts()
        self.failure: BaseException | None = None
        self.has_freed_devices = False

    def run(self) -> None:
        """Run until every trial is done; then `failure` is the first that `catch` did not cover.

        Raises:
            BaseException: KeyboardInterrupt, or a failure of the fleet itself; at once.
        """
        self._events.extend(DeviceJoined(device=d) for d in self._runtime.trainers.live)
        for number in self._proposals.adopted():
            self._ledger.note_restart(number)
        try:
            self._work()
            while not self._controller.finished:
                self._wait()
                self._work()
            self.has_freed_devices = True
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            self._calls.end()

    # -- waiting ----------------------------------------------------------------------------------

    def _wait(self) -> None:
        self.interrupts.check()
        allocator = self._runtime.allocator
        others = (*((allocator,) if self._deciding else ()), *self._calls.sampling())
        for message in self._runtime.messages(self._patience_s(), *others):
            self._receive(message)
            self._work()
        if self._calls.go_on():
            self._propose(again=True)
        if self._deciding and allocator.is_answered():
            self._deciding = False
            self._post(PlanDecided(plan=allocator.result()))
        for device in self._deadlines.take_expired():
            self._runtime.kill(device)
        for fault in self._watchdog.check():
            self._stop_faulty(fault)
        self._events.extend(DeviceLeftOut(device=d) for d in self._runtime.faults.left_out)

    def _patience_s(self) -> float | None:
        deadlines = self._deadlines.soonest()
        if self._deciding and (deadline := self._runtime.allocator.deadline()) is not None:
            deadlines.append(deadline)
        waits = [deadline - time.monotonic() for deadline in deadlines]
        if (patience_s := self._watchdog.patience_s()) is not None:
            waits.append(patience_s)
        return max(0.0, min(waits)) if waits else None

    # -- messages ---------------------------------------------------------------------------------

    def _receive(self, message: Any) -> None:  # noqa: C901 - one arm per message
        match message:
            case TrainerReady() | TrainerExited():
                self._trainer_changed(message)
            case RankCall() | Remark() if message.run_id in self._runs:
                self._called(self._runs[message.run_id], message)
            case FirstBatchRequested() if message.run_id in self._runs:
                self._runtime.prepare_groups()
                self._post(DataRequested(run_id=message.run_id, model=model_of(message)))
                self._proposals.note_defined(self._runs[message.run_id].launch.number)
                self._propose(again=True)
            case RateMeasured() | WidthLimited() | CheckpointSaved():
                self._post(message)
            case MoveRefused() if message.run_id in self._runs:
                self.tally.moves.stays(self._runs[message.run_id].launch.number)
                self._post(message)
            case Trained() if message.run_id in self._runs:
                number = self._runs[message.run_id].launch.number
                if (seconds := self.tally.moves.trains(number)) is not None:
                    self._post(MoveMeasured(run_id=message.run_id, seconds=seconds))
            case AgentLost() | PipelineNotice():
                compat.fleet_logger.warning(message.text)
                if isinstance(message, AgentLost):
                    self.pipeline_log.restart()
                    for exited in message.exits:  # at once: nothing is placed where all is dead
                        self._trainer_changed(exited)
            case PipelineReport():
                self.pipeline_log.note(message, time.time())
            case Heartbeat():
                self._watchdog.hear(message)
            case CheckpointFailed() if message.run_id in self._runs:
                self._launcher.checkpoint_failed(self._runs[message.run_id].launch, message)
            case Ended() if message.run_id in self._runs:
                self._rank_ended(self._runs[message.run_id], message)
            case _:
                self._launcher.send_waiting()

    def _trainer_changed(self, message: TrainerReady | TrainerExited) -> None:
        device, trainers = message.device, self._runtime.trainers
        if isinstance(message, TrainerExited) and message.pid == trainers.pid_on(device):
            self._launcher.trainer_died(device)
            self._deadlines.drop(device)
            for run in self._runs.values():
                if device in run.remaining():
                    error = run.lose_rank(message, is_killed=trainers.is_killed(device))
                    if error is not None:
                        self._fail_run(run, error)
        for event in self._runtime.device_events(message):
            self._post(event)

    def _stop_faulty(self, fault: Hung | Broken) -> None:
        run = self._runs[fault.run_id]
        if isinstance(fault, Broken):
            self._fail_run(run, fault.error)
            return
        run.causes.append(str(fault))
        if fault.is_rendezvous and len(run.launch.devices) > 1:
            run.causes.append(self._runtime.replace_store())
        for device in run.remaining():
            self._runtime.kill(device)

    def _fail_run(self, run: RunRecord, error: BaseException) -> None:
        """End a run at once, and its trial with this error."""
        run.verdict = error
        self._post(RunFailed(run_id=run.launch.run_id))

    def _rank_ended(self, run: RunRecord, message: Ended) -> None:
        run.end_rank(message)
        self._watchdog.rank_ended(message)
        self._calls.leave(run, message.rank)
        self._deadlines.drop(message.device)
        self.tally.add_stay(message.device, run.age_s, message.usage, probe=run.launch.probe)
        self._post(
            RankEnded(
                run_id=message.run_id,
                device=message.device,
                ending=message.ending,
                is_leaving=message.is_last or self._runtime.trainers.is_killed(message.device),
            )
        )
        if message.is_last:  # before anything else is launched there
            self._launcher.trainer_died(message.device)
            self._post(DeviceLost(device=message.device))
        self._events.extend(self._runtime.rank_ended(message))

    def _called(self, run: RunRecord, call: RankCall | Remark) -> None:
        ended = self._calls.take(run, call)
        if ended is not None:
            self._post(self._evaluator.epoch_ended(call.run_id, run.launch.number, ended + 1))
        self._propose(again=True)

    # -- instructions -----------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        self._events.append(event)

    def _work(self) -> None:
        while self._events:
            events, self._events = self._events, []
            for instruction in self._controller.handle(*events):
                self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:  # noqa: C901 - one arm per instruction
        match instruction:
            case Propose():
                self._propose()
            case Launch():
                self._launch(instruction)
            case Allocate():
                self._deciding = True
                self._runtime.allocator.submit(instruction.problem)
            case AnswerEpoch():
                self._answer_epoch(self._runs[instruction.run_id], instruction.decision)
            case Interrupt():
                raise AssertionError("trainers yield at the end of an epoch only")
            case Abort(devices=devices, lost=lost):
                self._deadlines.give(devices, 0.0 if lost else _ABORT_GRACE_S)
            case FinishTrial():
                run = self._finish_run(instruction.run_id, is_done=True)
                self._tell(instruction.number, *run.outcome())
            case Requeue():
                self._requeue(instruction)
            case GiveUp():
                self._give_up(instruction)
            case ReturnToQueue():
                self._proposals.return_to_queue(instruction.number)
                self.tally.trials["given back"] += 1
            case StartRound():
                self._start_round(instruction)
            case _:
                assert_never(instruction)

    def _answer_epoch(self, run: RunRecord, decision: EpochDecision) -> None:
        interval_s = self._job.options.checkpoints.interval_s
        if decision is EpochDecision.GO and run.unsaved_s >= interval_s:
            decision, run.saved = EpochDecision.CHECKPOINT, time.monotonic()
        elif decision is EpochDecision.YIELD:
            self.tally.moves.leaves(run.launch.number)
        if decision in (EpochDecision.CHECKPOINT, EpochDecision.YIELD):
            self._proposals.keep_record()
        self._calls.answer_epoch(run, decision)

    def _propose(self, *, again: bool = False) -> None:
        try:
            self._events.extend(self._proposals.next_events(again=again))
        except Exception as error:
            self._fail(error)
            self._post(ProposalsExhausted())

    def _launch(self, launch: Launch) -> None:
        self._runs[launch.run_id] = RunRecord(
            launch=launch, start=time.time(), calls=RunCalls(world_size=len(launch.devices))
        )
        self._watchdog.launched(launch)
        self.tally.moves.launched(launch.number)
        trial_id = compat.id_of(self._proposals[launch.number])
        known = self._ledger.suggested(launch.number)
        self._launcher.launch(launch, trial_id=trial_id, parameters=known)

    def _start_round(self, instruction: StartRound) -> None:
        decision = decision_of(instruction)
        self.tally.decisions.append(decision)
        self._ledger.record_decision(decision)
        level = logging.INFO if instruction.moves or instruction.round == 1 else logging.DEBUG
        compat.fleet_logger.log(level, f"Round {decision.round}: {decision.reason}")

    # -- endings ----------------------------------------------------------------------------------

    def _requeue(self, instruction: Requeue) -> None:
        run = self._finish_run(instruction.run_id, is_done=False)
        # Also where nothing was lost: its checkpoint may turn out to be damaged.
        self._ledger.note_restart(instruction.number)
        if run.cause:
            compat.fleet_logger.warning(
                f"Trial {instruction.number}: {run.cause}. It is run again from its last "
                "checkpoint."
            )
        else:
            self.tally.rescales += 1

    def _give_up(self, instruction: GiveUp) -> None:
        run = self._finish_run(instruction.run_id, is_done=True)
        error = TrainerLostError(
            f"Trial {instruction.number} lost its devices {instruction.restarts} times, the last "
            f"time because {run.cause}."
        )
        self._tell(instruction.number, None, error)

    def _finish_run(self, run_id: int, *, is_done: bool) -> RunRecord:
        run = self._runs.pop(run_id)
        self._watchdog.ended(run_id, is_done=is_done)
        self.tally.moves.left(run.launch.number)
        self._ledger.record(run.launch.number, run.flight(end=time.time()))
        return run

    def _tell(self, number: int, value: Any, error: BaseException | None) -> None:
        try:
            state = self._ledger.settle(number, value, error)
            self.tally.trials[state.name.lower()] += 1
        except BaseException as raised:
            if raised is not error and not isinstance(raised, Exception):
                raise  # Ctrl-C, and not the objective's own
            self.tally.trials["fail"] += 1
            self._fail(raised)
        self._propose(again=True)
        self._retention.settled(number)

    def _fail(self, error: BaseException) -> None:
        """Start nothing more; the first failure is raised once the trials that fly are done."""
        if isinstance(error, StorageLostError):  # nothing they do can be told any more
            raise error
        self.failure = self.failure or error
        self._proposals.stop()

    def _abandon(self, error: BaseException) -> None:
        """End what flies: fail those trials, give back those that never flew, free the devices.

        A second Ctrl-C ends this at whatever it is, and `has_freed_devices` stays false.
        """
        busy = {device for run in self._runs.values() for device in run.launch.devices}
        try:
            if self._deciding:
                self._runtime.allocator.close()
            launched, runs = self._launcher.launched, self._runs.values()
            end_all(self._ledger, self._proposals, launched, runs, error)
        finally:
            self.has_freed_devices = self._runtime.reset(busy)
