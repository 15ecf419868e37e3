"""What a call adds up to, for its `FleetSummary`."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping

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
from optuna_fleet.executor.call.summary import Decision, FleetSummary, Solved, mean_of
from optuna_fleet.pipeline.stats import PipelineStats
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.sampler_bridge.records import Flight


class Tally:
    """Adds up what happens: a reader of the journal.

    Args:
        began: When the call did, in seconds since the epoch.
    """

    def __init__(self, began: float) -> None:
        self._began = began
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
        """A plan is carried out: say so where anything moves."""
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
