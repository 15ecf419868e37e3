"""The controller: what happened goes in, what to do comes out. Pure: no clock, no process, no I/O.

When it decides is the paradigm: "global" re-allocates all trials in rounds, each of which ends
when fewer than `alpha` of its devices are active (FLEET 4.3.2); "local" only refills freed devices
(FLEET 4.3.3); "elastic" decides at every event about all trials and carries it out for those that
can move at that moment (BFTrainer, section 3). New proposals are probed on devices as they fall
free, so that a probe is also the start of its trial's training: batches that measured a rate are
never thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from typing_extensions import assert_never

from optuna_fleet.alloc.problem import Plan
from optuna_fleet.alloc.rates import RateProfile
from optuna_fleet.events import (
    Allocate,
    AnswerEpoch,
    CutOff,
    DataRequested,
    DeviceJoined,
    DeviceLost,
    Ending,
    EpochDecision,
    EpochEnded,
    Event,
    GiveBack,
    GiveUp,
    Instruction,
    Interrupt,
    Launch,
    MoveMeasured,
    PlanDecided,
    ProposalDelayed,
    ProposalsExhausted,
    Propose,
    RankEnded,
    RateMeasured,
    Requeue,
    RunCondemned,
    Settle,
    StartRound,
    TrialProposed,
    WidthLimited,
)
from optuna_fleet.executor.posing import Poser
from optuna_fleet.executor.profiles import Profiles
from optuna_fleet.executor.roster import Roster
from optuna_fleet.executor.trials import Policy, Run, Status, Trial
from optuna_fleet.resources import Fleet


class Controller:
    """The state machine of one `optimize` call; profiles outlive it and may be shared by calls."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        *,
        profiles: dict[str, RateProfile] | None = None,
        run_ids: Iterator[int] | None = None,
    ) -> None:
        self.fleet = fleet
        self.policy = policy
        self.round = 0
        self._profiles = Profiles({} if profiles is None else profiles, fleet)
        self._poser = Poser(fleet, policy, self._profiles)
        self._roster = Roster(count() if run_ids is None else run_ids)
        self._joined: dict[int, int] = {}
        self._joins = count()
        self._finished_epochs: list[int] = []
        self._round_widths: dict[int, int] = {}
        self._posed: frozenset[int] = frozenset()
        self._awaited: set[int] | None = None
        self._exhausted = False
        self._proposing = False
        self._proposal_delayed = False
        self._deciding = False
        self._changed = False
        self._is_disappointed = False

    @property
    def finished(self) -> bool:
        """No trial is left, none may be started, and no plan is awaited."""
        return self._exhausted and not self._roster.trials and not self._deciding

    def statuses(self) -> dict[int, Status]:
        """Where each unfinished trial is."""
        return {number: trial.status for number, trial in self._roster.trials.items()}

    def handle(self, *events: Event) -> list[Instruction]:
        """Take events that happened at once; return what to do now, in order."""
        instructions = [i for event in events for i in self._take(event)]
        return instructions + self._advance()

    # -- events -----------------------------------------------------------------------------------

    def _take(self, event: Event) -> list[Instruction]:  # noqa: C901 - one arm per event
        match event:
            case RankEnded():
                return self._rank_ended(event)
            case DeviceLost():
                return self._device_lost(event)
            case RunCondemned():
                return self._condemn(event.run_id)
            case DeviceJoined():
                self._roster.idle.add(event.device)
                self._joined[event.device] = next(self._joins)
                self._changed = True
            case TrialProposed():
                self._trial_proposed(event)
            case ProposalDelayed():
                self._proposing, self._proposal_delayed = False, True
            case ProposalsExhausted():
                self._proposing, self._exhausted = False, True
            case DataRequested():
                self._data_requested(event)
            case RateMeasured():
                self._rate_measured(event)
            case WidthLimited():
                self._width_limited(event)
            case MoveMeasured():
                if run := self._roster.runs.get(event.run_id):
                    self._roster.trials[run.number].rescale_s = event.seconds
            case EpochEnded():
                return self._epoch_ended(event)
            case PlanDecided():
                return self._plan_decided(event.plan)
            case _:
                assert_never(event)
        return []

    def _trial_proposed(self, event: TrialProposed) -> None:
        self._proposing = self._proposal_delayed = False
        trial = Trial(number=event.number, model=event.model)
        if trial.model is not None:
            trial.status, self._changed = Status.WAITING, True
        self._roster.trials[event.number] = trial

    def _data_requested(self, event: DataRequested) -> None:
        run = self._roster.runs.get(event.run_id)
        if run is None:
            return
        trial = self._roster.trials[run.number]
        trial.model = event.model
        trial.status = Status.FLYING
        run.measured = self._profiles.is_measured(event.model.structure, run.devices)
        self._changed = True

    def _rate_measured(self, event: RateMeasured) -> None:
        run = self._roster.runs.get(event.run_id)
        if run is None:
            return
        model = self._roster.trials[run.number].model
        assert model is not None
        if self._profiles.measure(model.structure, run.devices, event.samples_per_s):
            self._is_disappointed = True
        run.measured = True
        self._changed = True

    def _width_limited(self, event: WidthLimited) -> None:
        run = self._roster.runs.get(event.run_id)
        if run is not None:
            self._roster.trials[run.number].max_devices = event.max_devices
            self._changed = True

    def _epoch_ended(self, event: EpochEnded) -> list[Instruction]:
        run = self._roster.runs.get(event.run_id)
        if run is None:
            return []
        trial = self._roster.trials[run.number]
        trial.epochs_done = event.epochs_done
        trial.predicted_epochs = event.predicted_epochs
        if trial.model is not None:  # even if its first data was for something else
            trial.model = replace(trial.model, resumable=True)
        decision = EpochDecision.GO
        if event.converged:
            decision = EpochDecision.STOP
        elif run.leaving:
            decision = EpochDecision.YIELD
        elif self.policy.paradigm == "elastic" and self._poser.is_settled(trial, run):
            run.at_rest = self._changed = True
            return []
        return [AnswerEpoch(run_id=event.run_id, decision=decision)]

    def _rank_ended(self, event: RankEnded) -> list[Instruction]:
        run = self._roster.runs.get(event.run_id)
        if run is None or event.device in run.endings:
            return []
        ending = event.ending
        if self._roster.end_rank(run, event.device, ending, is_leaving=event.is_leaving):
            return self._run_ended(run)
        if ending not in (Ending.RETURNED, Ending.YIELDED) and not run.cut:
            return self._cut_off(run, at_once=run.lost)
        return []

    def _cut_off(self, run: Run, *, at_once: bool) -> list[Instruction]:
        run.cut = True
        remaining = tuple(d for d in run.devices if d not in run.endings)
        return [CutOff(run_id=run.run_id, devices=remaining, lost=at_once)]

    def _condemn(self, run_id: int) -> list[Instruction]:
        run = self._roster.runs.get(run_id)
        if run is None:
            return []
        run.condemned = True
        return self._cut_off(run, at_once=True)

    def _device_lost(self, event: DeviceLost) -> list[Instruction]:
        self._roster.lose(event.device)
        self._joined.pop(event.device, None)
        self._changed = True
        run = self._roster.run_on(event.device)
        if run is None:
            return []
        # By order, but meant for the run before this one: lost all the same.
        run.lost = run.lost or not (event.by_order and run.cut)
        ended = RankEnded(run_id=run.run_id, device=event.device, ending=Ending.LOST)
        return self._rank_ended(ended)

    def _run_ended(self, run: Run) -> list[Instruction]:
        endings = set(run.endings.values())
        run.lost = run.lost or Ending.DISCONNECTED in endings <= {Ending.DISCONNECTED, Ending.LOST}
        trial = self._roster.land(run)
        has_yielded = endings == {Ending.YIELDED}
        if not (run.leaving and has_yielded):  # what the plan asked for is no news
            self._changed = True
        names = {"number": run.number, "run_id": run.run_id}
        if run.lost and not run.condemned:
            trial.restarts += 1
            if trial.restarts > self.policy.max_restarts:
                self._roster.remove(run.number)
                return [GiveUp(**names, restarts=trial.restarts)]
        elif run.condemned or not has_yielded:
            self._roster.remove(run.number)
            self._finished_epochs.append(trial.epochs_done + 1)  # it ended within the next one
            return [Settle(**names)]
        return [Requeue(**names)]

    # -- decisions --------------------------------------------------------------------------------

    def _advance(self) -> list[Instruction]:
        if self._deciding:  # the devices the plan is made for must still be there when it comes
            return []
        instructions = [self._launch(*ready) for ready in self._roster.ready()]
        instructions += self._probe_proposed()
        if self._exhausted:
            instructions += self._give_back_unlaunched()
        elif self._may_propose():
            self._proposing = True
            instructions.append(Propose())
        if self._may_decide():
            candidates = self._candidates()
            if self._should_decide(candidates):
                instructions += self._decide(candidates)
        return instructions

    def _may_propose(self) -> bool:
        if self._proposing or self._proposal_delayed:
            return False
        most = self.policy.max_trials
        if most is not None and len(self._roster.trials) >= most:
            return False
        if self._roster.landed() < self.policy.lookahead:
            return True
        return not self._roster.with_status(Status.WAITING) and self._roster.has_free()

    def _give_back_unlaunched(self) -> list[Instruction]:
        """Once nothing more may start, give back to the study what was never launched."""
        unlaunched = [
            trial.number
            for trial in self._roster.with_status(Status.PROPOSED)
            if trial.run is None and trial.restarts == 0
        ]
        for number in unlaunched:
            self._roster.remove(number)
        return [GiveBack(number=number) for number in unlaunched]

    def _probe_proposed(self) -> list[Instruction]:
        proposed = self._roster.with_status(Status.PROPOSED)
        free = self._roster.free() if proposed else []
        return [
            self._launch(trial, (device,)) for trial, device in zip(proposed, free, strict=False)
        ]

    def _launch(self, trial: Trial, devices: tuple[int, ...]) -> Instruction:
        model = trial.model
        measured = model is not None and self._profiles.is_measured(model.structure, devices)
        run = self._roster.take_off(trial, devices, measured=measured)
        return Launch(
            run_id=run.run_id,
            number=trial.number,
            devices=devices,
            probe=trial.status is Status.PROBING,
            measure=not measured,
            round=self.round,
        )

    def _may_decide(self) -> bool:
        if self._proposing or self._roster.pending or not self._changed:
            return False
        # Their devices fall free in a moment.
        return not any(run.leaving or run.lost for run in self._roster.runs.values())

    def _should_decide(self, candidates: list[Trial]) -> bool:
        roster = self._roster
        if not candidates or not self._poser.usable(roster, candidates):
            return False
        if self.policy.paradigm == "elastic":
            return any(self._poser.is_movable(trial) for trial in candidates)
        if roster.with_status(Status.WAITING) and roster.has_free() and self.round > 0:
            return True
        return self._is_disappointed or (self._round_is_over() and not self._unsettled_newcomers())

    def _candidates(self) -> list[Trial]:
        return self._poser.candidates(self._roster, is_first=self.round == 0)

    def _unsettled_newcomers(self) -> set[int]:
        """Probes under way when the round ended, whose rates the next round should know.

        Only those: where trials are short, there is always some probe under way.
        """
        trials = self._roster.trials
        unsettled = {
            run.run_id
            for run in self._roster.runs.values()
            if not self._poser.is_settled(trials[run.number], run)
        }
        self._awaited = unsettled if self._awaited is None else self._awaited & unsettled
        return self._awaited

    def _round_is_over(self) -> bool:
        if self.round == 0:
            return True
        if self.policy.paradigm == "local":
            return False
        active = sum(m for n, m in self._round_widths.items() if n in self._roster.trials)
        return active < self.policy.alpha * sum(self._round_widths.values())

    def _decide(self, candidates: list[Trial]) -> list[Instruction]:
        self._deciding, self._changed, self._is_disappointed = True, False, False
        self._awaited = None
        self._posed = frozenset(t.number for t in candidates if self._poser.is_movable(t))
        problem = self._poser.pose(
            candidates, self._roster, self._joined, tuple(self._finished_epochs)
        )
        return [Allocate(problem=problem)]

    def _plan_decided(self, plan: Plan) -> list[Instruction]:
        self._deciding = False
        assignments = plan.assignments
        answers: list[Instruction] = []
        moves = 0
        # Only what the plan was asked about: others became candidates while it was made.
        for trial in [t for t in self._candidates() if t.number in self._posed]:
            assignment = assignments.get(trial.number)
            if trial.run is None:
                trial.waited_rounds += assignment is None
                trial.home = ()
            elif assignment is None or set(assignment.devices) != set(trial.run.devices):
                answers += self._leave(trial.run)
                moves += 1
            else:
                answers += self._stay(trial.run)
                continue
            if assignment is not None and self._roster.can_serve(assignment):
                self._roster.pending[trial.number] = assignment
        moves += len(self._roster.pending)
        if self.policy.paradigm == "elastic" and not moves:
            return answers
        self._begin_round(plan)
        return [StartRound(round=self.round, plan=plan, moves=moves), *answers]

    def _leave(self, run: Run) -> list[Instruction]:
        run.leaving = True
        if run.at_rest:
            run.at_rest = False
            return [AnswerEpoch(run_id=run.run_id, decision=EpochDecision.YIELD)]
        return [Interrupt(run_id=run.run_id)] if self.policy.moves_within_epochs else []

    def _stay(self, run: Run) -> list[Instruction]:
        if not run.at_rest:
            return []
        run.at_rest = False
        return [AnswerEpoch(run_id=run.run_id, decision=EpochDecision.GO)]

    def _begin_round(self, plan: Plan) -> None:
        self.round += 1
        self._round_widths = {run.number: len(run.devices) for run in self._roster.runs.values()}
        self._round_widths.update({n: len(a.devices) for n, a in plan.assignments.items()})
