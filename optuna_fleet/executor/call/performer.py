"""Does what the controller says: to trainers, to the solver, to the study."""

from __future__ import annotations

from concurrent.futures import Future

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
    Propose,
    Requeue,
    ReturnToQueue,
    StartRound,
)
from optuna_fleet.executor.call.parts import Parts
from optuna_fleet.executor.call.run_calls import RunCalls
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.executor.call.waits import PlanReady
from optuna_fleet.wire.calls import AfterEpoch

_ABORT_GRACE_S = 10.0


class Performer:
    """Carries out instructions, in order; returns what is news to the controller.

    Attributes:
        plan: The one that is being made.
    """

    def __init__(self, parts: Parts) -> None:
        self.plan: Future[Plan] | None = None
        self._parts = parts
        self._runs = parts.runs

    def carry_out(self, instruction: Instruction) -> list[Event]:  # noqa: C901 - one arm each
        """Carry out an instruction."""
        parts, outcomes = self._parts, self._parts.outcomes
        match instruction:
            case Propose():
                return outcomes.propose()
            case Launch():
                return self._launch(instruction)
            case BeginCheck():
                parts.checks.begin(instruction)
            case Allocate():
                self.plan = parts.runtime.allocator.submit(instruction.problem)
                self.plan.add_done_callback(lambda _: parts.runtime.inbox.put(PlanReady()))
            case AnswerEpoch():
                self._answer_epoch(self._runs[instruction.run_id], instruction)
            case Interrupt():
                run = self._runs[instruction.run_id]
                parts.stop_lines.interrupt(run, instruction.devices)
            case Abort():
                self._abort(instruction)
            case FinishTrial():
                run = self._end(instruction.run_id, is_done=True)
                parts.launcher.trial_ended(instruction)
                parts.held.forget(instruction.number)
                outcomes.finish(run)
                return outcomes.propose(again=True)
            case Requeue():
                outcomes.run_again(self._end(instruction.run_id, is_done=False))
            case GiveUp():
                parts.held.forget(instruction.number)
                outcomes.give_up(self._end(instruction.run_id, is_done=True), instruction.restarts)
                return outcomes.propose(again=True)
            case ReturnToQueue():
                outcomes.give_back(instruction.number)
            case StartRound():
                pass  # for the journal
            case _:
                assert_never(instruction)
        return []

    def _abort(self, order: Abort) -> None:
        """Give ranks time to end by themselves, if they have anything to tell then."""
        self._parts.deadlines.give(order.devices, 0.0 if order.lost else _ABORT_GRACE_S)

    def _launch(self, launch: Launch) -> list[Event]:
        parts = self._parts
        nodes = {parts.runtime.agents.devices[device].node for device in launch.devices}
        self._runs[launch.run_id] = RunRecord(
            launch=launch,
            start=parts.journal.now(),
            calls=RunCalls(world_size=len(launch.devices)),
            has_one_clock=len(nodes) == 1,
            began_anew=parts.checks.began_anew(launch),
        )
        what = parts.held.begin(launch)
        return [] if what is None else parts.start(what)

    def _answer_epoch(self, run: RunRecord, answer: AnswerEpoch) -> None:
        parts, decision = self._parts, answer.decision
        if decision is EpochDecision.GO and parts.saves.take_due(run):
            decision = EpochDecision.CHECKPOINT
        elif decision is EpochDecision.YIELD:
            parts.held.leaves(run.launch.run_id)
        stays = run.launch.devices[0] in answer.devices
        parts.calls.answer_epoch(run, AfterEpoch(decision, stays=stays))

    def _end(self, run_id: int, *, is_done: bool) -> RunRecord:
        """A run has ended on all its devices."""
        run = self._runs.pop(run_id)
        self._parts.watchdog.ended(run_id, is_done=is_done)
        flight = run.flight(end=self._parts.journal.now())
        self._parts.ledger.records.flight(run.launch.number, flight)
        return run
