"""What a call adds up to, for its `FleetSummary`."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping

from optuna_fleet.events import (
    Ending,
    Launch,
    MoveMeasured,
    PlanDecided,
    Requeue,
    ReturnToQueue,
    StartRound,
)
from optuna_fleet.executor.call.journal import DeviceLog, Entry
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.executor.call.summary import FleetSummary, Solved, mean_of
from optuna_fleet.pipeline.stats import PipelineStats
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.sampler_bridge.records import Decision, Flight, PipelineSpan

MIN_SPAN_S = 2.0
"""No span is shorter, except the last."""

RESOLUTION = 64
"""A span takes at least this part of the time since the call began: a sweep of any length has
little more than as many of them (630 for 100 hours)."""


class Tally:
    """Adds up what happens: a reader of the journal.

    Args:
        began: When the call did, in seconds since the epoch.
        record: Keeps a decision with the study.
    """

    def __init__(self, began: float, record: Callable[[Decision], None]) -> None:
        self._began = began
        self._record = record
        self._startup_s: float | None = None
        self._flights: list[Flight] = []
        self._decisions: list[Decision] = []
        self._plans: list[Solved] = []
        self._num_given_back = self._rescales = 0
        self._moves_s: list[float] = []

    def take(self, entry: Entry, run: RunRecord | None, now: float) -> None:
        """See `Reader`."""
        match entry:
            case Launch() if self._startup_s is None:
                self._startup_s = now - self._began
            case Requeue() if run is not None:
                self._rescales += {ended.ending for ended in run.ended} == {Ending.YIELDED}
            case ReturnToQueue():
                self._num_given_back += 1
            case MoveMeasured():
                self._moves_s.append(entry.seconds)
            case PlanDecided():
                self._plans.append(Solved.of(entry.plan))
            case StartRound():
                self._decided(entry, now)

    def landed(self, flight: Flight) -> None:
        """A run has ended on all its devices."""
        self._flights.append(flight)

    def _decided(self, started: StartRound, now: float) -> None:
        """A plan is carried out: record it, and say so where anything moves."""
        plan = started.plan
        decision = Decision(
            time=now,
            round=started.round,
            moves=started.moves,
            allocator=plan.allocator,
            reason=plan.reason,
            status=plan.status,
            gap=plan.gap,
            solve_time_s=plan.solve_time_s,
            solver=plan.solver,
        )
        self._decisions.append(decision)
        self._record(decision)
        level = logging.INFO if started.moves or started.round == 1 else logging.DEBUG
        fleet_logger.log(level, f"Round {decision.round}: {decision.reason}")

    def summary(
        self,
        devices: DeviceLog,
        now: float,
        *,
        trials: Mapping[str, int],
        left_out: Mapping[str, str],
        pipeline: PipelineStats | None = None,
        exchange: str = "",
    ) -> FleetSummary:
        """The summary of everything up to now."""
        there_s = devices.there_s(now)
        busy_s, waited_s = defaultdict[int, float](float), defaultdict[int, float](float)
        for flight in self._flights:
            for device in flight.devices:
                busy_s[device] += flight.end - flight.start
                waited_s[device] += flight.data_wait_s / len(flight.devices)
        given_back = {"given back": self._num_given_back} if self._num_given_back else {}
        return FleetSummary(
            trials=dict(trials) | given_back,
            num_devices=len(there_s),
            num_nodes=len({span.node for span in devices.spans}),
            there_s=there_s,
            duration_s=now - self._began,
            busy_s=dict(busy_s),
            waited_s=dict(waited_s),
            probing_s=sum(flight.probing_s for flight in self._flights),
            profiling_s=sum(flight.profiling_s for flight in self._flights),
            decisions=tuple(self._decisions),
            plans=tuple(self._plans),
            rescales=self._rescales,
            move_s=mean_of(self._moves_s),
            pipeline=pipeline,
            exchange=exchange,
            left_out=dict(left_out),
            startup_s=self._startup_s or 0.0,
        )


class PipelineLog:
    """Turns what the shared pipeline has done since the start of the fleet into spans. Pure.

    Args:
        base: What had been done when the call began.
        began: When that was, in seconds since the epoch.
    """

    def __init__(
        self, record: Callable[[PipelineSpan], None], base: PipelineStats, began: float
    ) -> None:
        self._record = record
        self._base = self._last = base
        self._began = self._noted = began

    def note(self, stats: PipelineStats, now: float) -> None:
        """So much was done by now; that ends a span if enough time has passed."""
        if now - self._noted >= max(MIN_SPAN_S, (now - self._began) / RESOLUTION):
            self._end_span(stats, now)

    def finish(self, stats: PipelineStats, now: float) -> PipelineStats:
        """The call is over; returns what the pipeline did for it."""
        self._end_span(stats, now)
        return stats.since(self._base)

    def _end_span(self, stats: PipelineStats, now: float) -> None:
        use = stats.use.since(self._last.use)
        start, self._noted, self._last = self._noted, now, stats
        if use.active_s <= 0.0:
            return  # nobody read
        self._record(
            PipelineSpan(
                start=round(start, 3),
                end=round(now, 3),
                num_preprocessors=round(use.num_preprocessors, 2),
                busy=round(use.busy_share, 3),
                blocked=round(use.blocked_share, 3),
                stalled=round(use.stalled_share, 3),
                queue=0.0,
            )
        )
