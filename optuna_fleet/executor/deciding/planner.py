"""When a plan is made, of what, and how it is carried out. Pure, and a part of the controller.

A plan may come while an earlier one is still being carried out. What an earlier one has promised
(the placements that wait for their devices), and who leaves for it, is no part of the problem;
all else is. So each promise waits only for runs that leave by themselves, and none for another
promise.
"""

from __future__ import annotations

from collections.abc import Iterable

from optuna_fleet.alloc.problem import Assignment, Plan
from optuna_fleet.events import (
    Allocate,
    AnswerEpoch,
    EpochDecision,
    Instruction,
    Interrupt,
    StartRound,
)
from optuna_fleet.executor.deciding.clearance import Clearance
from optuna_fleet.executor.deciding.problems import Problems
from optuna_fleet.executor.deciding.state import PolicyRules, Run, Stage, State, Trial


class Rounds:
    """When a round of plans is over: the global paradigm then decides anew, as all do at first.

    Until then what its trials leave stays free (FLEET 4.2).

    Attributes:
        number: Of the present round; 0 before the first plan.
        awaited: Runs that are measured, since the round has ended; None until that is asked.
    """

    def __init__(self, policy: PolicyRules) -> None:
        self.number = 0
        self._policy = policy
        self._widths: dict[int, int] = {}
        self.awaited: set[int] | None = None

    def begin(self, runs: Iterable[Run], plan: Plan) -> None:
        """A plan is about to be carried out."""
        self.number += 1
        self._widths = {run.number: len(run.devices) for run in runs}
        self._widths.update({n: len(a.devices) for n, a in plan.assignments.items()})

    def is_over(self, trials: dict[int, Trial]) -> bool:
        """Whether fewer than `alpha` of its devices are active; the local paradigm has but one."""
        if self.number == 0:
            return True
        if self._policy.paradigm == "local":
            return False
        active = sum(m for n, m in self._widths.items() if n in trials)
        return not active or active < self._policy.alpha * sum(self._widths.values())

    def end(self) -> None:
        """It is over, whoever is active."""
        self._widths = {}

    def has(self, trial: Trial) -> bool:
        """Whether a trial is one of the present round."""
        return trial.number in self._widths

    def awaits(self, unsettled: set[int]) -> bool:
        """Whether the next round should know the rates of runs that are measured now.

        Only those under way when the round ended: where trials are short, there is always some.
        """
        self.awaited = unsettled if self.awaited is None else self.awaited & unsettled
        return bool(self.awaited)


class Planner:
    """Asks for plans and carries them out.

    Attributes:
        rounds: Of its plans.
    """

    def __init__(self, state: State, problems: Problems, clearance: Clearance) -> None:
        self._state = state
        self._policy = state.policy
        self._problems = problems
        self._clearance = clearance
        self.rounds = Rounds(state.policy)

    @property
    def _is_first(self) -> bool:
        return self.rounds.number == 0

    @property
    def takes_new(self) -> bool:
        """Whether devices that are free may be given to what is not of the present round."""
        return self._policy.paradigm != "global" or self.rounds.is_over(self._state.trials)

    def may_start(self, trial: Trial) -> bool:
        """Whether a trial may get free devices: also one of the round, if a fault took its own."""
        return self.takes_new or self.rounds.has(trial)

    def rests_after_epoch(self, run: Run) -> bool:
        """Whether a run rests, at the end of an epoch, until there is a plan, which may move it.

        Not if it can be moved within the next epoch as well: then it trains meanwhile.
        """
        trial = self._state.trials[run.number]
        if self._policy.paradigm != "elastic" or not self._problems.may_leave(trial):
            return False
        self._state.has_news = run.is_between_epochs = True
        if self._problems.moves_within_epoch(trial):
            return False
        run.become(Stage.AT_REST)
        return True

    def has_planned_for(self, run: Run) -> bool:
        """Whether the last plan knew that this run would leave its devices."""
        problem = self._state.problem
        if problem is not None and run.number in problem.by_number:
            return run.is_moving and set(run.devices).issubset(problem.devices)
        return run.number in self._state.pending and self._state.promised.issuperset(run.devices)

    def ask(self) -> list[Instruction]:
        """Ask for a plan, if there is reason to."""
        if not self._state.has_news:
            return []
        candidates = self._problems.candidates(is_first=self._is_first)
        instructions = self._go_on(candidates)
        if not self._should_decide(candidates):
            return instructions
        state = self._state
        state.is_deciding, state.has_news, state.is_void = True, False, False
        self.rounds.awaited = None
        state.problem = self._problems.build(candidates)
        for run in state.runs.values():
            run.is_between_epochs = run.stage is Stage.AT_REST
        return [*instructions, Allocate(problem=state.problem)]

    def _go_on(self, candidates: list[Trial]) -> list[Instruction]:
        """Who rests goes on if no plan may move it, because of a check, or has a choice."""
        trials, has_choice = self._state.trials, self._has_choice(candidates)
        resting = [run for run in self._state.runs.values() if run.stage is Stage.AT_REST]
        staying = [
            run
            for run in resting
            if not has_choice or not self._clearance.may_move(trials[run.number])
        ]
        return [instruction for run in staying for instruction in self._stay(run)]

    def _has_choice(self, candidates: list[Trial]) -> bool:
        """Whether plans could differ: not by one trial on its fewest devices if none is free.

        So a sweep of as many trials as devices needs no plan at the end of each epoch.
        """
        movable = [trial for trial in candidates if self._problems.is_movable(trial)]
        if len(movable) != 1 or self._state.free():
            return bool(movable)
        run, model = movable[0].run, movable[0].model
        return run is None or model is None or len(run.devices) > model.min_devices

    def _should_decide(self, candidates: list[Trial]) -> bool:
        state = self._state
        if not candidates or not self._problems.usable(candidates):
            return False
        if self._policy.paradigm == "elastic":
            return self._has_choice(candidates)
        waiting = any(map(self.may_start, state.waiting()))
        if self.rounds.number > 0 and waiting and state.free():
            return True
        return self._state.is_void or (
            self.rounds.is_over(state.trials) and not self.rounds.awaits(self._unsettled())
        )

    def _unsettled(self) -> set[int]:
        trials, runs = self._state.trials, self._state.runs.values()
        return {r.run_id for r in runs if not self._problems.is_settled(trials[r.number], r)}

    def carry_out(self, plan: Plan) -> list[Instruction]:
        """Begin with the plan that was asked for."""
        self._state.is_deciding = False
        instructions: list[Instruction] = []
        problem, problems = self._state.problem, self._problems
        assert problem is not None
        # Whom it was asked about: others became candidates while it was made.
        asked = {c.number for c in problem.candidates if c.movable}
        posed = [t for t in problems.candidates(is_first=self._is_first) if t.number in asked]
        if problems.is_held_back(plan, problem) or not self._clearance.is_kept(plan, posed):
            self._state.void()
            return instructions
        assignments = plan.assignments
        moved = []
        for trial in posed:
            assignment = assignments.get(trial.number)
            if trial.run is None:
                trial.waited_rounds += assignment is None
                trial.previous_devices = ()
            elif assignment is None or set(assignment.devices) != set(trial.run.devices):
                devices = () if assignment is None else assignment.devices
                instructions += self.leave(trial.run, devices)
            else:
                instructions += self._stay(trial.run)
                continue
            moved.append(trial.number)
        promised = {n: assignments[n] for n in moved if n in assignments}
        moves = sum(self._state.trials[n].run is not None or n in promised for n in moved)
        self._promise(promised)
        if self._policy.paradigm == "elastic" and not moves:
            return instructions
        self.rounds.begin(self._state.runs.values(), plan)
        plan = self._problems.explained(plan)
        return [StartRound(round=self.rounds.number, plan=plan, moves=moves), *instructions]

    def _promise(self, assignments: dict[int, Assignment]) -> None:
        """Let placements wait for their devices, if these are still what they were."""
        state = self._state
        for number, assignment in assignments.items():
            fits = len(assignment.devices) <= state.trials[number].most_devices
            if fits and state.can_serve(assignment):
                state.pending[number] = assignment

    def leave(self, run: Run, devices: tuple[int, ...] = ()) -> list[Instruction]:
        """Tell a run to yield as soon as it can; its trial is to have these devices."""
        was_at_rest = run.stage is Stage.AT_REST
        within = self._problems.moves_within_epoch(self._state.trials[run.number])
        run.become(Stage.LEAVING if was_at_rest or within else Stage.ASKED)
        if was_at_rest:
            decision = EpochDecision.YIELD
            return [AnswerEpoch(run_id=run.run_id, decision=decision, devices=devices)]
        return [Interrupt(run_id=run.run_id, devices=devices)] if within else []

    def _stay(self, run: Run) -> list[Instruction]:
        if run.stage is not Stage.AT_REST:
            return []
        run.become(Stage.TRAINING)
        return [AnswerEpoch(run_id=run.run_id, decision=EpochDecision.GO)]
