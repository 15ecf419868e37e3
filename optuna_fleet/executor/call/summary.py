"""What a sweep did, in numbers: the summary at the end."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from optuna_fleet.alloc import Plan
from optuna_fleet.pipeline.pipeline_messages import PipelineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Plan):
    """A plan that was carried out: how it was made, without its flotillas.

    Attributes:
        time: When, seconds since the epoch.
        round: Its number within the call, from 1.
        moves: Number of trials that it moved.
    """

    time: float
    round: int
    moves: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FleetSummary:
    """One `optimize` call in numbers; printed, in words.

    Attributes:
        trials: Number of trials by how they ended ("complete", "pruned", "fail", "given back").
        num_devices: Device slots that were there, be it for a while.
        num_nodes: Nodes they are on.
        there_s: Seconds each device was there.
        duration_s: Wall time of the call.
        startup_s: Seconds of it before its first trial began: processes that start, and import.
        busy_s: Seconds each device had a run.
        waited_s: Seconds of these its run waited for data, the mean over its ranks.
        probing_s: Seconds from the start of each trial's first run to its first request for data;
            0 for plain objectives.
        profiling_s: Seconds of training that were timed for a rate; no batch of them is thrown
            away.
        decisions: Every allocation that moved a trial or began a round, with its reason, solver
            status, gap and time.
        rescales: How often a trial was moved to other devices.
        move_s: Mean seconds that a move has cost: in which the trial was on devices, but did not
            train. 0 if none was measured.
        pipeline: What the shared pipeline did for this call, how its processes spent their time,
            and what went wrong; None without a pipeline.
        exchange: By which scheme nodes shared its chunks; "" if they did not.
        left_out: Nodes and devices that get no more trials because they kept failing, and why.
    """

    trials: dict[str, int]
    num_devices: int
    num_nodes: int
    there_s: dict[int, float]
    duration_s: float
    busy_s: dict[int, float]
    waited_s: dict[int, float]
    probing_s: float
    profiling_s: float
    decisions: tuple[Decision, ...]
    rescales: int
    move_s: float
    pipeline: PipelineStats | None
    exchange: str = ""
    left_out: dict[str, str] = field(default_factory=dict)
    startup_s: float = 0.0

    @property
    def preprocessed(self) -> int:
        """Samples preprocessed for this call; epochs of earlier calls may serve it too."""
        return self.pipeline.preprocessed if self.pipeline else 0

    @property
    def consumed(self) -> int:
        """Samples delivered to its trials."""
        return self.pipeline.consumed if self.pipeline else 0

    @property
    def sharing_factor(self) -> float:
        """Samples consumed per sample preprocessed; 0 if none was: earlier calls had made all."""
        return self.consumed / self.preprocessed if self.preprocessed else 0.0

    @property
    def probing_share(self) -> float:
        """Share of device time spent before trials asked for data."""
        device_s = sum(self.there_s.values())
        return self.probing_s / device_s if device_s else 0.0

    @property
    def mean_devices(self) -> float:
        """Devices that were there on average."""
        return sum(self.there_s.values()) / self.duration_s if self.duration_s else 0.0

    def __str__(self) -> str:
        return "; ".join(self._in_words()) + "."

    def __repr__(self) -> str:
        return "\n  ".join(self._in_words())

    def _in_words(self) -> Iterator[str]:
        ended = ", ".join(f"{number} {how}" for how, number in sorted(self.trials.items()))
        idle = [there_s - self.busy_s.get(d, 0.0) for d, there_s in self.there_s.items()]
        devices = counted(self.num_devices, "device")
        if self.num_nodes > 1:
            devices += f" of {self.num_nodes} nodes ({self.mean_devices:.1f} there on average)"
        yield (
            f"Sweep of {counted(sum(self.trials.values()), 'trial')} ({ended}) took "
            f"{self.duration_s:.1f} s on {devices}"
        )
        yield (
            f"a device was idle for {mean_of(idle):.1f} s and waited for data for "
            f"{mean_of(list(self.waited_s.values())):.1f} s on average"
        )
        if self.startup_s >= 0.05:
            yield f"the first trial began after {self.startup_s:.1f} s"
        yield f"probing took {self.probing_share:.1%} of device time"
        if self.rescales:
            yield f"moves to other devices: {self.rescales}, at {self.move_s:.1f} s each"
        if self.pipeline and self.consumed:
            if self.preprocessed:
                yield f"sharing factor {self.sharing_factor:.1f}"
                yield _in_words(self.pipeline)
            else:
                yield f"all {self.consumed} samples were there from earlier calls"
            if self.pipeline.num_received:
                yield (
                    f"{self.pipeline.num_received} of the samples came from other nodes "
                    f"({self.exchange})"
                )
        if self.pipeline and (trouble := _trouble(self.pipeline)):
            yield trouble
        for name, why in self.left_out.items():
            yield f"{name} was left out: {why}"
        if self.decisions:
            yield _how_solved(self.decisions)


def _how_solved(plans: Sequence[Decision]) -> str:
    """As "120 plans, 98 % by CBC, 4 ms each"."""
    solvers = Counter(plan.solver for plan in plans if plan.solver)
    by = "".join(f", {n / len(plans):.0%} by {name}" for name, n in solvers.items())
    failed = sum(plan.status.startswith("fallback") for plan in plans)
    without = f", {failed} by the fallback" if failed else ""
    median_ms = 1e3 * statistics.median(plan.solve_time_s for plan in plans)
    return f"{counted(len(plans), 'plan')}{by}{without}, {median_ms:.0f} ms each"


def _in_words(use: PipelineStats) -> str:
    """Where trials wait and preprocessors are busy, there are too few of these."""
    text = (
        f"preprocessors ({use.num_preprocessors:.1f} on average) were busy for "
        f"{use.busy_share:.0%} of their time"
    )
    if use.blocked_share >= 0.005:
        text += f" and short of memory for {use.blocked_share:.0%}"
    return f"{text}, readers waited for {use.stalled_share:.0%} of theirs"


def _trouble(stats: PipelineStats) -> str:
    """What went wrong in the pipeline without failing a trial."""
    counted = {
        "samples skipped": stats.num_skipped,
        "preprocessors that died": stats.num_lost,
        "samples preprocessed again": stats.repeated,
    }
    return ", ".join(f"{what}: {number}" for what, number in counted.items() if number)


def counted(number: int, what: str) -> str:
    """So many of them, in words."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def mean_of(values: list[float]) -> float:
    """Returns the mean of some values; 0 of none."""
    return sum(values) / len(values) if values else 0.0
