"""What a call adds up to, for its `FleetSummary`."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping

from optuna_fleet.events import (
    Ending,
    FinishTrial,
    GiveUp,
    Launch,
    MoveMeasured,
    PlanDecided,
    RankEnded,
    Requeue,
    ReturnToQueue,
    StartRound,
)
from optuna_fleet.executor.call.device_log import DeviceLog
from optuna_fleet.executor.call.journal import Entry, Stay
from optuna_fleet.executor.call.summary import FleetSummary, Solved, mean_of
from optuna_fleet.pipeline.stats import PipelineStats
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.sampler_bridge.records import Decision
from optuna_fleet.wire.messages import Ended


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
        self._busy_s: dict[int, float] = defaultdict(float)
        self._waited_s: dict[int, float] = defaultdict(float)
        self._probing_s = self._profiling_s = 0.0
        self._decisions: list[Decision] = []
        self._plans: list[Solved] = []
        self._endings: dict[int, set[Ending]] = defaultdict(set)  # by run id
        self._num_given_back = self._rescales = 0
        self._moves_s: list[float] = []

    def take(self, entry: Entry, stay: Stay | None, now: float) -> None:
        """See `Reader`."""
        match entry:
            case Launch() if self._startup_s is None:
                self._startup_s = now - self._began
            case Ended() if stay is not None:
                self._add_stay(entry, stay, now)
            case RankEnded():
                self._endings[entry.run_id].add(entry.ending)
            case Requeue():
                self._rescales += self._endings.pop(entry.run_id, None) == {Ending.YIELDED}
            case FinishTrial() | GiveUp():
                self._endings.pop(entry.run_id, None)
            case ReturnToQueue():
                self._num_given_back += 1
            case MoveMeasured():
                self._moves_s.append(entry.seconds)
            case PlanDecided():
                self._plans.append(Solved.of(entry.plan))
            case StartRound():
                self._decided(entry, now)

    def _add_stay(self, ended: Ended, stay: Stay, now: float) -> None:
        usage = ended.usage
        self._busy_s[ended.device] += now - stay.start
        self._waited_s[ended.device] += usage.data_wait_s
        self._probing_s += usage.probing_s if stay.launch.probe else 0.0
        self._profiling_s += usage.profiling_s

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
        given_back = {"given back": self._num_given_back} if self._num_given_back else {}
        return FleetSummary(
            trials=dict(trials) | given_back,
            num_devices=len(there_s),
            num_nodes=len({span.node for span in devices.spans}),
            there_s=there_s,
            duration_s=now - self._began,
            busy_s=dict(self._busy_s),
            waited_s=dict(self._waited_s),
            probing_s=self._probing_s,
            profiling_s=self._profiling_s,
            decisions=tuple(self._decisions),
            plans=tuple(self._plans),
            rescales=self._rescales,
            move_s=mean_of(self._moves_s),
            pipeline=pipeline,
            exchange=exchange,
            left_out=dict(left_out),
            startup_s=self._startup_s or 0.0,
        )
