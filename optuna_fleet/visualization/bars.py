"""What a timeline shows: a study's flights as bars, one per flight and device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet.arguments import check_that, is_a
from optuna_fleet.events import Ending
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.sampler_bridge.records import flights_of
from optuna_fleet.visualization.rows import Row, node_of


class Mark(Enum):
    """What is worth seeing at the end of a flight; the value is the legend's text."""

    PRUNED = "pruned"
    FAILED = "failed"
    MOVED = "checkpointed to move"
    LOST = "devices lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One device during one flight of a trial.

    Times are in seconds since the first flight of the study. `devices` are all of the flight;
    `probing_s` and `data_wait_s` are summed over them. `node` is "" where there is only one, and
    `flight` counts those of the trial from 1.
    """

    number: int
    state: TrialState = TrialState.COMPLETE
    values: tuple[float, ...] = ()
    params: tuple[tuple[str, Any], ...] = ()
    device: int
    node: str = ""
    devices: tuple[int, ...]
    start_s: float
    end_s: float
    round: int
    flight: int
    num_flights: int
    ending: str
    probing_s: float = 0.0
    data_wait_s: float = 0.0

    @property
    def row(self) -> Row:
        """Where it is drawn."""
        return Row(node=self.node, device=self.device)

    @property
    def mark(self) -> Mark | None:
        """How the end of the bar is marked; the end of a trial outranks the end of a flight."""
        by_state = {TrialState.PRUNED: Mark.PRUNED, TrialState.FAIL: Mark.FAILED}
        by_ending = {Ending.YIELDED.value: Mark.MOVED, Ending.LOST.value: Mark.LOST}
        is_last = self.flight == self.num_flights
        return (by_state.get(self.state) if is_last else None) or by_ending.get(self.ending)


def bars_of(study: optuna.Study) -> list[Bar]:
    """All flights of the study's trials, by start, trial and device; warns if there are none."""
    check_that("study", study, is_a(optuna.Study), "be a study, as of optuna.load_study()")
    zero = first_start(study)
    flights, nodes = flights_of(study), node_of(study)
    bars = [
        bar
        for trial in study.get_trials(deepcopy=False)
        for bar in _bars_of_trial(trial, flights.get(trial.number, ()), zero, nodes)
    ]
    if not bars:
        fleet_logger.warning("Your study does not have any flights: no trial ran on a fleet.")
    return sorted(bars, key=lambda b: (b.start_s, b.number, b.device))


def first_start(study: optuna.Study) -> float:
    """When the first flight started, in seconds since the epoch; 0 without any."""
    return min((flights[0]["start"] for flights in flights_of(study).values()), default=0.0)


def numbers_of(bars: Sequence[Bar]) -> list[int]:
    """The numbers of the bars' trials."""
    return sorted({b.number for b in bars})


def duration_s(bars: Sequence[Bar]) -> float:
    """Time from the first start to the last end; never 0."""
    return max((b.end_s for b in bars), default=0.0) or 1.0


def round_starts(bars: Sequence[Bar]) -> list[float]:
    """When the round of newly started flights increases, in seconds since the first flight.

    Each call of `optimize` counts its rounds anew; it begins after all earlier flights ended.
    """
    starts: list[float] = []
    current, last_end_s = bars[0].round if bars else 0, 0.0
    for bar in bars:
        if bar.round > current:
            starts.append(bar.start_s)
        is_new_call = bar.round < current and bar.start_s >= last_end_s
        current = bar.round if is_new_call else max(current, bar.round)
        last_end_s = max(last_end_s, bar.end_s)
    return starts


def _bars_of_trial(
    trial: FrozenTrial,
    records: Sequence[Mapping[str, Any]],
    zero: float,
    node_at: Callable[[str, int, float], str],
) -> Iterator[Bar]:
    for flight, record in enumerate(records, start=1):
        for device in record["devices"]:
            yield Bar(
                number=trial.number,
                state=trial.state,
                values=tuple(trial.values or ()),
                params=tuple(trial.params.items()),
                device=device,
                node=node_at(record["call"], device, record["start"]),
                devices=tuple(record["devices"]),
                start_s=record["start"] - zero,
                end_s=max(record["start"], record["end"]) - zero,  # a clock may be set back
                round=record["round"],
                flight=flight,
                num_flights=len(records),
                ending=record["ending"],
                probing_s=record["probing_s"],
                data_wait_s=record["data_wait_s"],
            )
