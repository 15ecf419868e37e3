"""A study at one moment: what of it is worth watching, read from what it has stored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet.sampler_bridge.call_records import CallState, RunState, calls_of
from optuna_fleet.sampler_bridge.records import device_spans_of, flights_of
from optuna_fleet.visualization.live.forecast import UnderWay, expected_end

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
class Device:
    """A device that is there."""

    node: str
    number: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A trial on its devices; None is what is not known, `value` what it reported last."""

    number: int
    devices: tuple[Device, ...]
    for_s: float
    epochs_done: int
    max_epochs: int | None
    epoch_s: float | None
    samples_per_s: float | None
    value: float | None
    params: Mapping[str, Any]

    @property
    def left_s(self) -> float | None:
        """Seconds that its other epochs take; None if that is not known."""
        if self.max_epochs is None or self.epoch_s is None:
            return None
        return self.epoch_s * max(0, self.max_epochs - self.epochs_done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What is shown of a study.

    Attributes:
        study_name: Its name.
        time: When it was looked at, seconds since the epoch.
        condition: How the sweep is.
        began: When its last call began; None if there was none.
        noted: When the driver has last written how it goes.
        states: Number of trials by their state.
        best: The best trial; of several objectives, all that no other is better than.
        devices: Those that are there.
        runs: Who is on them, by trial.
        waiting: Trials that were asked for and have no devices now.
        elsewhere: RUNNING trials of no call that is known to run: another process has them, or a
            dead one had.
        num_to_come: Trials that are still to be asked for; None where nobody says.
        expected_end: When all will be done; None where nothing tells.
        recent: The trials that ended last, the newest first.
        widths: On how many devices each trial was, one after the other; by number.
    """

    study_name: str
    time: float
    condition: Condition
    began: float | None = None
    noted: float | None = None
    states: Mapping[TrialState, int]
    best: tuple[FrozenTrial, ...] = ()
    devices: tuple[Device, ...] = ()
    runs: tuple[Run, ...] = ()
    waiting: tuple[int, ...] = ()
    elsewhere: tuple[int, ...] = ()
    num_to_come: int | None = None
    expected_end: float | None = None
    recent: tuple[FrozenTrial, ...] = ()
    widths: Mapping[int, tuple[int, ...]]

    @property
    def idle(self) -> tuple[Device, ...]:
        """Devices without a trial."""
        busy = {device for run in self.runs for device in run.devices}
        return tuple(device for device in self.devices if device not in busy)


def snapshot_of(study: optuna.Study, now: float) -> Snapshot:
    """The study as it is now; nothing is written."""
    trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
    flights = flights_of(study)
    calls = _current(calls_of(study), now)
    running = {n for n, trial in trials.items() if trial.state is TrialState.RUNNING}
    there = {call.began: _devices_there(study, call) for call in calls}
    runs = [
        _run(state, trials[state.trial], there[call.began], _known_until(call, now))
        for call in calls
        for state in call.runs
        if state.trial in running
    ]
    waiting = {n for call in calls for n in call.waiting if n in running}
    noted = max((call.noted for call in calls), default=None)
    new = {n for n in running if noted is not None and _started(trials[n]) > noted}
    snapshot = Snapshot(
        study_name=study.study_name,
        time=now,
        condition=_condition(trials, flights, calls, now),
        began=min((call.began for call in calls), default=None),
        noted=noted,
        states=Counter(trial.state for trial in trials.values()),
        best=tuple(_best(study)),
        devices=tuple(device for known in there.values() for device in known.values()),
        runs=tuple(sorted(runs, key=lambda run: run.number)),
        waiting=tuple(sorted(waiting)),
        elsewhere=tuple(sorted(running - waiting - {run.number for run in runs} - new)),
        num_to_come=_num_to_come(calls),
        recent=tuple(_last_ended(trials.values())),
        widths={n: tuple(len(r["devices"]) for r in records) for n, records in flights.items()},
    )
    if snapshot.condition is not Condition.RUNNING:
        return snapshot
    spent = {n: _device_s(records) for n, records in flights.items()}
    ended = [n for n, trial in trials.items() if trial.state.is_finished()]
    return replace(snapshot, expected_end=_expected_end(snapshot, calls, spent, ended))


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


def _condition(
    trials: Mapping[int, FrozenTrial],
    flights: Mapping[int, Any],
    calls: Sequence[CallState],
    now: float,
) -> Condition:
    endings = {"done": Condition.DONE, "interrupted": Condition.INTERRUPTED}
    if calls:
        call = calls[-1]
        if call.ending:
            return endings.get(call.ending, Condition.FAILED)
        return Condition.RUNNING if _is_alive(call, now) else Condition.SILENT
    if flights:  # of a version that did not record calls
        return Condition.DONE
    return Condition.NOT_A_FLEETS if trials else Condition.EMPTY


def _devices_there(study: optuna.Study, call: CallState) -> dict[int, Device]:
    """By number, in order; none once the call is over."""
    if call.ending:
        return {}
    spans = sorted(device_spans_of(study, call.began), key=lambda span: (span.node, span.device))
    return {
        span.device: Device(node=span.node, number=span.device, kind=span.kind)
        for span in spans
        if span.end is None
    }


def _run(state: RunState, trial: FrozenTrial, there: Mapping[int, Device], until: float) -> Run:
    nowhere = (Device(node="", number=n, kind="") for n in state.devices if n not in there)
    values = trial.intermediate_values
    return Run(
        number=state.trial,
        devices=(*(there[n] for n in state.devices if n in there), *nowhere),
        for_s=max(0.0, until - state.start),
        epochs_done=state.epochs_done,
        max_epochs=state.max_epochs,
        epoch_s=state.epoch_s,
        samples_per_s=state.samples_per_s,
        value=values[max(values)] if values else None,
        params=trial.params,
    )


def _best(study: optuna.Study) -> list[FrozenTrial]:
    """The best trials; none where no trial is complete, or none is feasible."""
    try:
        return study.best_trials if len(study.directions) > 1 else [study.best_trial]
    except ValueError:
        return []


def _last_ended(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    ended = [(t.datetime_complete, t.number, t) for t in trials if t.datetime_complete is not None]
    return [trial for *_, trial in sorted(ended, reverse=True)[:_NUM_RECENT]]


def _num_to_come(calls: Sequence[CallState]) -> int | None:
    """Only calls that still run will ask for more."""
    going = [call for call in calls if not call.ending]
    to_come = [max(0, call.n_trials - call.num_asked) for call in going if call.n_trials]
    return sum(to_come) if len(to_come) == len(going) else None


def _device_s(records: Iterable[Mapping[str, Any]]) -> float:
    stays = ((record["end"] - record["start"], len(record["devices"])) for record in records)
    return math.fsum(seconds * width for seconds, width in stays)


def _expected_end(
    snapshot: Snapshot,
    calls: Sequence[CallState],
    spent: Mapping[int, float],
    ended: Iterable[int],
) -> float | None:
    deadlines = [call.began + call.timeout for call in calls if call.timeout is not None]
    under_way = [UnderWay(spent_s=spent.get(n, 0.0), num_devices=1) for n in snapshot.waiting]
    for run in snapshot.runs:
        width, left_s = len(run.devices), run.left_s
        under_way.append(
            UnderWay(
                spent_s=spent.get(run.number, 0.0) + run.for_s * width,
                num_devices=width,
                left_s=None if left_s is None else left_s * width,
            )
        )
    return expected_end(
        snapshot.time,
        ended=[spent[n] for n in ended if n in spent],
        under_way=under_way,
        num_to_come=snapshot.num_to_come,
        num_devices=len(snapshot.devices),
        deadline=max(deadlines) if len(deadlines) == len(calls) else None,
    )
