"""The driver of one `optimize` call: waits for what happens, asks the controller, has it done.

The only code that blocks. Everything that touches the study happens here, on the caller's thread.
What messages mean is in `receiver`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import FrameType

from typing_extensions import assert_never

from optuna_fleet.alloc import Plan
from optuna_fleet.events import (
    Abort,
    Allocate,
    AnswerEpoch,
    BeginCheck,
    EpochDecision,
    Event,
    FinishTrial,
    GiveUp,
    Instruction,
    Interrupt,
    Launch,
    PlanDecided,
    Propose,
    Requeue,
    ReturnToQueue,
    StartRound,
)
from optuna_fleet.exceptions import FleetError, LaunchError
from optuna_fleet.executor.call.parts import Parts
from optuna_fleet.executor.call.receiver import Receiver
from optuna_fleet.executor.call.runs import RunRecord, TrialRecord
from optuna_fleet.executor.call.summary import counted
from optuna_fleet.executor.deciding.controller import Controller
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.wire.calls import AfterEpoch
from optuna_fleet.wire.inbox import Inbox

SILENT_S = 5.0
"""A call that takes longer without a result says what is under way."""

_ABORT_GRACE_S = 10.0


class Driver:
    """Connects study, controller, solver and trainers for one call.

    Attributes:
        interrupts: To be entered while it runs.
        has_freed_devices: Whether no trainer is still at work for this call.
    """

    def __init__(self, parts: Parts, controller: Controller) -> None:
        self._parts = parts
        self._runtime = parts.runtime
        self._runs = parts.runs
        self._journal = parts.journal
        self._controller = controller
        self._receiver = Receiver(parts)
        self._plan: Future[Plan] | None = None
        self._has_spoken = self._is_over = False
        self.interrupts = Interrupts(parts.runtime.inbox)
        self.has_freed_devices = False

    def run(self) -> None:
        """Run until every trial is done.

        Raises:
            BaseException: KeyboardInterrupt, or a failure of the fleet itself; at once.
        """
        parts, runtime = self._parts, self._runtime
        parts.devices.begin(self._journal.now())
        for number in parts.proposals.adopted():
            parts.ledger.note_restart(number)
            parts.trials[number] = TrialRecord(was_launched=True)
        try:
            events = [*self._receiver.changes(), *runtime.devices_at_first()]
            self._decide([*events, *self._look(), *parts.checks.look()])
            self._note_progress()
            while not self._is_over:
                if (event := runtime.inbox.get()) is None:
                    self.interrupts.check()
                messages = runtime.heard(event)
                for message in messages:
                    if news := self._receiver.take(message):
                        self._decide(news)
                if not messages:  # it was of concern to the fleet alone
                    self._decide(self._receiver.changes())
            self.has_freed_devices = True
            parts.devices.end(self._journal.now())
            self._end_log("failed" if parts.outcomes.failure else "done")
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            parts.calls.end()
            parts.checks.end()

    def _look(self) -> list[Event]:
        """What nobody tells, now and every few seconds."""
        self.interrupts.check()
        self._parts.later(self._parts.watchdog.look_every_s, self._look)
        return self._receiver.look()

    def _decide(self, events: Sequence[Event]) -> None:
        """Tell the controller, and do what it says; what is news by that, too."""
        self.interrupts.check()
        while events:
            for event in events:
                self._journal.note(event)
            self._parts.devices.write()
            news: list[Event] = []
            for instruction in self._controller.handle(*events):
                if isinstance(instruction, Launch):
                    self._parts.new_run(instruction)
                self._journal.note(instruction)
                news += self._carry_out(instruction)
            events = news
        self._is_over = self._controller.finished
        self._runtime.agents.want(self._controller.most_usable)

    # -- what the controller says -----------------------------------------------------------------

    def _carry_out(self, instruction: Instruction) -> list[Event]:  # noqa: C901 - one arm each
        """Do it: to trainers, to the solver, to the study; return what is news."""
        parts, outcomes = self._parts, self._parts.outcomes
        match instruction:
            case Propose():
                return outcomes.propose()
            case Launch():
                parts.later(parts.progress.left_s, self._note_progress)
                start = parts.held.begin(instruction)
                return [] if start is None else parts.start(start)
            case BeginCheck():
                parts.checks.begin(instruction)
            case Allocate():
                self._ask_for_plan(instruction)
            case AnswerEpoch():
                self._answer_epoch(self._runs[instruction.run_id], instruction)
            case Interrupt():
                run = self._runs[instruction.run_id]
                parts.stop_lines.interrupt(run, instruction.devices)
            case Abort():  # they have time to end by themselves, if there is anything to tell then
                run, grace_s = self._runs[instruction.run_id], _ABORT_GRACE_S
                grace_s = 0.0 if instruction.lost else grace_s
                parts.later_of(grace_s, run, self._kill, instruction.devices)
            case FinishTrial():
                run = self._end(instruction)
                run_name = parts.launcher.run_name(instruction.run_id)
                parts.retention.left(instruction.number, run_name)
                outcomes.finish(run)
                del parts.trials[instruction.number]
                return outcomes.propose(again=True)
            case Requeue():
                run = self._end(instruction)
                if run.leaving is not None:
                    run.trial.moved_s = self._journal.now() - run.leaving
                outcomes.run_again(run)
            case GiveUp():
                outcomes.give_up(self._end(instruction), instruction.restarts)
                del parts.trials[instruction.number]
                return outcomes.propose(again=True)
            case ReturnToQueue():
                parts.proposals.return_to_queue(instruction.number)
            case StartRound():
                pass  # for the journal
            case _:
                assert_never(instruction)
        return []

    def _ask_for_plan(self, instruction: Allocate) -> None:
        self._plan = plan = self._runtime.allocator.submit(instruction.problem)
        self._parts.when_done(plan, lambda: self._planned(plan))

    def _planned(self, plan: Future[Plan]) -> list[Event]:
        self._plan = None
        return [PlanDecided(plan=plan.result())]

    def _answer_epoch(self, run: RunRecord, answer: AnswerEpoch) -> None:
        parts, decision = self._parts, answer.decision
        if decision is EpochDecision.GO and parts.stop_lines.takes_checkpoint(run):
            decision = EpochDecision.CHECKPOINT
        elif decision is EpochDecision.YIELD:
            run.leaving = run.leaving or self._journal.now()
            parts.held.leaves(run.launch.run_id)
        stays = run.launch.devices[0] in answer.devices
        parts.calls.answer_epoch(run, AfterEpoch(decision, stays=stays))

    def _kill(self, run: RunRecord, devices: Sequence[int]) -> None:
        for device in set(devices).intersection(run.remaining()):
            self._runtime.kill(device)

    def _end(self, order: FinishTrial | Requeue | GiveUp) -> RunRecord:
        """A run has ended on all its devices."""
        parts, run = self._parts, self._runs.pop(order.run_id)
        if not isinstance(order, Requeue):
            parts.held.forget(order.number)
        parts.watchdog.ended(run)
        flight = run.flight(end=self._journal.now())
        parts.tally.landed(flight)
        parts.ledger.records.flight(order.number, flight)
        return run

    # -- what is told of it -----------------------------------------------------------------------

    def _note_progress(self) -> None:
        """Tell the study how the call is getting on, if it is time to, and again then."""
        parts, progress = self._parts, self._parts.progress
        if progress.left_s > 0.0:
            return  # there was a launch, for which this was done before
        launches = [run.launch for run in self._runs.values()]
        flying = {launch.number for launch in launches}
        num_devices = sum(len(launch.devices) for launch in launches)
        progress.note(flying, parts.proposals.unfinished(), parts.proposals.num_asked)
        parts.later(progress.left_s, self._note_progress)
        parts.ledger.show_under_way(len(flying), num_devices)
        if flying and not self._has_spoken and self._journal.now() - parts.began >= SILENT_S:
            self._has_spoken = True
            if not parts.ledger.ended:
                on = f"{counted(len(flying), 'trial')} on {counted(num_devices, 'device')}"
                fleet_logger.info(f"Under way: {on}. None has ended yet.")

    def _end_log(self, ending: str) -> None:
        self._parts.progress.end(ending, self._parts.proposals.num_asked)

    def _abandon(self, error: BaseException) -> None:
        """End what flies: fail those trials, give back those that never flew, free the devices.

        A second Ctrl-C ends this at whatever it is, and `has_freed_devices` stays false.
        """
        if isinstance(error, KeyboardInterrupt):
            self.interrupts.forget()
        elif not isinstance(error, FleetError):
            self._journal.attach_to(error)
        runs, trials = self._runs, self._parts.trials
        launched = {number for number, trial in trials.items() if trial.was_launched}
        busy = {device for run in runs.values() for device in run.launch.devices}
        try:
            if self._plan is not None:
                self._runtime.allocator.close()
            self._parts.outcomes.end_all(launched, runs.values(), error)
            self._end_log("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        finally:
            is_fit = not isinstance(error, LaunchError)
            self.has_freed_devices = is_fit and self._runtime.reset(busy, self.interrupts.check)


class Interrupts:
    """While entered, a Ctrl-C that was dropped is remembered.

    Python drops what is raised while a finalizer or the callback of a weak reference runs, as they
    do each time that a database's cursor is let go of. And nothing is raised where a message could
    be lost by it that was read already.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._came = False

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        self._is_ours = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_ours:
            signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        self._inbox.put(None)  # whoever takes comes back to `check`
        if not self._inbox.is_at_work:
            raise KeyboardInterrupt

    def forget(self) -> None:
        """The one that came was told: only another one is news."""
        self._came = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if one came, which can only have been dropped."""
        if self._came:
            raise KeyboardInterrupt
