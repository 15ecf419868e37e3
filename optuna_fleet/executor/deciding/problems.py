"""From the books to an allocation problem: who may be placed, and on what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from statistics import median

from optuna_fleet.alloc.problem import SEVERAL, AllocationProblem, Candidate, Plan
from optuna_fleet.alloc.streams import demand
from optuna_fleet.events import Model
from optuna_fleet.executor.deciding.clearance import Clearance
from optuna_fleet.executor.deciding.profiles import Profiles
from optuna_fleet.executor.deciding.state import Run, Stage, State, Status, Trial


class Problems:
    """Poses problems about the fleet as it is."""

    def __init__(self, state: State, profiles: Profiles, clearance: Clearance) -> None:
        self._state = state
        self._policy = state.policy
        self._devices = state.devices
        self._profiles = profiles
        self._clearance = clearance

    def are_last_to_come(self) -> bool:
        """Whether what is to come goes before who waits, as one of these may train longest.

        Only where plans let trials take turns, and only towards a sweep's end.
        """
        is_few = 0 < self._state.num_to_come <= len(self._devices)
        return is_few and self._policy.paradigm == "elastic"

    def fits_fleet(self, trial: Trial) -> bool:
        """Whether a trial can be launched without that more devices join."""
        assert trial.model is not None
        return not self._state.may_grow or trial.model.min_devices <= self._widest(trial.model)

    def _widest(self, model: Model) -> int:
        """Most devices that a trial can have now: all of one type, unless it spans types."""
        return len(self._devices) if model.spans_types else self._devices.widest

    def is_settled(self, trial: Trial, run: Run) -> bool:
        """Nothing more will be learnt of the run: its rate is known, or it will never move."""
        resumable = trial.model is not None and trial.model.resumable
        return trial.status is Status.FLYING and (run.measured or not resumable)

    def is_movable(self, trial: Trial) -> bool:
        """Whether a plan made now can give the trial other devices, or its first."""
        if trial.run is None:
            return True
        return (
            self._policy.paradigm != "elastic"
            or trial.run.stage is Stage.AT_REST
            or self.moves_within_epoch(trial)
        )

    def moves_within_epoch(self, trial: Trial) -> bool:
        """Whether its run can be told to leave between two batches."""
        is_movable = trial.model is not None and trial.model.movable
        return self._policy.moves_within_epochs and is_movable

    def candidates(self, *, is_first: bool) -> list[Trial]:
        """Trials a plan made now is about.

        Waiting ones and, but for the local paradigm after its first plan, flying ones that may
        leave their devices sooner or later. Not those that an earlier plan is about to move.
        """
        flying = self._policy.paradigm != "local" or is_first
        return [
            trial
            for trial in self._state.trials.values()
            if trial.number not in self._state.pending
            and (
                (trial.status is Status.WAITING and not self.waits(trial))
                or (flying and self.may_leave(trial))
            )
        ]

    def may_leave(self, trial: Trial) -> bool:
        """Whether a plan may move it to other devices, sooner or later."""
        run = trial.run
        return (
            run is not None
            and self.can_leave(trial)
            and self._clearance.may_move(trial)
            and self.is_settled(trial, run)
        )

    def can_leave(self, trial: Trial) -> bool:
        """Whether it could go on elsewhere, if it is told to leave its devices."""
        if trial.run is None or trial.model is None or not trial.model.resumable:
            return False
        if trial.run.stage not in (Stage.TRAINING, Stage.AT_REST):
            return False
        # Else it is about to end, and others may fly already where its ranks were.
        return not trial.run.endings or trial.run.stage is Stage.AT_REST

    def usable(self, candidates: list[Trial]) -> set[int]:
        """Devices that may be given to the candidates: free ones and their own."""
        state = self._state
        runs = (trial.run for trial in candidates if trial.run)
        own = (d for run in runs for d in run.devices if state.run_on.get(d) is run)
        return {*state.free(), *own} - state.leaving

    def build(self, candidates: list[Trial]) -> AllocationProblem:
        """The problem of placing the candidates on the devices they may use."""
        usable, joined = self.usable(candidates), self._state.joined
        kinds, by_place = self._devices.kinds, defaultdict[tuple[int, str], list[int]](list)
        for device in sorted(usable):
            by_place[self._devices[device].node, self._devices[device].kind].append(device)
        # Each node and type is a node of the problem; of those with equal room the first is taken.
        lost_on = {node for trial in candidates if trial.run is None for node in trial.lost_on}
        nodes = dict(sorted(by_place.items(), key=lambda it: (it[0][0] in lost_on, it[0])))
        move_s = median(self._state.moves_s) if self._state.moves_s else self._policy.rescale_s
        problem = AllocationProblem(
            candidates=tuple(self._candidate(t, usable, kinds, move_s) for t in candidates),
            nodes=tuple(map(tuple, nodes.values())),
            kinds=tuple(kind for _, kind in nodes) if len(kinds) > 1 else (),
            rate_spread=self._policy.rate_spread,
            time_limit_s=self._policy.time_limit_s,
            preprocess_samples_per_s=self._policy.preprocess_samples_per_s,
            phases=self._policy.phases,
            finished_epochs=tuple(self._state.finished_epochs),
            bounded_epochs=tuple(self._state.bounded_epochs),
            num_to_come=self._num_to_come(),
            joined={device: joined[device] for device in usable if device in joined},
        )
        measured = self._state.made_per_s
        if measured is None or problem.preprocess_samples_per_s is not None:
            return problem
        return _limited(problem, measured) if self._policy.looks_ahead else problem

    def is_held_back(self, plan: Plan, problem: AllocationProblem) -> bool:
        """Whether trials wait that fly, or for which there are devices, since data are slow.

        If that was not told, but measured, it is forgotten until it is measured anew: mostly
        trials share what is made, so that one more slows nobody.
        """
        told, flying = self._policy.preprocess_samples_per_s, plan.assignments
        if told is not None or problem.preprocess_samples_per_s is None:
            return False
        free = problem.num_devices - sum(len(a.devices) for a in flying.values())
        waiting = [c for c in problem.candidates if c.number not in flying]
        if not any(c.devices or c.min_devices <= free for c in waiting):
            return False
        self._state.made_per_s = None
        return True

    def explained(self, plan: Plan) -> Plan:
        """The plan, which says so if its trials are slowed by preprocessors, as measured."""
        given, drawn = self._state.made_per_s, sum(f.stream_rate for f in plan.flotillas)
        if given is None or drawn <= given or self._policy.preprocess_samples_per_s is not None:
            return plan
        slowed = f"slowed by preprocessors, measured to give {given:.4g} samples/s"
        return replace(plan, reason=f"{plan.reason}; {slowed}")

    def _num_to_come(self) -> int:
        """As many as are to come, but no more than may be under way where these are few."""
        most = self._policy.max_trials
        if most is None or most >= len(self._devices):
            return self._state.num_to_come
        return min(self._state.num_to_come, max(0, most - len(self._state.trials)))

    def _candidate(
        self, trial: Trial, usable: set[int], kinds: tuple[str, ...], move_s: float
    ) -> Candidate:
        model = trial.model
        assert model is not None
        if trial.rescale_s is not None:  # its own: compiled models take their time
            move_s = trial.rescale_s
        least, most = model.min_devices, self._widest(model)
        if not self._state.may_grow:
            least = min(least, most)  # it is launched all the same, to fail and say so
        home = (d for d in trial.previous_devices if d in usable and not self._shuns(trial, d))
        devices = trial.run.devices if trial.run else tuple(home)
        width = min(trial.most_devices, max(least, most))
        if not self._clearance.may_widen(trial):
            width = 1
        rates = {kind: self._profiles.rates(model.structure, width, kind) for kind in kinds}
        if model.spans_types and len(kinds) > 1:
            rates[SEVERAL] = self._profiles.rates(model.structure, width, SEVERAL)
        there = usable.intersection(devices)
        kind = self._devices.kind_of_all(there or devices) if devices else ""
        if kind not in rates:  # on no device, or on those of a node that is gone
            kind = max(kinds, key=lambda kind: rates[kind][0])
        return Candidate(
            number=trial.number,
            rates=rates[kind],
            rates_by_kind=rates if len(kinds) > 1 else {},
            devices=devices,
            min_devices=min(least, width),
            waited_rounds=trial.waited_rounds,
            epochs_done=trial.epochs_done,
            predicted_epochs=trial.predicted_epochs,
            **model.facts(),
            movable=self.is_movable(trial),
            is_within_epoch=trial.run is not None and not trial.run.is_between_epochs,
            rescale_up_s=move_s if model.rescale_up_s is None else model.rescale_up_s,
            rescale_down_s=move_s if model.rescale_down_s is None else model.rescale_down_s,
        )

    # -- where a trial is not started again -------------------------------------------------------

    # Not on nodes that it was lost on, while others have room: so a bad node shows itself by
    # different trials, and costs none of them all of its restarts.

    def _shuns(self, trial: Trial, device: int) -> bool:
        return self._devices[device].node in trial.lost_on

    def waits(self, trial: Trial) -> bool:
        """Whether it is started, on one device, only on a node that it was not lost on.

        If there is any, for the last time that it may lose its devices.
        """
        if not trial.losses or len(trial.losses) < self._policy.max_restarts:
            return False
        if trial.model is not None and not trial.fits_one_device:
            return False
        return any(not self._shuns(trial, device) for device in self._devices)

    def first_for(self, trial: Trial, free: Collection[int]) -> int | None:
        """The first free device on a node that it was not lost on; else on any, or none."""
        device = min(free, key=lambda device: self._shuns(trial, device), default=None)
        if device is None or (self._shuns(trial, device) and self.waits(trial)):
            return None
        return device


def _limited(problem: AllocationProblem, measured: float) -> AllocationProblem:
    """Plans may not draw more than was measured, if anything in them does so by growing.

    A figure that was measured may be too low: all can keep what they have, and whoever waits have
    as few devices as possible.
    """
    limited = replace(problem, preprocess_samples_per_s=measured)
    rates = {c.number: c.rate(_least(problem, c)) for c in problem.candidates}
    limit = max(measured, demand(limited, rates))
    if limit >= sum(max(c.rates) for c in problem.candidates):
        return problem
    return replace(problem, preprocess_samples_per_s=limit)


def _least(problem: AllocationProblem, candidate: Candidate) -> int:
    """Devices that it has, or has to have."""
    pinned = problem.pinned.get(candidate.number)
    return pinned or problem.kept_width(candidate) or candidate.min_devices
