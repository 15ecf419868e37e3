"""The controller: what happened goes in, what to do comes out. Pure: no clock, no process, no I/O.

When it decides is the paradigm: "global" re-allocates all trials in rounds, each of which ends
when fewer than `alpha` of its devices are active (FLEET 4.3.2); "local" only refills freed devices
(FLEET 4.3.3); "elastic" decides at every event about all trials and carries it out for those that
can move at that moment (BFTrainer, section 3); see `planner`. New proposals are probed on devices
as they fall free, so that a probe is also the start of its trial's training: batches that measured
a rate are never thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from typing_extensions import assert_never

from optuna_fleet.alloc.rates import RateProfile
from optuna_fleet.events import (
    Abort,
    AnswerEpoch,
    CheckAffordable,
    CheckEnded,
    CheckpointSaved,
    DataRequested,
    DeviceGone,
    DeviceJoined,
    DeviceLeaving,
    DeviceLost,
    Ending,
    EpochDecision,
    EpochEnded,
    Event,
    FinishTrial,
    GiveUp,
    GrowthExpected,
    Instruction,
    Launch,
    Model,
    MoveMeasured,
    MoveRefused,
    PlanDecided,
    PreprocessingMeasured,
    ProposalDelayed,
    ProposalsExhausted,
    Propose,
    RankEnded,
    RateMeasured,
    Requeue,
    ReturnToQueue,
    RunEvent,
    RunFailed,
    RunLingers,
    TrialProposed,
    WidthLimited,
)
from optuna_fleet.executor.deciding.avoidance import Avoidance
from optuna_fleet.executor.deciding.clearance import Clearance
from optuna_fleet.executor.deciding.planner import Planner
from optuna_fleet.executor.deciding.presence import Presence
from optuna_fleet.executor.deciding.problem_builder import ProblemBuilder
from optuna_fleet.executor.deciding.profiles import Profiles
from optuna_fleet.executor.deciding.roster import Roster
from optuna_fleet.executor.deciding.trials import PolicyRules, Run, Stage, Status, Trial


class Controller:
    """The state machine of one `optimize` call, on the devices that have joined.

    Profiles outlive it and may be shared by calls.
    """

    def __init__(
        self,
        policy: PolicyRules,
        *,
        profiles: dict[str, RateProfile] | None = None,
        run_ids: Iterator[int] | None = None,
        clearance: Clearance | None = None,
    ) -> None:
        self.policy = policy
        self._presence = Presence()
        self._profiles = Profiles({} if profiles is None else profiles, self._presence)
        self._roster = Roster(count() if run_ids is None else run_ids)
        self._clearance = clearance or Clearance()
        self._problems = ProblemBuilder(
            *(policy, self._profiles, self._presence, self._roster, self._clearance)
        )
        self._avoidance = Avoidance(self._presence, policy.max_restarts)
        self._planner = Planner(
            *(policy, self._problems, self._roster, self._avoidance, self._clearance)
        )
        self._lost: set[int] = set()  # at this moment, as the next
        self._gone: set[int] = set()
        self._exhausted = False
        self._proposing = False
        self._proposal_delayed = False

    @property
    def round(self) -> int:
        """Number of plans that were carried out."""
        return self._planner.round

    @property
    def finished(self) -> bool:
        """No trial is left, none may be started, and no plan is awaited."""
        return self._exhausted and not self._roster.trials and not self._planner.is_deciding

    @property
    def most_usable(self) -> int | None:
        """How many devices its trials could use at once; None while more may be proposed."""
        if not self._exhausted:
            return None
        trials = self._roster.trials.values()
        return sum(1 if trial.model is None else trial.most_devices for trial in trials)

    def handle(self, *events: Event) -> list[Instruction]:
        """Take events that happened at once; return what to do now, in order."""
        self._lost = {e.device for e in events if isinstance(e, DeviceLost | DeviceGone)}
        self._gone = {e.device for e in events if isinstance(e, DeviceGone)}
        instructions = [i for event in events for i in self._take(event)]
        return instructions + self._advance()

    # -- events -----------------------------------------------------------------------------------

    def _take(self, event: Event) -> list[Instruction]:  # noqa: C901 - one arm per event
        if isinstance(event, RunEvent):
            run = self._roster.runs.get(event.run_id)
            return [] if run is None else self._take_of_run(run, event)
        match event:
            case DeviceLost():
                return self._device_lost(event)
            case DeviceGone():
                return self._device_gone(event.device)
            case DeviceLeaving():
                return self._device_leaving(event.device)
            case GrowthExpected():
                self._problems.may_grow = event.is_expected
                self._planner.has_news = True
            case DeviceJoined():
                if self._presence.join(event.device):
                    self._planner.end_round()
                self._roster.join(event.device.index)
                self._planner.has_news = True
            case TrialProposed():
                self._trial_proposed(event)
            case ProposalDelayed():
                self._proposing, self._proposal_delayed = False, True
                self._problems.num_to_come = 0  # none before another trial ends
            case ProposalsExhausted():
                self._proposing, self._exhausted = False, True
                self._problems.num_to_come = 0
            case PlanDecided():
                return self._planner.carry_out(event.plan)
            case PreprocessingMeasured():
                self._problems.measured_samples_per_s = event.samples_per_s
            case CheckEnded():
                self._clearance.end(event.finding)
                self._roster.end_check()
                self._planner.void()
            case CheckAffordable():
                self._clearance.is_affordable = True
                self._planner.void()
            case _:
                assert_never(event)
        return []

    def _take_of_run(  # noqa: C901 - one arm per event
        self, run: Run, event: RunEvent
    ) -> list[Instruction]:
        """What ended runs still say was dropped."""
        trial = self._roster.trials[run.number]
        match event:
            case RankEnded():
                return self._rank_ended(run, event)
            case RunLingers():
                self._roster.linger(run)
                self._planner.has_news = True
            case RunFailed():
                return self._abort(run, Stage.FAILED)
            case DataRequested():
                self._data_requested(run, trial, event.model)
            case RateMeasured():
                self._rate_measured(run, trial, event.samples_per_s)
            case WidthLimited():
                return self._width_limited(run, trial, event.max_devices)
            case MoveRefused():
                if run.stage is Stage.LEAVING:
                    run.become(Stage.FIXED)  # it may fail again, and that costs the others a plan
                    self._planner.call_off()
            case MoveMeasured():
                trial.rescale_s = event.seconds
                self._problems.moves_s.append(event.seconds)
            case CheckpointSaved():
                trial.checkpoint, trial.epochs_saved = event.location, event.epoch
            case EpochEnded():
                return self._epoch_ended(run, trial, event)
            case _:
                assert_never(event)
        return []

    def _trial_proposed(self, event: TrialProposed) -> None:
        self._proposing = self._proposal_delayed = False
        trial = Trial(number=event.number, model=event.model, checkpoint=event.checkpoint)
        self._planner.has_news |= trial.model is not None
        self._roster.trials[event.number] = trial
        self._problems.num_to_come = event.num_to_come

    def _data_requested(self, run: Run, trial: Trial, model: Model) -> None:
        was_known = trial.model, run.measured
        trial.model = model
        run.measured = self._profiles.is_measured(model.structure, run.devices)
        self._planner.has_news |= was_known != (trial.model, run.measured)

    def _rate_measured(self, run: Run, trial: Trial, samples_per_s: float) -> None:
        assert trial.model is not None
        if self._profiles.measure(trial.model.structure, run.devices, samples_per_s):
            self._planner.void()
        run.measured = True
        self._planner.has_news = True

    def _width_limited(self, run: Run, trial: Trial, max_devices: int) -> list[Instruction]:
        was_known, trial.max_devices = trial.is_too_wide, max_devices
        self._planner.has_news = True
        promised = self._roster.pending.get(run.number)
        if promised is not None and len(promised.devices) > max_devices:
            del self._roster.pending[run.number]
            self._planner.call_off()
        return self._abort(run) if trial.is_too_wide and not was_known else []

    def _epoch_ended(self, run: Run, trial: Trial, event: EpochEnded) -> list[Instruction]:
        trial.epoch_ended(event.epochs_done)
        trial.predicted_epochs = event.predicted_epochs
        if trial.model is not None:  # even if its first data was for something else
            trial.model = replace(trial.model, resumable=True)
        decision, devices = EpochDecision.GO, tuple[int, ...]()
        if event.converged:
            decision = EpochDecision.STOP
        elif run.is_moving or self._roster.has_to_leave(run):
            decision, devices = EpochDecision.YIELD, self._roster.next_devices(run)
            if run.stage is not Stage.LEAVING:
                run.become(Stage.LEAVING)
        elif self._planner.rests_after_epoch(run):
            return []
        return [AnswerEpoch(run_id=event.run_id, decision=decision, devices=devices)]

    def _rank_ended(self, run: Run, event: RankEnded) -> list[Instruction]:
        if event.device in run.endings:
            return []
        ending = event.ending
        run.is_news |= ending is not Ending.YIELDED or not self._planner.has_planned_for(run)
        self._roster.end_rank(run, event.device, ending, is_leaving=event.is_leaving)
        if run.is_over or run.lingers:
            self._planner.has_news |= run.is_news
        if run.is_over:
            return self._run_ended(run)
        if ending not in (Ending.RETURNED, Ending.YIELDED) and not run.is_aborted:
            return self._abort(run)
        return []

    def _abort(self, run: Run, stage: Stage = Stage.ABORTED) -> list[Instruction]:
        if stage is Stage.FAILED or not run.is_aborted:
            run.become(stage)
            self._planner.has_news = True  # a plan that is awaited may have devices for it
        at_once = run.is_lost or stage is Stage.FAILED
        devices = tuple(device for device in run.remaining if device not in self._lost)
        return [Abort(run_id=run.run_id, devices=devices, lost=at_once)] if devices else []

    def _device_lost(self, event: DeviceLost) -> list[Instruction]:
        roster, device = self._roster, event.device
        roster.lose(device)
        self._planner.has_news = True
        instructions: list[Instruction] = []
        if (run := roster.run_on(device)) is not None:
            # By order, but meant for the run before this one: lost all the same.
            ending = Ending.KILLED if event.by_order and run.is_aborted else Ending.LOST
            ended = RankEnded(run_id=run.run_id, device=device, ending=ending)
            run.lost_with_node |= event.with_node or device in self._gone
            instructions = self._rank_ended(run, ended)
        if roster.is_promised([device]):
            self._planner.call_off()
        return instructions

    def _device_leaving(self, device: int) -> list[Instruction]:
        self._roster.leaving.add(device)
        if self._roster.is_promised([device]):
            self._planner.call_off()
        self._planner.has_news = True
        run = self._roster.run_on(device)
        if run is None or not self._problems.can_leave(self._roster.trials[run.number]):
            return []
        run.clears = True
        return self._planner.leave(run, self._roster.next_devices(run))

    def _device_gone(self, device: int) -> list[Instruction]:
        if not self._presence.leave(device):
            return []
        return self._device_lost(DeviceLost(device=device))

    def _run_ended(self, run: Run) -> list[Instruction]:
        is_too_wide = self._roster.trials[run.number].is_too_wide
        has_failed = run.stage is Stage.FAILED
        trial = self._roster.end_run(run)
        has_yielded = set(run.endings.values()) == {Ending.YIELDED}
        names = {"number": run.number, "run_id": run.run_id}
        if is_too_wide and not has_failed:
            return [Requeue(**names)]
        if run.is_lost and not has_failed:
            if not run.lost_with_node:
                trial.losses.append(self._presence.nodes_of(run.lost_on))
            if len(trial.losses) > self.policy.max_restarts:
                self._roster.remove(run.number)
                return [GiveUp(**names, restarts=len(trial.losses))]
        elif has_failed or not has_yielded:
            self._roster.remove(run.number)
            self._problems.note_end(trial)
            return [FinishTrial(**names)]
        return [Requeue(**names)]

    # -- decisions --------------------------------------------------------------------------------

    def _advance(self) -> list[Instruction]:
        instructions = [self._launch(*ready) for ready in self._roster.ready()]
        instructions += self._begin_check()
        if self._planner.is_deciding:  # what it is made for must still be there when it comes
            return instructions
        unplanned = [t for t in self._roster.waiting() if self._avoidance.waits(t)]
        proposed = filter(self._planner.may_start, self._roster.with_status(Status.PROPOSED))
        instructions += self._start_singly([*proposed, *unplanned])
        if self._exhausted:
            instructions += self._give_back_unlaunched()
        elif self._may_propose():
            self._proposing = True
            instructions.append(Propose())
        if self._proposing:
            return instructions
        instructions += self._planner.ask()
        if self.round == 0 and not self._planner.is_deciding:  # it awaits rates: go on meanwhile
            waiting = self._roster.waiting()
            instructions += self._start_singly([t for t in waiting if t.fits_one_device])
        return instructions

    def _begin_check(self) -> list[Instruction]:
        free, trials = self._roster.free(), self._roster.trials.values()
        self._clearance.forget_ended(trials)
        if not free or len(self._presence) < 2:
            return []
        trial = self._clearance.take(trials, looks_ahead=self.policy.looks_ahead)
        return [] if trial is None else [self._roster.begin_check(trial, free[0])]

    def _may_propose(self) -> bool:
        if self._proposing or self._proposal_delayed or not self._planner.takes_new:
            return False
        most = self.policy.max_trials
        if most is not None and len(self._roster.trials) >= most:
            return False
        if self._roster.num_without_run() < self.policy.lookahead:
            return True
        waiting = [t for t in self._roster.waiting() if not self._avoidance.waits(t)]
        fits = any(map(self._problems.fits_fleet, waiting))
        if fits and not self._problems.are_last_to_come():
            return False
        # Those that wait for more devices to join leave these to others, up to a point.
        return len(waiting) <= len(self._presence) and self._roster.has_free()

    def _give_back_unlaunched(self) -> list[Instruction]:
        """Once nothing more may start, give back to the study what was never launched."""
        unlaunched = [
            trial.number
            for trial in self._roster.with_status(Status.PROPOSED)
            if trial.run is None and not trial.was_launched
        ]
        for number in unlaunched:
            self._roster.remove(number)
        return [ReturnToQueue(number=number) for number in unlaunched]

    def _start_singly(self, trials: list[Trial]) -> list[Instruction]:
        """Launch as many as there are free devices, each on one."""
        free = self._roster.free() if trials else []
        launches = []
        for trial in trials:
            if (device := self._avoidance.first_for(trial, free)) is not None:
                free.remove(device)
                launches.append(self._launch(trial, (device,)))
        return launches

    def _launch(self, trial: Trial, devices: tuple[int, ...]) -> Instruction:
        model = trial.model
        measured = model is not None and self._profiles.is_measured(model.structure, devices)
        run = self._roster.start_run(trial, devices, measured=measured)
        return Launch(
            run_id=run.run_id,
            number=trial.number,
            devices=devices,
            probe=trial.status is Status.PROBING,
            measure=not measured,
            round=self.round,
            checkpoint=trial.checkpoint,
        )
