"""The controller: what happened goes in, what to do comes out. Pure: no clock, no process, no I/O.

A *round* is one way to decide when to decide again (FLEET 4.3.2): the global paradigm re-allocates
all trials once fewer than `alpha` of the round's devices are active; the local one (4.3.3) only
refills freed devices. New proposals are probed on devices as they fall free, so that a probe is
also the start of its trial's training: batches that measured a rate are never thrown away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

from typing_extensions import assert_never

from optuna_fleet.alloc.problem import AllocationProblem, Assignment, Candidate, Plan
from optuna_fleet.alloc.rates import RateProfile, pooled_scaling
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
from optuna_fleet.executor.trials import Policy, Run, Status, Trial
from optuna_fleet.resources import Fleet

# A rate this far below what its plan was made for is a reason to decide again at once.
_SHORTFALL = 0.75


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
        self.profiles = {} if profiles is None else profiles
        self.round = 0
        self._run_ids = count() if run_ids is None else run_ids
        self._trials: dict[int, Trial] = {}
        self._runs: dict[int, Run] = {}
        self._idle: set[int] = set()
        self._pending: dict[int, Assignment] = {}
        self._round_widths: dict[int, int] = {}
        self._posed: frozenset[int] = frozenset()
        self._exhausted = False
        self._awaited: set[int] | None = None
        self._proposing = False
        self._deciding = False
        self._changed = False
        self._is_disappointed = False

    @property
    def finished(self) -> bool:
        """No trial is left, none may be started, and no plan is awaited."""
        return self._exhausted and not self._trials and not self._deciding

    def statuses(self) -> dict[int, Status]:
        """Where each unfinished trial is."""
        return {number: trial.status for number, trial in self._trials.items()}

    def handle(self, event: Event) -> list[Instruction]:
        """Take one event; return what to do now, in order."""
        instructions = self._take(event)
        return instructions + self._advance()

    # -- events -----------------------------------------------------------------------------------

    def _take(self, event: Event) -> list[Instruction]:  # one arm per event
        match event:
            case TrialProposed():
                self._proposing = False
                self._trials[event.number] = Trial(number=event.number)
            case ProposalsExhausted():
                self._proposing, self._exhausted = False, True
            case DataRequested():
                self._data_requested(event)
            case RateMeasured():
                self._rate_measured(event)
            case EpochEnded():
                return self._epoch_ended(event)
            case RankEnded():
                return self._rank_ended(event.run_id, event.device, event.ending)
            case DeviceLost():
                return self._device_lost(event)
            case DeviceJoined():
                self._idle.add(event.device)
                self._changed = True
            case PlanDecided():
                return self._plan_decided(event.plan)
            case _:
                assert_never(event)
        return []

    def _data_requested(self, event: DataRequested) -> None:
        run = self._runs.get(event.run_id)
        if run is None:
            return
        trial = self._trials[run.number]
        trial.structure, trial.resumable = event.structure, event.resumable
        trial.batch_size = event.batch_size
        trial.status = Status.FLYING
        known = self.profiles.get(event.structure)
        run.measured = known is not None and len(run.devices) in known.measured
        self._changed = True

    def _rate_measured(self, event: RateMeasured) -> None:
        run = self._runs.get(event.run_id)
        if run is None:
            return
        structure = self._trials[run.number].structure
        assert structure is not None
        width, rate = len(run.devices), event.samples_per_s
        known = self.profiles.get(structure)
        if known is not None and rate < _SHORTFALL * self._rates(known, width)[-1]:
            self._is_disappointed = True
        self.profiles[structure] = (
            known.with_measurement(width, rate)
            if known
            else RateProfile(structure=structure, measured={width: rate})
        )
        run.measured = True
        self._changed = True

    def _epoch_ended(self, event: EpochEnded) -> list[Instruction]:
        run = self._runs.get(event.run_id)
        if run is None:
            return []
        # Even if its first data was for something else: from now on it can yield.
        self._trials[run.number].resumable = True
        decision = EpochDecision.GO
        if event.converged:
            decision = EpochDecision.STOP
        elif run.leaving:
            decision = EpochDecision.YIELD
        return [AnswerEpoch(run_id=event.run_id, decision=decision)]

    def _rank_ended(self, run_id: int, device: int, ending: Ending) -> list[Instruction]:
        run = self._runs.get(run_id)
        if run is None or device in run.endings:
            return []
        run.endings[device] = ending
        run.lost = run.lost or ending is Ending.CUT_OFF
        if ending is not Ending.LOST:
            self._idle.add(device)
        remaining = tuple(d for d in run.devices if d not in run.endings)
        if not remaining:
            return self._run_ended(run)
        if ending in (Ending.RAISED, Ending.CUT_OFF, Ending.LOST) and not run.cut:
            run.cut = True
            return [CutOff(run_id=run_id, devices=remaining, lost=run.lost)]
        return []

    def _device_lost(self, event: DeviceLost) -> list[Instruction]:
        self._idle.discard(event.device)
        self._pending = {n: a for n, a in self._pending.items() if event.device not in a.devices}
        self._changed = True
        for run in self._runs.values():
            if event.device in run.devices and event.device not in run.endings:
                # By order, but meant for the run before this one: lost all the same.
                run.lost = run.lost or not (event.by_order and run.cut)
                return self._rank_ended(run.run_id, event.device, Ending.LOST)
        return []

    def _run_ended(self, run: Run) -> list[Instruction]:
        del self._runs[run.run_id]
        self._changed = True
        trial = self._trials[run.number]
        trial.run = None
        names = {"number": run.number, "run_id": run.run_id}
        endings = set(run.endings.values())
        if run.lost:
            trial.restarts += 1
            if trial.restarts > self.policy.max_restarts:
                del self._trials[run.number]
                self._pending.pop(run.number, None)
                return [GiveUp(**names, restarts=trial.restarts)]
        elif endings != {Ending.YIELDED}:
            del self._trials[run.number]
            self._pending.pop(run.number, None)
            return [Settle(**names)]
        trial.status = Status.WAITING if trial.structure else Status.PROPOSED
        return [Requeue(**names)]

    # -- decisions --------------------------------------------------------------------------------

    def _advance(self) -> list[Instruction]:
        if self._deciding:  # the devices the plan is made for must still be there when it comes
            return []
        instructions = [*self._launch_pending(), *self._probe_proposed()]
        if self._exhausted:
            instructions += self._give_back_unlaunched()
        elif not self._proposing and not self._waiting() and self._free():
            self._proposing = True
            instructions.append(Propose())
        if self._should_decide():
            instructions += self._decide()
        return instructions

    def _give_back_unlaunched(self) -> list[Instruction]:
        """Once nothing more may start, give back to the study what was never launched."""
        unlaunched = [
            trial
            for trial in self._trials.values()
            if trial.status is Status.PROPOSED and trial.run is None and trial.restarts == 0
        ]
        for trial in unlaunched:
            del self._trials[trial.number]
        return [GiveBack(number=trial.number) for trial in unlaunched]

    def _free(self) -> list[int]:
        """Idle devices that no pending launch waits for."""
        reserved = {
            device for assignment in self._pending.values() for device in assignment.devices
        }
        return sorted(self._idle - reserved)

    def _waiting(self) -> list[Trial]:
        return [t for t in self._trials.values() if t.status is Status.WAITING]

    def _launch_pending(self) -> list[Instruction]:
        launches: list[Instruction] = []
        for number, assignment in list(self._pending.items()):
            trial = self._trials[number]
            if trial.run is None and self._idle.issuperset(assignment.devices):
                del self._pending[number]
                launches.append(self._launch(trial, assignment.devices))
        return launches

    def _probe_proposed(self) -> list[Instruction]:
        proposed = [t for t in self._trials.values() if t.status is Status.PROPOSED]
        return [
            self._launch(trial, (device,))
            for trial, device in zip(proposed, self._free(), strict=False)
        ]

    def _launch(self, trial: Trial, devices: tuple[int, ...]) -> Launch:
        self._idle.difference_update(devices)
        probe = trial.status is Status.PROPOSED
        profile = self.profiles.get(trial.structure) if trial.structure else None
        measured = profile is not None and len(devices) in profile.measured
        run = Run(
            run_id=next(self._run_ids), number=trial.number, devices=devices, measured=measured
        )
        trial.run = self._runs[run.run_id] = run
        trial.status = Status.PROBING if probe else Status.FLYING
        trial.waited_rounds = 0
        return Launch(
            run_id=run.run_id,
            number=trial.number,
            devices=devices,
            probe=probe,
            measure=not measured,
            round=self.round,
        )

    def _should_decide(self) -> bool:
        if self._proposing or self._pending or not self._changed:
            return False
        if any(run.leaving for run in self._runs.values()):
            return False
        candidates = self._candidates()
        if not candidates or not self._usable(candidates):
            return False
        if self._waiting() and self._free() and self.round > 0:
            return True
        return self._is_disappointed or (self._round_is_over() and not self._unsettled_newcomers())

    def _unsettled_newcomers(self) -> set[int]:
        """Probes under way when the round ended, whose rates the next round should know.

        Only those: where trials are short, there is always some probe under way.
        """
        unsettled = {run.run_id for run in self._runs.values() if not self._is_settled(run)}
        self._awaited = unsettled if self._awaited is None else self._awaited & unsettled
        return self._awaited

    def _is_settled(self, run: Run) -> bool:
        """Nothing more will be learnt of the run: its rate is known, or it will never move."""
        trial = self._trials[run.number]
        return trial.status is Status.FLYING and (run.measured or not trial.resumable)

    def _round_is_over(self) -> bool:
        if self.round == 0:
            return True
        if self.policy.paradigm == "local":
            return False
        active = sum(m for number, m in self._round_widths.items() if number in self._trials)
        return active < self.policy.alpha * sum(self._round_widths.values())

    def _candidates(self) -> list[Trial]:
        """Trials that may be placed: waiting ones and, but for the local paradigm, flying ones."""
        movable = self.policy.paradigm == "global" or self.round == 0
        return [
            trial
            for trial in self._trials.values()
            if trial.status is Status.WAITING
            or (movable and trial.run and trial.resumable and self._is_settled(trial.run))
        ]

    def _decide(self) -> list[Instruction]:
        self._deciding, self._changed, self._is_disappointed = True, False, False
        self._awaited = None
        candidates = self._candidates()
        self._posed = frozenset(trial.number for trial in candidates)
        usable = self._usable(candidates)
        problem = AllocationProblem(
            candidates=tuple(self._candidate(trial, len(usable)) for trial in candidates),
            nodes=self._nodes(usable),
            rate_spread=self.policy.rate_spread,
            time_limit_s=self.policy.solver_time_limit_s,
        )
        return [Allocate(problem=problem)]

    def _usable(self, candidates: Iterable[Trial]) -> set[int]:
        """Devices that may be given to the candidates: idle ones and their own."""
        return self._idle | {d for trial in candidates if trial.run for d in trial.run.devices}

    def _candidate(self, trial: Trial, num_devices: int) -> Candidate:
        assert trial.structure is not None
        profile = self.profiles.get(trial.structure)
        if profile is None:  # lost before it was measured: as good as any
            profile = RateProfile(structure=trial.structure, measured={1: 1.0})
        return Candidate(
            number=trial.number,
            rates=self._rates(profile, num_devices),
            max_devices=trial.batch_size,  # a rank more would have no sample
            devices=trial.run.devices if trial.run else (),
            waited_rounds=trial.waited_rounds,
        )

    def _rates(self, profile: RateProfile, num_devices: int) -> tuple[float, ...]:
        return profile.rates(num_devices, pooled_scaling(self.profiles.values()))

    def _nodes(self, usable: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        usable = set(usable)
        nodes = (tuple(d for d in node if d in usable) for node in self.fleet.nodes)
        return tuple(node for node in nodes if node)

    def _plan_decided(self, plan: Plan) -> list[Instruction]:
        self._deciding = False
        self.round += 1
        assignments = plan.assignments
        # Only what the plan was asked about: others became candidates while it was made.
        candidates = [trial for trial in self._candidates() if trial.number in self._posed]
        self._round_widths = {
            trial.number: len(trial.run.devices) for trial in self._trials.values() if trial.run
        }
        self._round_widths.update({n: len(a.devices) for n, a in assignments.items()})
        for trial in candidates:
            assignment = assignments.get(trial.number)
            if trial.run is None:
                trial.waited_rounds += assignment is None
            elif assignment is None or set(assignment.devices) != set(trial.run.devices):
                trial.run.leaving = True
            else:
                continue
            if assignment is not None and self._can_serve(assignment):
                self._pending[trial.number] = assignment
        moves = len(self._pending) + sum(run.leaving for run in self._runs.values())
        return [StartRound(round=self.round, plan=plan, moves=moves)]

    def _can_serve(self, assignment: Assignment) -> bool:
        """All its devices are still there (one may have been lost while the solver worked)."""
        busy = {device for run in self._runs.values() for device in run.devices}
        return (self._idle | busy).issuperset(assignment.devices)
