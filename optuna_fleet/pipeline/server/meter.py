"""Levels that change with events, summed over time."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from optuna_fleet.pipeline.stats import PipelineUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """How far production is ahead of the open passes.

    Attributes:
        num_ready: Chunks in their windows that are there, beyond those they read just now.
        num_ahead: The most that this could be.
        has_work: Something is wanted that is neither there nor in production.
    """

    num_ready: int
    num_ahead: int
    has_work: bool


@dataclass(slots=True, kw_only=True)
class Levels:
    """What is so from now on, until the next event.

    Attributes:
        running: Preprocessors.
        busy: Those at work.
        is_blocked: There is work, but it does not fit into the budget.
        reading: Open passes, those that wait for their first answer included.
        stalled: Those whose reader waits for data.
        ready: Chunks ready ahead of the passes, summed over them.
        window: The most that this could be.
    """

    running: int = 0
    busy: int = 0
    is_blocked: bool = False
    reading: int = 0
    stalled: int = 0
    ready: int = 0
    window: int = 0


@dataclass(slots=True)
class Meter:
    """Sums levels over time. Pure: the time is an argument.

    Attributes:
        levels: The levels since ``now_s``.
        now_s: When they were observed.
        busy_s: Seconds that preprocessors were at work, summed over them.
    """

    now_s: float
    levels: Levels = field(default_factory=Levels)
    active_s: float = 0.0
    running_s: float = 0.0
    busy_s: float = 0.0
    blocked_s: float = 0.0
    reading_s: float = 0.0
    stalled_s: float = 0.0
    starved_s: float = 0.0
    ready_s: float = 0.0
    window_s: float = 0.0

    def advance(self, now_s: float) -> None:
        """Adds the time since the last call, in which the levels were as they are."""
        passed_s, levels = max(0.0, now_s - self.now_s), self.levels
        self.now_s = now_s
        if not levels.reading:
            return
        self.active_s += passed_s
        self.running_s += levels.running * passed_s
        self.busy_s += levels.busy * passed_s
        self.reading_s += levels.reading * passed_s
        self.stalled_s += levels.stalled * passed_s
        self.ready_s += levels.ready * passed_s
        self.window_s += levels.window * passed_s
        if levels.is_blocked:
            self.blocked_s += (levels.running - levels.busy) * passed_s
        if levels.stalled:
            self.starved_s += passed_s

    def use(self) -> PipelineUse:
        """Returns the sums so far."""
        sums = {f.name: getattr(self, f.name) for f in fields(PipelineUse) if f.name != "full_s"}
        idle_s = self.running_s - self.busy_s
        return PipelineUse(**sums, full_s=max(0.0, idle_s - self.blocked_s))
