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
    BeginCheck,
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
from optuna_fleet.executor.deciding.clearance import Clearance
from optuna_fleet.executor.deciding.planner import Planner
from optuna_fleet.executor.deciding.problems import Problems
from optuna_fleet.executor.deciding.profiles import Profiles
from optuna_fleet.executor.deciding.state import PolicyRules, Run, Stage, State, Status, Trial
from optuna_fleet.preflight.verdict import Finding

_NEWS = DeviceLost | DeviceLeaving | DeviceJoined | GrowthExpected
_NEWS |= RateMeasured | WidthLimited | RunLingers
"""Events that always make a new plan worth while; handlers of others set `has_news`."""


class Controller:
    """The state machine of one `optimize` call, on the devices that have joined.

    `profiles` (measured rates) and `findings` (results of pre-flight checks of this objective and
    data) are added to here, outlive the controller, and may be passed to later calls.
    """

    def __init__(
        self,
        policy: PolicyRules,
        *,
        profiles: dict[str, RateProfile] | None = None,
        run_ids: Iterator[int] | None = None,
        findings: list[Finding] | None = None,
    ) -> None:
        self._state = State(policy, count() if run_ids is None else run_ids)
        self._profiles = Profiles({} if profiles is None else profiles, self._state.devices)
        self._clearance = Clearance(findings)
        self._problems = Problems(self._state, self._profiles, self._clearance)
        self._planner = Planner(self._state, self._problems, self._clearance)
        self._lost: set[int] = set()  # in the events now being handled; `_gone`: for good
        self._gone: set[int] = set()

    @property
    def round(self) -> int:
        """Number of plans that were carried out."""
        return self._planner.rounds.number

    @property
    def finished(self) -> bool:
        """No trial is left, none may be started, and no plan is awaited."""
        return self._state.is_exhausted and not self._state.trials and not self._state.is_deciding

    @property
    def most_usable(self) -> int | None:
        """How many devices its trials could use at once; None while more may be proposed."""
        if not self._state.is_exhausted:
            return None
        trials = self._state.trials.values()
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
            run = self._state.runs.get(event.run_id)
            if run is None:  # what ended runs still say
                return []
            self._state.has_news |= isinstance(event, _NEWS)
            return self._take_of_run(run, event)
        self._state.has_news |= isinstance(event, _NEWS)
        match event:
            case DeviceLost():
                return self._device_lost(event)
            case DeviceGone():
                return self._device_gone(event.device)
            case DeviceLeaving():
                return self._device_leaving(event.device)
            case GrowthExpected():
                self._state.may_grow = event.is_expected
            case DeviceJoined():
                if self._state.devices.join(event.device):
                    self._planner.rounds.end()
                self._state.join(event.device.index)
            case TrialProposed():
                self._trial_proposed(event)
            case ProposalDelayed() | ProposalsExhausted():
                self._state.is_proposing, self._state.num_to_come = False, 0
                self._state.is_delayed |= isinstance(event, ProposalDelayed)
                self._state.is_exhausted |= isinstance(event, ProposalsExhausted)
            case PlanDecided():
                return self._planner.carry_out(event.plan)
            case PreprocessingMeasured():
                self._state.made_per_s = event.samples_per_s
            case CheckEnded():
                self._clearance.end(event.finding)
                self._state.end_check()
                self._state.void()
            case CheckAffordable():
                self._clearance.is_affordable = True
                self._state.void()
            case _:
                assert_never(event)
        return []

    def _take_of_run(  # noqa: C901 - one arm per event
        self, run: Run, event: RunEvent
    ) -> list[Instruction]:
        trial = self._state.trials[run.number]
        match event:
            case RankEnded():
                return self._rank_ended(run, event)
            case RunLingers():
                run.lingers = True  # devices that its ranks have left are free from now on
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
                    run.become(Stage.FIXED)  # a second refusal would spoil another plan
                    self._state.call_off()
            case MoveMeasured():
                trial.rescale_s = event.seconds
                self._state.moves_s.append(event.seconds)
            case CheckpointSaved():
                trial.checkpoint, trial.epochs_saved = event.location, event.epoch
            case EpochEnded():
                return self._epoch_ended(run, trial, event)
            case _:
                assert_never(event)
        return []

    def _trial_proposed(self, event: TrialProposed) -> None:
        self._state.is_proposing = self._state.is_delayed = False
        trial = Trial(number=event.number, model=event.model, checkpoint=event.checkpoint)
        self._state.has_news |= trial.model is not None
        self._state.trials[event.number] = trial
        self._state.num_to_come = event.num_to_come

    def _data_requested(self, run: Run, trial: Trial, model: Model) -> None:
        was_known = trial.model, run.measured
        trial.model = model
        run.measured = self._profiles.is_measured(model.structure, run.devices)
        self._state.has_news |= was_known != (trial.model, run.measured)

    def _rate_measured(self, run: Run, trial: Trial, samples_per_s: float) -> None:
        assert trial.model is not None
        if self._profiles.measure(trial.model.structure, run.devices, samples_per_s):
            self._state.void()
        run.measured = True

    def _width_limited(self, run: Run, trial: Trial, max_devices: int) -> list[Instruction]:
        was_known, trial.max_devices = trial.is_too_wide, max_devices
        promised = self._state.pending.get(run.number)
        if promised is not None and len(promised.devices) > max_devices:
            del self._state.pending[run.number]
            self._state.call_off()
        return self._abort(run) if trial.is_too_wide and not was_known else []

    def _epoch_ended(self, run: Run, trial: Trial, event: EpochEnded) -> list[Instruction]:
        trial.epochs_done, trial.predicted_epochs = event.epochs_done, event.predicted_epochs
        if trial.epochs_done > trial.furthest:
            trial.losses.clear()  # they do not count any more
        if trial.model is not None:  # even if its first batches were not training ones
            trial.model = replace(trial.model, resumable=True)
        decision, devices = EpochDecision.GO, tuple[int, ...]()
        if event.converged:
            decision = EpochDecision.STOP
        elif run.is_moving or (
            run.stage is Stage.TRAINING and not self._state.leaving.isdisjoint(run.devices)
        ):
            decision, devices = EpochDecision.YIELD, self._state.next_devices(run)
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
        self._state.end_rank(run, event.device, ending, is_leaving=event.is_leaving)
        if run.is_over or run.lingers:
            self._state.has_news |= run.is_news
        if run.is_over:
            return self._run_ended(run)
        if ending not in (Ending.RETURNED, Ending.YIELDED) and not run.is_aborted:
            return self._abort(run)
        return []

    def _abort(self, run: Run, stage: Stage = Stage.ABORTED) -> list[Instruction]:
        if stage is Stage.FAILED or not run.is_aborted:
            run.become(stage)
            self._state.has_news = True  # a plan that is awaited may have devices for it
        at_once = run.is_lost or stage is Stage.FAILED
        devices = tuple(device for device in run.remaining if device not in self._lost)
        return [Abort(run_id=run.run_id, devices=devices, lost=at_once)] if devices else []

    def _device_lost(self, event: DeviceLost) -> list[Instruction]:
        state, device = self._state, event.device
        state.lose(device)
        self._state.has_news = True
        instructions: list[Instruction] = []
        if (run := state.run_on.get(device)) is not None:
            # Killed on our order, which was for the run before: this one has lost it all the same.
            ending = Ending.KILLED if event.by_order and run.is_aborted else Ending.LOST
            ended = RankEnded(run_id=run.run_id, device=device, ending=ending)
            run.lost_with_node |= event.with_node or device in self._gone
            instructions = self._rank_ended(run, ended)
        if device in state.promised:
            self._state.call_off()
        return instructions

    def _device_leaving(self, device: int) -> list[Instruction]:
        self._state.leaving.add(device)
        if device in self._state.promised:
            self._state.call_off()
        run = self._state.run_on.get(device)
        if run is None or not self._problems.can_leave(self._state.trials[run.number]):
            return []
        return self._planner.leave(run, self._state.next_devices(run))

    def _device_gone(self, device: int) -> list[Instruction]:
        if not self._state.devices.leave(device):
            return []
        return self._device_lost(DeviceLost(device=device))

    def _run_ended(self, run: Run) -> list[Instruction]:
        is_too_wide = self._state.trials[run.number].is_too_wide
        has_failed = run.stage is Stage.FAILED
        trial = self._state.end_run(run)
        has_yielded = set(run.endings.values()) == {Ending.YIELDED}
        names = {"number": run.number, "run_id": run.run_id}
        if is_too_wide and not has_failed:
            return [Requeue(**names)]
        if run.is_lost and not has_failed:
            if not run.lost_with_node:
                trial.losses.append(self._state.devices.nodes_of(run.lost_on))
            if len(trial.losses) > self._state.policy.max_restarts:
                self._state.remove(run.number)
                return [GiveUp(**names, restarts=len(trial.losses))]
        elif has_failed or not has_yielded:
            self._state.remove(run.number)
            self._state.note_end(trial)
            return [FinishTrial(**names)]
        return [Requeue(**names)]

    # -- decisions --------------------------------------------------------------------------------

    def _advance(self) -> list[Instruction]:
        instructions = [self._launch(*ready) for ready in self._state.ready()]
        instructions += self._begin_check()
        # A plan is being made: leave the devices and trials it is for as they are.
        if self._state.is_deciding:
            return instructions
        unplanned = [t for t in self._state.waiting() if self._problems.waits(t)]
        proposed = filter(self._planner.may_start, self._state.with_status(Status.PROPOSED))
        instructions += self._start_singly([*proposed, *unplanned])
        if self._state.is_exhausted:
            instructions += self._give_back_unlaunched()
        elif self._may_propose():
            self._state.is_proposing = True
            instructions.append(Propose())
        if self._state.is_proposing:
            return instructions
        instructions += self._planner.ask()
        # The first plan waits for rates: start trials singly meanwhile.
        if self.round == 0 and not self._state.is_deciding:
            waiting = self._state.waiting()
            instructions += self._start_singly([t for t in waiting if t.fits_one_device])
        return instructions

    def _begin_check(self) -> list[Instruction]:
        free, trials = self._state.free(), self._state.trials.values()
        self._clearance.forget_ended(trials)
        if not free or len(self._state.devices) < 2:
            return []
        trial = self._clearance.take(trials, looks_ahead=self._state.policy.looks_ahead)
        if trial is None:
            return []
        assert trial.model is not None
        self._state.checked_on = free[0]
        self._state.idle.remove(free[0])
        return [BeginCheck(number=trial.number, device=free[0], traits=trial.model.traits)]

    def _may_propose(self) -> bool:
        if self._state.is_proposing or self._state.is_delayed or not self._planner.takes_new:
            return False
        most = self._state.policy.max_trials
        if most is not None and len(self._state.trials) >= most:
            return False
        if len(self._state.trials) - len(self._state.runs) < self._state.policy.lookahead:
            return True
        waiting = [t for t in self._state.waiting() if not self._problems.waits(t)]
        fits = any(map(self._problems.fits_fleet, waiting))
        if fits and not self._problems.are_last_to_come():
            return False
        # Up to a limit, trials that wait for devices to join keep no new ones from being proposed.
        return len(waiting) <= len(self._state.devices) and bool(self._state.free())

    def _give_back_unlaunched(self) -> list[Instruction]:
        """Once nothing more may start, give back to the study what was never launched."""
        unlaunched = [
            trial.number
            for trial in self._state.with_status(Status.PROPOSED)
            if not trial.was_launched
        ]
        for number in unlaunched:
            self._state.remove(number)
        return [ReturnToQueue(number=number) for number in unlaunched]

    def _start_singly(self, trials: list[Trial]) -> list[Instruction]:
        """Launch as many as there are free devices, each on one."""
        free = self._state.free() if trials else []
        launches = []
        for trial in trials:
            if (device := self._problems.first_for(trial, free)) is not None:
                free.remove(device)
                launches.append(self._launch(trial, (device,)))
        return launches

    def _launch(self, trial: Trial, devices: tuple[int, ...]) -> Instruction:
        model = trial.model
        measured = model is not None and self._profiles.is_measured(model.structure, devices)
        run = self._state.start_run(trial, devices, measured=measured)
        return Launch(
            run_id=run.run_id,
            number=trial.number,
            devices=devices,
            probe=trial.status is Status.PROBING,
            measure=not measured,
            round=self.round,
            checkpoint=trial.checkpoint,
        )
