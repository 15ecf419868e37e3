"""The driver of one `optimize` call: waits for events, asks the controller, does what it says.

The only code that blocks. Everything that touches the study happens here, on the caller's thread.
"""

from __future__ import annotations

import logging
import select
import time
from collections import deque
from typing import Any

from typing_extensions import assert_never

from optuna_fleet.events import (
    Allocate,
    AnswerEpoch,
    CutOff,
    DataRequested,
    DeviceJoined,
    Ending,
    EpochDecision,
    Event,
    GiveBack,
    GiveUp,
    Instruction,
    Interrupt,
    Launch,
    PlanDecided,
    ProposalsExhausted,
    Propose,
    RankEnded,
    RateMeasured,
    Requeue,
    Settle,
    StartRound,
    TrialProposed,
)
from optuna_fleet.exceptions import TrainerLostError
from optuna_fleet.executor.calls import RunCalls
from optuna_fleet.executor.controller import Controller
from optuna_fleet.executor.judging import Judge
from optuna_fleet.executor.launcher import Launcher
from optuna_fleet.executor.pipeline_log import PipelineLog
from optuna_fleet.executor.runs import Job, RunRecord, decision_of, model_of
from optuna_fleet.executor.runtime import Runtime
from optuna_fleet.executor.summary import Tally
from optuna_fleet.messages import (
    Call,
    Checkpointed,
    Ended,
    Measured,
    PipelineNotice,
    PipelineReport,
    Reached,
    Reply,
    TrainerExited,
    TrainerReady,
)
from optuna_fleet.packing import pack, pack_error, unpack
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.sampler_bridge.proposals import Proposals

_CUT_OFF_GRACE_S = 10.0


class Driver:
    """Connects study, controller, solver and trainers for one call."""

    def __init__(
        self,
        runtime: Runtime,
        controller: Controller,
        ledger: Ledger,
        proposals: Proposals,
        job: Job,
    ) -> None:
        self.tally = Tally()
        self._runtime = runtime
        self._controller = controller
        self._ledger = ledger
        self._proposals = proposals
        self._job = job
        self._judge = Judge(job, ledger)
        self.pipeline_log = PipelineLog(ledger.record_span, runtime.last_report, time.time())
        self._events: deque[Event] = deque()
        self._runs: dict[int, RunRecord] = {}
        self._where: dict[int, int] = {}
        self._deadlines: dict[int, float] = {}
        self._launcher = Launcher(runtime, job)
        self._deciding = False
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Run until every trial is done; then `failure` is the first that `catch` did not cover.

        Raises:
            BaseException: KeyboardInterrupt, or a failure of the fleet itself; at once.
        """
        for device in self._runtime.live:
            self._post(DeviceJoined(device=device))
        try:
            self._work()
            while not self._controller.finished:
                self._wait()
                self._work()
        except BaseException as error:
            self._abandon(error)
            raise

    # -- waiting ----------------------------------------------------------------------------------

    def _wait(self) -> None:
        allocator = self._runtime.allocator
        others = (allocator,) if self._deciding else ()
        for message in self._runtime.messages(self._patience_s(), *others):
            self._receive(message)
            self._work()
        if self._deciding and self._is_answered():
            self._deciding = False
            self._post(PlanDecided(plan=allocator.result()))
        for device, deadline in list(self._deadlines.items()):
            if time.monotonic() >= deadline:
                del self._deadlines[device]
                self._runtime.kill(device)

    def _is_answered(self) -> bool:
        allocator = self._runtime.allocator
        deadline = allocator.deadline()
        poll = select.poll()
        poll.register(allocator, select.POLLIN)
        return bool(poll.poll(0)) or (deadline is not None and time.monotonic() >= deadline)

    def _patience_s(self) -> float | None:
        deadlines = [*self._deadlines.values()]
        if self._deciding and (deadline := self._runtime.allocator.deadline()) is not None:
            deadlines.append(deadline)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    # -- messages ---------------------------------------------------------------------------------

    def _receive(self, message: Any) -> None:
        match message:
            case TrainerReady() | TrainerExited():
                self._trainer_changed(message)
            case Call() if message.run_id in self._runs:
                self._called(self._runs[message.run_id], message)
            case Reached():
                self._runtime.open_store()
                self._post(DataRequested(run_id=message.run_id, model=model_of(message)))
            case Measured():
                self._post(
                    RateMeasured(run_id=message.run_id, samples_per_s=message.samples_per_s)
                )
            case PipelineNotice():
                compat.fleet_logger.warning(message.text)
            case PipelineReport():
                self.pipeline_log.note(message, time.time())
            case Checkpointed() if message.run_id in self._runs:
                run = self._runs[message.run_id]
                run.saved = time.time()
                self._launcher.checkpointed.add(run.launch.number)
            case Ended() if message.run_id in self._runs:
                self._rank_ended(self._runs[message.run_id], message)
            case _:
                self._launcher.send_waiting()

    def _trainer_changed(self, message: TrainerReady | TrainerExited) -> None:
        if isinstance(message, TrainerExited):
            self._launcher.trainer_died(message.device)
            self._deadlines.pop(message.device, None)
            run = self._runs.get(self._where.get(message.device, -1))
            if run is not None and not run.has_ended(message.device):
                run.causes.append(f"the trainer of device {message.device} died: {message.cause}")
        for event in self._runtime.device_events(message):
            self._post(event)

    def _rank_ended(self, run: RunRecord, message: Ended) -> None:
        run.ended.append(message)
        if message.rank == 0:
            self._reply(run, run.calls.close())
        if message.ending is Ending.CUT_OFF and message.error is not None:
            run.causes.append(f"device {message.device} was cut off: {message.error.description}")
        self._deadlines.pop(message.device, None)
        seconds = time.time() - run.start
        self.tally.add_stay(message.device, seconds, message.usage, probe=run.launch.probe)
        self._post(RankEnded(run_id=message.run_id, device=message.device, ending=message.ending))

    def _called(self, run: RunRecord, call: Call) -> None:
        if call.rank > 0:
            self._reply(run, run.calls.follow(call))
        elif (call.target, call.name) == ("fleet", "end_epoch"):
            self._epoch_ended(run, call)
        else:
            self._answer(run, call, self._carried_out(run, call))

    def _carried_out(self, run: RunRecord, call: Call) -> Reply:
        number = run.launch.number
        try:
            if (call.target, call.name) == ("fleet", "warn"):
                (text,), _ = unpack(call.arguments)
                compat.fleet_logger.warning(f"Trial {number}: {text}")
                value = None
            else:
                value = self._ledger.carry_out(number, call)
            return Reply(run_id=call.run_id, index=call.index, value=pack(value))
        except Exception as error:
            return Reply(run_id=call.run_id, index=call.index, error=pack_error(error))

    def _epoch_ended(self, run: RunRecord, call: Call) -> None:
        run.pending_epoch = call
        (epoch,), _ = unpack(call.arguments)
        self._post(self._judge.epoch_ended(call.run_id, run.launch.number, epoch + 1))

    def _answer(self, run: RunRecord, call: Call, reply: Reply) -> None:
        self._reply(run, run.calls.answer(reply, call.name))

    def _reply(self, run: RunRecord, replies: list[tuple[int, Reply]]) -> None:
        for rank, reply in replies:
            self._runtime.send(run.launch.devices[rank], reply)

    # -- instructions -----------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        self._events.append(event)

    def _work(self) -> None:
        while self._events:
            for instruction in self._controller.handle(self._events.popleft()):
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
                run = self._runs[instruction.run_id]
                self._answer_epoch(run, instruction.decision)
            case Interrupt():
                raise AssertionError("trainers yield at the end of an epoch only")
            case CutOff():
                grace_s = 0.0 if instruction.lost else _CUT_OFF_GRACE_S
                deadline = time.monotonic() + grace_s
                self._deadlines.update(dict.fromkeys(instruction.devices, deadline))
            case Settle():
                self._settle(instruction)
            case Requeue():
                self._requeue(instruction)
            case GiveUp():
                self._give_up(instruction)
            case GiveBack():
                self._proposals.give_back(instruction.number)
                self.tally.trials["given back"] += 1
            case StartRound():
                self._start_round(instruction)
            case _:
                assert_never(instruction)

    def _answer_epoch(self, run: RunRecord, decision: EpochDecision) -> None:
        call, run.pending_epoch = run.pending_epoch, None
        assert call is not None
        is_due = time.time() - run.saved >= self._job.checkpoint_interval_s
        if decision is EpochDecision.GO and is_due:
            decision = EpochDecision.CHECKPOINT
        self._answer(run, call, Reply(run_id=call.run_id, index=call.index, value=pack(decision)))

    def _propose(self) -> None:
        number = None
        try:
            number = self._proposals.ask()
        except Exception as error:
            self._fail(error)
        self._post(ProposalsExhausted() if number is None else TrialProposed(number=number))

    def _launch(self, launch: Launch) -> None:
        now = time.time()
        self._runs[launch.run_id] = RunRecord(
            launch=launch,
            start=now,
            saved=now,
            calls=RunCalls(world_size=len(launch.devices)),
        )
        self._where.update(dict.fromkeys(launch.devices, launch.run_id))
        self._launcher.launch(launch, trial_id=compat.id_of(self._proposals[launch.number]))

    def _start_round(self, instruction: StartRound) -> None:
        decision = decision_of(instruction)
        self.tally.decisions.append(decision)
        self._ledger.record_decision(decision)
        level = logging.INFO if instruction.moves or instruction.round == 1 else logging.DEBUG
        compat.fleet_logger.log(level, f"Round {decision.round}: {decision.reason}")

    # -- endings ----------------------------------------------------------------------------------

    def _settle(self, instruction: Settle) -> None:
        run = self._finish_run(instruction.run_id)
        self._runtime.drop_checkpoint(self._job.study_name, instruction.number)
        self._tell(instruction.number, *run.outcome())

    def _requeue(self, instruction: Requeue) -> None:
        run = self._finish_run(instruction.run_id)
        if run.causes:
            self._ledger.note_restart(instruction.number)
            compat.fleet_logger.warning(
                f"Trial {instruction.number}: {run.cause}. It is run again from its last "
                "checkpoint."
            )
        else:
            self.tally.rescales += 1

    def _give_up(self, instruction: GiveUp) -> None:
        run = self._finish_run(instruction.run_id)
        self._runtime.drop_checkpoint(self._job.study_name, instruction.number)
        error = TrainerLostError(
            f"Trial {instruction.number} lost its devices {instruction.restarts} times, the last "
            f"time because {run.cause}."
        )
        self._tell(instruction.number, None, error)

    def _finish_run(self, run_id: int) -> RunRecord:
        run = self._runs.pop(run_id)
        self._ledger.record(run.launch.number, run.flight(end=time.time()))
        return run

    def _tell(self, number: int, value: Any, error: BaseException | None) -> None:
        try:
            state = self._ledger.settle(number, value, error)
            self.tally.trials[state.name.lower()] += 1
        except Exception as raised:
            self.tally.trials["fail"] += 1
            self._fail(raised)

    def _fail(self, error: BaseException) -> None:
        """Start nothing more; the first failure is raised once the trials that fly are done."""
        self.failure = self.failure or error
        self._proposals.stop()

    def _abandon(self, error: BaseException) -> None:
        """End what flies: fail those trials, give back those that never flew, free the devices."""
        if self._deciding:
            self._runtime.allocator.close()
        busy = {device for run in self._runs.values() for device in run.launch.devices}
        try:
            for number in self._proposals.unfinished():
                if number in self._launcher.launched:
                    self._ledger.abandon(number, error)
                else:
                    self._proposals.give_back(number)
        finally:
            self._runtime.reset(busy)
