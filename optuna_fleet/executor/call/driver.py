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
from optuna_fleet.executor.call import launches, outcomes, stop_lines
from optuna_fleet.executor.call.call_handler import CallHandler
from optuna_fleet.executor.call.checks import Checks
from optuna_fleet.executor.call.ranks import RunCalls
from optuna_fleet.executor.call.receiver import Receiver
from optuna_fleet.executor.call.runs import RunRecord, TrialRecord
from optuna_fleet.executor.call.sweep import Sweep
from optuna_fleet.executor.deciding.controller import Controller
from optuna_fleet.wire.calls import AfterEpoch
from optuna_fleet.wire.inbox import Inbox

_ABORT_GRACE_S = 10.0


class Driver:
    """Connects study, controller, solver and trainers for one call.

    Attributes:
        interrupts: To be entered while it runs.
        has_freed_devices: Whether no trainer is still at work for this call.
    """

    def __init__(self, sweep: Sweep, controller: Controller) -> None:
        self._sweep = sweep
        self._runtime = sweep.runtime
        self._runs = sweep.runs
        self._journal = sweep.journal
        self._controller = controller
        self._calls = CallHandler(sweep)
        self._checks = Checks(sweep)
        self._receiver = Receiver(sweep, self._calls, self._checks)
        self._plan: Future[Plan] | None = None
        self._is_over = False
        self.interrupts = Interrupts(sweep.runtime.inbox)
        self.has_freed_devices = False

    def run(self) -> None:
        """Run until every trial is done.

        Raises:
            BaseException: KeyboardInterrupt, or a failure of the fleet itself; at once.
        """
        sweep, runtime = self._sweep, self._runtime
        sweep.devices.begin(self._journal.now())
        for number in sweep.trials:  # they go on
            sweep.ledger.note_restart(number)
        try:
            events = [*self._receiver.changes(), *runtime.devices_at_first()]
            self._decide([*events, *self._look(), *self._checks.look()])
            self._note_progress()
            while not self._is_over:
                if (event := runtime.inbox.get()) is None:
                    self.interrupts.check()
                for message in runtime.heard(event) or (None,):
                    news = self._receiver.take(message)
                    if news or message is None:  # None: the fleet may have changed (a node left)
                        self._decide(news)
            self.has_freed_devices = True
            sweep.devices.end(self._journal.now())
            self._end_log("failed" if sweep.failure else "done")
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            self._calls.end()
            self._checks.end()

    def _look(self) -> list[Event]:
        """Look for what no message reports (hung runs, say): now, and every few seconds."""
        self.interrupts.check()
        self._sweep.later(self._sweep.watchdog.look_every_s, self._look)
        return self._receiver.look()

    def _decide(self, events: Sequence[Event]) -> None:
        """Tell the controller, and carry out its instructions; again with the events of these."""
        self.interrupts.check()
        while events:
            for event in events:
                self._journal.note(event)
            self._sweep.devices.write()
            news: list[Event] = []
            for instruction in self._controller.handle(*events):
                if isinstance(instruction, Launch):
                    self._runs[instruction.run_id] = self._new_run(instruction)
                self._journal.note(instruction)
                news += self._carry_out(instruction)
            events = news
        self._is_over = self._controller.finished
        self._runtime.agents.want(self._controller.most_usable)

    # -- what the controller says -----------------------------------------------------------------

    def _carry_out(self, instruction: Instruction) -> list[Event]:  # noqa: C901 - one arm each
        """Do it: to trainers, to the solver, to the study; return what is news."""
        sweep = self._sweep
        match instruction:
            case Propose():
                return outcomes.propose(sweep)
            case Launch():
                return launches.begin(sweep, self._runs[instruction.run_id])
            case BeginCheck():
                self._checks.begin(instruction)
            case Allocate():
                self._plan = plan = self._runtime.allocator.submit(instruction.problem)
                sweep.when_done(plan, lambda: self._planned(plan))
            case AnswerEpoch():
                self._answer_epoch(self._runs[instruction.run_id], instruction)
            case Interrupt():
                run = self._runs[instruction.run_id]
                stays = run.launch.devices[0] in instruction.devices
                stop_lines.ask(sweep, run, stays=stays)
            case Abort():  # ranks get time to end by themselves, unless their run is lost
                grace_s = 0.0 if instruction.lost else _ABORT_GRACE_S
                run = self._runs[instruction.run_id]
                sweep.later_of(grace_s, run, self._kill, instruction.devices)
            case FinishTrial():
                run = self._end(instruction.run_id)
                sweep.retention.left(instruction.number, sweep.run_name(instruction.run_id))
                outcomes.finish(sweep, instruction.number, *run.outcome())
                return outcomes.propose(sweep, again=True)
            case Requeue():
                run = self._end(instruction.run_id)
                if run.leaving is not None:
                    run.trial.moved_s = self._journal.now() - run.leaving
                outcomes.run_again(sweep, run)
            case GiveUp():
                outcomes.give_up(sweep, self._end(instruction.run_id), instruction.restarts)
                return outcomes.propose(sweep, again=True)
            case ReturnToQueue():
                sweep.proposals.return_to_queue(instruction.number)
            case StartRound():
                pass  # for the journal
            case _:
                assert_never(instruction)
        return []

    def _new_run(self, launch: Launch) -> RunRecord:
        trial = self._sweep.trials.setdefault(launch.number, TrialRecord())
        nodes = {self._runtime.agents.devices[device].node for device in launch.devices}
        run = RunRecord(
            launch=launch,
            start=self._journal.now(),
            calls=RunCalls(
                world_size=len(launch.devices),
                send=lambda rank, reply: self._runtime.send(run.launch.devices[rank], reply),
            ),
            has_one_clock=len(nodes) == 1,
            trial=trial,
            began_anew=self._checks.began_anew(launch, trial),
        )
        return run

    def _planned(self, plan: Future[Plan]) -> list[Event]:
        self._plan = None
        return [PlanDecided(plan=plan.result())]

    def _answer_epoch(self, run: RunRecord, answer: AnswerEpoch) -> None:
        decision = answer.decision
        if decision is EpochDecision.GO and stop_lines.takes_checkpoint(self._sweep, run):
            decision = EpochDecision.CHECKPOINT
        elif decision is EpochDecision.YIELD:
            self._receiver.leaves(run)
        stays = run.launch.devices[0] in answer.devices
        self._calls.answer_epoch(run, AfterEpoch(decision, stays=stays))

    def _kill(self, run: RunRecord, devices: Sequence[int]) -> None:
        for device in set(devices).intersection(run.remaining()):
            self._runtime.kill(device)

    def _end(self, run_id: int) -> RunRecord:
        """A run has ended on all its devices."""
        sweep, run = self._sweep, self._runs.pop(run_id)
        if run in sweep.waiting:
            sweep.waiting.remove(run)
        sweep.watchdog.ended(run)
        flight = run.flight(end=self._journal.now())
        sweep.tally.flights.append(flight)
        sweep.ledger.records.flight(run.launch.number, flight)
        return run

    # -- what is told of it -----------------------------------------------------------------------

    def _note_progress(self) -> None:
        """Tell the study how the call is getting on: now, and again and again."""
        sweep = self._sweep
        launches = [run.launch for run in self._runs.values()]
        flying = {launch.number for launch in launches}
        again_s = sweep.progress.note(flying, self._journal.now())
        sweep.later(again_s, self._note_progress)
        sweep.ledger.show_under_way(len(flying), sum(len(one.devices) for one in launches))

    def _end_log(self, ending: str) -> None:
        self._sweep.progress.note((), self._journal.now(), ending=ending)

    def _abandon(self, error: BaseException) -> None:
        """Fail the trials that were launched, give back those that never were, free the devices.

        A second Ctrl-C stops this where it is; `has_freed_devices` then stays false.
        """
        if isinstance(error, KeyboardInterrupt):
            self.interrupts.forget()
        elif not isinstance(error, FleetError):
            self._journal.attach_to(error)
        busy = {device for run in self._runs.values() for device in run.launch.devices}
        try:
            if self._plan is not None:
                self._runtime.allocator.close()
            outcomes.end_all(self._sweep, error)
            self._end_log("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        finally:
            is_fit = not isinstance(error, LaunchError)
            self.has_freed_devices = is_fit and self._runtime.reset(busy, self.interrupts.check)


class Interrupts:
    """While entered, no Ctrl-C gets lost.

    Python swallows exceptions raised in finalizers and weakref callbacks, which run whenever a
    database cursor is freed. Nor do we raise while the inbox is at work: a message already read
    would be lost.
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
