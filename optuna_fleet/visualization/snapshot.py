"""A study at one moment: what of it is worth watching, read from what it has stored."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import optuna
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet.sampler_bridge.records import (
    CallState,
    DeviceSpan,
    RunState,
    calls_of,
    device_spans_of,
    flights_of,
)

_NUM_RECENT = 8
_LEAST_SILENCE_S = 30.0
_MISSED = 4
"""A driver that has missed so many signs of life is taken to be gone."""


class Condition(Enum):
    """How the sweep is; the value is for people."""

    EMPTY = "no trials yet"
    NOT_A_FLEETS = "no trial ran on a fleet"
    RUNNING = "running"
    SILENT = "no sign of life"
    DONE = "done"
    INTERRUPTED = "interrupted"
    FAILED = "ended with an error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A trial on its devices for some time, as far as its driver has told."""

    state: RunState
    trial: FrozenTrial
    devices: tuple[DeviceSpan, ...]
    for_s: float

    @property
    def value(self) -> float | None:
        """What the trial reported last."""
        values = self.trial.intermediate_values
        return values[max(values)] if values else None

    @property
    def left_s(self) -> float:
        """Seconds that its other epochs take; infinity if that is not known."""
        if self.state.max_epochs is None or self.state.epoch_s is None:
            return math.inf
        return self.state.epoch_s * max(0, self.state.max_epochs - self.state.epochs_done)


def expected_end(
    now: float,
    *,
    ended: Sequence[float],
    under_way: Sequence[tuple[float, float, int]],
    num_to_come: int | None,
    num_devices: int,
    deadline: float | None = None,
) -> float | None:
    """When all trials will be done, if each takes as long as the mean; None where nothing tells.

    Who has taken longer by now goes on to its last epoch; and nobody is widened.

    Args:
        now: In any seconds.
        ended: Device seconds that each trial took that has ended, be it pruned.
        under_way: Of each trial that has not, the device seconds that it has had, and those that
            its other epochs take: infinity if that is not known; and how many devices it is on.
        num_to_come: Further trials; None for as many as there is time for.
        num_devices: Devices that are there.
        deadline: When no further trial is begun, in the same seconds; None if nobody says.
    """
    known = [*ended] or [spent_s + most_s for spent_s, most_s, _ in under_way if most_s < math.inf]
    if not known or not num_devices:
        return None
    mean_s = statistics.mean(known)
    work_s = last_s = 0.0
    for spent_s, most_s, width in under_way:
        left_s = min(mean_s - spent_s if spent_s < mean_s else math.inf, most_s)
        if left_s < math.inf:
            work_s += left_s
            last_s = max(last_s, left_s / width)
    ends = []
    if num_to_come is not None:
        ends.append(now + max((work_s + num_to_come * mean_s) / num_devices, last_s))
    if deadline is not None:  # who was begun before it is not cut short
        ends.append(max(now + max(work_s / num_devices, last_s), deadline))
    return min(ends, default=None)


class Snapshot:
    """What is shown of a study; nothing is written.

    Args:
        study: The study.
        now: Seconds since the epoch.

    Attributes:
        study_name: Its name.
        time: When it was looked at.
        trials: All of them, by number.
        best: The best trial; of several objectives, all that no other is better than.
        widths: On how many devices each trial was, one after the other; by number.
        condition: How the sweep is.
        runs: Who is on devices, by trial.
        devices: Those that are there.
        waiting: Trials that were asked for and have no devices now.
        elsewhere: RUNNING trials of no call that is known to run: another process has them, or a
            dead one had.
    """

    def __init__(self, study: optuna.Study, now: float) -> None:
        self.study_name, self.time = study.study_name, now
        self.trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
        self._flights = flights_of(study)
        self._calls = _current(calls_of(study), now)
        self.best = _best(study)
        self.condition = self._condition()
        running = {n for n, t in self.trials.items() if t.state is TrialState.RUNNING}
        there = {call.began: _devices_there(study, call) for call in self._calls}
        runs = [
            _run(state, self.trials[state.trial], there[call.began], _known_until(call, now))
            for call in self._calls
            for state in call.runs
            if state.trial in running
        ]
        self.runs = sorted(runs, key=lambda run: run.state.trial)
        self.devices = [device for known in there.values() for device in known.values()]
        self.waiting = {n for call in self._calls for n in call.waiting if n in running}
        new = {n for n in running if self.noted and _started(self.trials[n]) > self.noted}
        self.elsewhere = running - self.waiting - {run.state.trial for run in runs} - new

    @property
    def began(self) -> float | None:
        """When its last call began; None if there was none."""
        return min((call.began for call in self._calls), default=None)

    @property
    def noted(self) -> float | None:
        """When the driver has last written how it goes; None if it never did."""
        return max((call.noted for call in self._calls), default=None)

    @property
    def idle(self) -> list[DeviceSpan]:
        """Devices without a trial."""
        busy = {device for run in self.runs for device in run.devices}
        return [device for device in self.devices if device not in busy]

    @property
    def num_to_come(self) -> int | None:
        """Trials that are still to be asked for; None where nobody says."""
        going = [call for call in self._calls if not call.ending]
        to_come = [max(0, call.n_trials - call.num_asked) for call in going if call.n_trials]
        return sum(to_come) if len(to_come) == len(going) else None

    @property
    def recent(self) -> list[FrozenTrial]:
        """The trials that ended last, the newest first."""
        ended = [(t.datetime_complete, n) for n, t in self.trials.items() if t.datetime_complete]
        return [self.trials[n] for _, n in sorted(ended, reverse=True)[:_NUM_RECENT]]

    def widths(self, number: int) -> list[int]:
        """On how many devices a trial was, one after the other."""
        return [len(flight["devices"]) for flight in self._flights.get(number, ())]

    @property
    def expected_end(self) -> float | None:
        """When all will be done; None where nothing tells."""
        if self.condition is not Condition.RUNNING:
            return None
        deadlines = [c.began + c.timeout for c in self._calls if c.timeout is not None]
        under_way = [(self._spent_s(n), math.inf, 1) for n in self.waiting]
        for run in self.runs:
            width = len(run.devices)
            spent_s = self._spent_s(run.state.trial) + run.for_s * width
            under_way.append((spent_s, run.left_s * width, width))
        ended = [n for n, t in self.trials.items() if t.state.is_finished() and n in self._flights]
        return expected_end(
            self.time,
            ended=[self._spent_s(n) for n in ended],
            under_way=under_way,
            num_to_come=self.num_to_come,
            num_devices=len(self.devices),
            deadline=max(deadlines) if len(deadlines) == len(self._calls) else None,
        )

    def _spent_s(self, number: int) -> float:
        """Device seconds of its flights."""
        flights = self._flights.get(number, ())
        return math.fsum((f["end"] - f["start"]) * len(f["devices"]) for f in flights)

    def _condition(self) -> Condition:
        endings = {"done": Condition.DONE, "interrupted": Condition.INTERRUPTED}
        if self._calls:
            call = self._calls[-1]
            if call.ending:
                return endings.get(call.ending, Condition.FAILED)
            return Condition.RUNNING if _is_alive(call, self.time) else Condition.SILENT
        if self._flights:  # of a version that did not record calls
            return Condition.DONE
        return Condition.NOT_A_FLEETS if self.trials else Condition.EMPTY


def _known_until(call: CallState, now: float) -> float:
    return now if _is_alive(call, now) else call.noted


def _started(trial: FrozenTrial) -> float:
    return 0.0 if trial.datetime_start is None else trial.datetime_start.timestamp()


def _is_alive(call: CallState, now: float) -> bool:
    """Whether its driver has given signs of life; its clock may be another one's."""
    return not call.ending and now - call.noted < max(_LEAST_SILENCE_S, _MISSED * call.every_s)


def _current(calls: Sequence[CallState], now: float) -> list[CallState]:
    """Those that run, of several drivers as it may be; or else the last."""
    return [call for call in calls if _is_alive(call, now)] or [*calls[-1:]]


def _devices_there(study: optuna.Study, call: CallState) -> dict[int, DeviceSpan]:
    """By number, in order; none once the call is over."""
    if call.ending:
        return {}
    spans = sorted(device_spans_of(study, call.began), key=lambda span: (span.node, span.device))
    return {span.device: span for span in spans if span.end is None}


def _run(state: RunState, trial: FrozenTrial, there: dict[int, DeviceSpan], until: float) -> Run:
    known = [there[n] for n in state.devices if n in there]
    nowhere = [
        DeviceSpan(device=n, node="", kind="", start=state.start)
        for n in state.devices
        if n not in there
    ]
    for_s = max(0.0, until - state.start)
    return Run(state=state, trial=trial, devices=(*known, *nowhere), for_s=for_s)


def _best(study: optuna.Study) -> list[FrozenTrial]:
    """The best trials; none where no trial is complete, or none is feasible."""
    try:
        return study.best_trials if len(study.directions) > 1 else [study.best_trial]
    except ValueError:
        return []
