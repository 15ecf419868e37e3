"""From the books to an allocation problem: who may be placed, and on what."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median

from optuna_fleet.alloc.problem import AllocationProblem, Candidate
from optuna_fleet.events import Model
from optuna_fleet.executor.profiles import Profiles
from optuna_fleet.executor.roster import Roster
from optuna_fleet.executor.trials import Policy, Run, Stage, Status, Trial
from optuna_fleet.resources import Fleet

Rates = tuple[float, ...]
"""(r(1), r(2), ...) in samples/s."""


class ProblemBuilder:
    """Poses problems about one fleet under one policy.

    Attributes:
        moves_s: What each move so far was measured to cost, in seconds.
    """

    def __init__(self, fleet: Fleet, policy: Policy, profiles: Profiles) -> None:
        self._policy = policy
        self._profiles = profiles
        self.moves_s: list[float] = []
        # The devices of one node and type are a node of the problem.
        self._places = sorted({(d.node, d.kind) for d in fleet.devices})
        rank = {place: n for n, place in enumerate(self._places)}
        self._place_of = {d.index: rank[d.node, d.kind] for d in fleet.devices}
        self._kind_of = {d.index: d.kind for d in fleet.devices}  # without those left out

    def leave_out(self, device: int) -> bool:
        """A device will not come back; return whether that is news."""
        return self._kind_of.pop(device, None) is not None

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
            or self._policy.moves_within_epochs
        )

    def candidates(self, roster: Roster, *, is_first: bool) -> list[Trial]:
        """Trials a plan made now is about.

        Waiting ones and, but for the local paradigm after its first plan, flying ones that may
        leave their devices sooner or later. Not those that an earlier plan is about to move.
        """
        flying = self._policy.paradigm != "local" or is_first
        return [
            trial
            for trial in roster.trials.values()
            if trial.number not in roster.pending
            and (trial.status is Status.WAITING or (flying and self.may_leave(trial)))
        ]

    def may_leave(self, trial: Trial) -> bool:
        """Whether a plan may move it to other devices, sooner or later."""
        if trial.run is None or trial.model is None or not trial.model.resumable:
            return False
        if trial.run.stage not in (Stage.TRAINING, Stage.AT_REST):
            return False
        if trial.run.endings and trial.run.stage is not Stage.AT_REST:
            return False  # it is about to end, and others may fly already where its ranks were
        return self.is_settled(trial, trial.run)

    def usable(self, roster: Roster, candidates: list[Trial]) -> set[int]:
        """Devices that may be given to the candidates: free ones and their own."""
        runs = (trial.run for trial in candidates if trial.run)
        own = (d for run in runs for d in run.devices if roster.run_on(d) is run)
        return {*roster.free(), *own}

    def build(
        self,
        candidates: list[Trial],
        roster: Roster,
        *,
        joined: dict[int, int],
        finished_epochs: tuple[int, ...],
        bounded_epochs: tuple[int, ...],
        num_to_come: int,
    ) -> AllocationProblem:
        """The problem of placing the candidates on the devices they may use."""
        usable = self.usable(roster, candidates)
        nodes, most = self._nodes(usable), self._most_devices()
        return AllocationProblem(
            candidates=tuple(self._candidate(trial, usable, most) for trial in candidates),
            nodes=tuple(map(tuple, nodes.values())),
            kinds=tuple(self._places[n][1] for n in nodes) if self._profiles.kinds else (),
            rate_spread=self._policy.rate_spread,
            time_limit_s=self._policy.solver_time_limit_s,
            preprocess_samples_per_s=self._policy.preprocess_samples_per_s,
            phases=self._policy.phases,
            finished_epochs=finished_epochs,
            bounded_epochs=bounded_epochs,
            num_to_come=num_to_come,
            joined={device: joined[device] for device in usable if device in joined},
        )

    def _candidate(self, trial: Trial, usable: set[int], most: int) -> Candidate:
        model = trial.model
        assert model is not None
        home = tuple(d for d in trial.previous_devices if d in usable)
        devices = trial.run.devices if trial.run else home
        rates, rates_by_kind = self._rates(model, devices, trial.most_devices)
        return Candidate(
            number=trial.number,
            rates=rates,
            rates_by_kind=rates_by_kind,
            devices=devices,
            # One that needs more than there are is launched all the same, to fail and say so.
            min_devices=min(model.min_devices, len(rates), most),
            waited_rounds=trial.waited_rounds,
            epochs_done=trial.epochs_done,
            predicted_epochs=trial.predicted_epochs,
            max_epochs=model.max_epochs,
            samples_per_epoch=model.samples_per_epoch,
            movable=self.is_movable(trial),
            rescale_up_s=self._cost_s(trial, model.rescale_up_s),
            rescale_down_s=self._cost_s(trial, model.rescale_down_s),
        )

    def _most_devices(self) -> int:
        return max(Counter(self._kind_of.values()).values(), default=1)

    def _rates(
        self, model: Model, devices: tuple[int, ...], most: int
    ) -> tuple[Rates, dict[str, Rates]]:
        """Rates on the type of these devices, on the fastest if there are none, and on each."""
        kinds = self._profiles.kinds
        if not kinds:
            return self._profiles.rates(model.structure, most), {}
        rates = {k: self._profiles.rates(model.structure, most, k) for k in kinds}
        fastest = max(kinds, key=lambda k: rates[k][0])
        kind = self._places[self._place_of[devices[0]]][1] if devices else fastest
        return rates[kind], rates

    def _cost_s(self, trial: Trial, of_model: float | None) -> float:
        if of_model is not None:
            return of_model
        if trial.rescale_s is not None:  # its own: compiled models take their time
            return trial.rescale_s
        return median(self.moves_s) if self.moves_s else self._policy.rescale_s

    def _nodes(self, usable: set[int]) -> dict[int, list[int]]:
        """Devices by the rank of their node and type, in ascending order."""
        nodes: dict[int, list[int]] = defaultdict(list)
        for device in sorted(usable):
            nodes[self._place_of[device]].append(device)
        return dict(sorted(nodes.items()))
