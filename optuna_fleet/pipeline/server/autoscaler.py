"""Measures the pipeline at work and keeps as many preprocessors as it needs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from optuna_fleet.pipeline.limits import Budgets
from optuna_fleet.pipeline.server.meter import Levels, Meter, Queue
from optuna_fleet.pipeline.server.scaling import Scaling, ScalingDecision, Window
from optuna_fleet.pipeline.server.store import ChunkStore
from optuna_fleet.pipeline.server.workers import PreprocessorPool
from optuna_fleet.pipeline.stats import PipelineUse

_logger = logging.getLogger(__name__)

_LOOK_S = 0.02
"""The queues are looked at no more often: that costs time for each reader and chunk."""


@dataclass(slots=True)
class _Marks:
    """The meter and the counters when a window began."""

    active_s: float
    busy_s: float
    starved_s: float
    reading_s: float
    num_chunks: int
    work_s: float


class Autoscaler:
    """Watches queues and preprocessors, at each event of the pipeline; there is no timer.

    Args:
        pool: The preprocessors, whose target it sets.
        store: Whom to ask about queues.
        budgets: The most preprocessors, and whether there may be fewer.
        clock: Seconds since any time.
    """

    def __init__(
        self,
        pool: PreprocessorPool,
        store: ChunkStore,
        budgets: Budgets,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._store = store
        self._clock = clock
        self._scaling: Scaling | None = None
        if budgets.is_adaptive:
            self._scaling = Scaling(limit=budgets.num_preprocessors)
            pool.target = self._scaling.number
        self._meter = Meter(clock())
        self._queue: Queue | None = None
        self._looked_s = 0.0
        self._costs_s: dict[str, float] = {}
        self._num_chunks = 0
        self._work_s = 0.0
        self._marks = self._now()

    def count(self, name: str, num_samples: int, busy_s: float) -> None:
        """A chunk was made; call before the review that follows from it."""
        if self._pool.has_fresh or not num_samples:
            return  # somebody still loads the data sets: this tells nothing
        cost_s = self._costs_s.setdefault(name, busy_s / num_samples)
        self._num_chunks += 1
        self._work_s += num_samples * cost_s

    def review(self, *, num_measuring: int = 0) -> bool:
        """Call after each event, and after work was given; returns whether to give more.

        Args:
            num_measuring: Data sets being measured; somebody waits for each.
        """
        self._meter.advance(self._clock())
        self._meter.levels = self._levels(num_measuring)
        if self._scaling is None:
            return False
        before = self._pool.target
        self._rescale(self._scaling)
        self._pool.end_surplus()
        return self._pool.target > before

    def use(self) -> PipelineUse:
        """Returns how the time was spent, up to now."""
        self._meter.advance(self._clock())
        return self._meter.use()

    def _levels(self, num_measuring: int) -> Levels:
        queue = self._looked_at()
        return Levels(
            running=len(self._pool.pids),
            busy=self._pool.num_busy,
            is_blocked=queue.has_work,
            reading=self._store.num_passes + num_measuring,
            stalled=self._store.num_stalled() + num_measuring,
            ready=queue.num_ready,
            window=queue.num_ahead,
        )

    def _looked_at(self) -> Queue:
        now_s = self._meter.now_s
        if self._queue is None or now_s - self._looked_s >= _LOOK_S:
            self._queue, self._looked_s = self._store.queue(), now_s
        return self._queue

    def _rescale(self, scaling: Scaling) -> None:
        decision: ScalingDecision | None = None
        if self._pool.pids:
            decision = scaling.work_came()
        if decision is None and not self._pool.has_fresh:
            window = self._window()
            if not scaling.is_complete(window):
                return
            decision = scaling.judge(window)
        self._marks = self._now()
        if decision is not None and decision.number != self._pool.target:
            _logger.debug("%d preprocessors: %s", decision.number, decision.reason)
            self._pool.target = decision.number

    def _now(self) -> _Marks:
        meter = self._meter
        return _Marks(
            active_s=meter.active_s,
            busy_s=meter.busy_s,
            starved_s=meter.starved_s,
            reading_s=meter.reading_s,
            num_chunks=self._num_chunks,
            work_s=self._work_s,
        )

    def _window(self) -> Window:
        now, marks = self._now(), self._marks
        elapsed_s = now.active_s - marks.active_s
        return Window(
            elapsed_s=elapsed_s,
            num_chunks=now.num_chunks - marks.num_chunks,
            work_s=now.work_s - marks.work_s,
            busy_s=now.busy_s - marks.busy_s,
            starved_s=now.starved_s - marks.starved_s,
            num_readers=(now.reading_s - marks.reading_s) / elapsed_s if elapsed_s else 0.0,
        )
