"""A simulation of virtual workers: pipelines of unlike stages that share weights by waves.

Which pass a stage does next and when a minibatch may start is decided by the rules of
:mod:`optuna_fleet.virtual_workers.wsp`, which the engine keeps too; here only time passes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from optuna_fleet.virtual_workers.wsp import Pass, Schedule, Turn, Turns, held_minibatches


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """How long a stage is busy, in seconds.

    Attributes:
        forward_s: Forward pass of one minibatch.
        backward_s: Backward pass of one minibatch.
        push_s: Sending the updates of a wave to the parameter servers.
        pull_s: Getting weights from them, where a minibatch starts with newer ones.
    """

    forward_s: float
    backward_s: float
    push_s: float = 0.0
    pull_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersOutcome:
    """What a simulation came to.

    Attributes:
        minibatches_per_s: Of all virtual workers together, in the steady state: over the second
            half of their waves.
        waited_s: Of each virtual worker, seconds in which nothing but the global clock kept its
            next minibatch from starting.
        idle_s: Of each virtual worker, the part of these in which its first stage was idle.
    """

    minibatches_per_s: float
    waited_s: tuple[float, ...]
    idle_s: tuple[float, ...]


Interval = tuple[float, float]


@dataclass(slots=True)
class _Stage:
    times: StageTimes
    turns: Turns
    is_busy: bool = False
    busy: list[Interval] = field(default_factory=list)


@dataclass(slots=True)
class _Worker:
    """``clock`` is that of its weights; minibatches in ``pulled_for`` start with newer ones."""

    stages: list[_Stage]
    clock: int = 0
    pulls: bool = False
    pulled_for: set[int] = field(default_factory=set)
    pushed: int = 0
    ended_s: list[float] = field(default_factory=list)
    waits_since_s: float | None = None
    waited: list[Interval] = field(default_factory=list)

    @property
    def next_number(self) -> int:
        return self.stages[0].turns.forward_done + 1


class VirtualWorkers:
    """Virtual workers that train a given number of waves.

    Args:
        workers: The stages of each; their numbers may differ.
        schedule: Whether by waves or with flushes, and of how many minibatches.
        latency_s: From the moment a stage ends a pass to when the next one knows.
        hidden: Share of pushes and pulls that goes on beside the passes: no stage is busy for it,
            but the clock waits. 0 where transfers stop the device, as in the paper's system.
    """

    def __init__(
        self,
        workers: Sequence[Sequence[StageTimes]],
        schedule: Schedule,
        *,
        latency_s: float = 0.0,
        hidden: float = 0.0,
    ) -> None:
        self._schedule = schedule
        self._latency_s = latency_s
        self._hidden = hidden
        self._workers = [_Worker(stages=self._stages(times)) for times in workers]
        self.now_s = 0.0
        self._events: list[tuple[float, int, partial[None]]] = []
        self._order = count()

    def _stages(self, times: Sequence[StageTimes]) -> list[_Stage]:
        num = len(times)
        held = [held_minibatches(q, num, self._schedule.wave_size) for q in range(num)]
        return [_Stage(t, Turns(credit)) for t, credit in zip(times, held, strict=True)]

    def run(self, num_waves: int) -> WorkersOutcome:
        """Simulate until every virtual worker has trained as many waves, at least 2.

        Raises:
            ValueError: So few waves show no steady state.
            RuntimeError: Not all minibatches come to an end.
        """
        last = num_waves * self._schedule.wave_size
        for worker in self._workers:
            worker.stages[0].turns.forward_ready = last
            self._go_on(worker)
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        if any(len(worker.ended_s) < last for worker in self._workers):
            raise RuntimeError("The virtual workers wait for each other for ever.")
        return self._outcome(num_waves)

    # -- what happens -----------------------------------------------------------------------------

    def _at(self, delay_s: float, event: partial[None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), event))

    def _go_on(self, worker: _Worker) -> None:
        self._want_clock(worker)
        for place, stage in enumerate(worker.stages):
            may_start = partial(self._may_start, worker) if place == 0 else _always
            if not stage.is_busy and (turn := stage.turns.next(may_start)) is not None:
                self._begin(worker, place, turn)
        self._note_waiting(worker)

    def _may_start(self, worker: _Worker, number: int) -> bool:
        has_updates = len(worker.ended_s) >= self._schedule.least_local(number)
        return has_updates and worker.clock >= self._schedule.least_clock(number)

    def _want_clock(self, worker: _Worker) -> None:
        """Asks for newer weights when those at hand are too old for the next minibatch."""
        needed = self._schedule.least_clock(worker.next_number)
        newest = min(other.pushed for other in self._workers)
        if worker.clock < needed <= newest and not worker.pulls:
            worker.pulls = True
            pull_s = self._hidden * max(stage.times.pull_s for stage in worker.stages)
            self._at(pull_s, partial(self._pulled, worker, newest))

    def _pulled(self, worker: _Worker, clock: int) -> None:
        worker.pulls = False
        worker.clock = clock
        worker.pulled_for.add(worker.next_number)
        self._go_on(worker)

    def _begin(self, worker: _Worker, place: int, turn: Turn) -> None:
        stage = worker.stages[place]
        stage.turns.finish(turn)
        stage.is_busy = True
        duration_s = self._duration_s(worker, stage.times, turn)
        stage.busy.append((self.now_s, self.now_s + duration_s))
        self._at(duration_s, partial(self._end, worker, place, turn))

    def _duration_s(self, worker: _Worker, times: StageTimes, turn: Turn) -> float:
        if turn.what is Pass.FORWARD:
            syncs_s = times.pull_s if turn.number in worker.pulled_for else 0.0
            return times.forward_s + (1 - self._hidden) * syncs_s
        syncs_s = times.push_s if turn.number % self._schedule.wave_size == 0 else 0.0
        return times.backward_s + (1 - self._hidden) * syncs_s

    def _end(self, worker: _Worker, place: int, turn: Turn) -> None:
        stage = worker.stages[place]
        stage.is_busy = False
        if turn.what is Pass.FORWARD:
            if place + 1 < len(worker.stages):
                self._tell(worker, worker.stages[place + 1], turn)
            else:
                stage.turns.arrive(Turn(Pass.BACKWARD, turn.number))
        elif place > 0:
            self._tell(worker, worker.stages[place - 1], turn)
        else:
            self._completed(worker, turn.number)
        self._go_on(worker)

    def _tell(self, worker: _Worker, stage: _Stage, turn: Turn) -> None:
        self._at(self._latency_s, partial(self._arrive, worker, stage, turn))

    def _arrive(self, worker: _Worker, stage: _Stage, turn: Turn) -> None:
        stage.turns.arrive(turn)
        self._go_on(worker)

    def _completed(self, worker: _Worker, number: int) -> None:
        worker.ended_s.append(self.now_s)
        if number % self._schedule.wave_size == 0:
            push_s = max(stage.times.push_s for stage in worker.stages)
            self._at(self._hidden * push_s, partial(self._pushed, worker))

    def _pushed(self, worker: _Worker) -> None:
        worker.pushed += 1
        for other in self._workers:
            self._go_on(other)

    # -- what is counted --------------------------------------------------------------------------

    def _note_waiting(self, worker: _Worker) -> None:
        turns, number = worker.stages[0].turns, worker.next_number
        waits = (
            number <= turns.forward_ready
            and turns.held < turns.credit
            and len(worker.ended_s) >= self._schedule.least_local(number)
            and worker.clock < self._schedule.least_clock(number)
        )
        if waits and worker.waits_since_s is None:
            worker.waits_since_s = self.now_s
        elif not waits and worker.waits_since_s is not None:
            worker.waited.append((worker.waits_since_s, self.now_s))
            worker.waits_since_s = None

    def _outcome(self, num_waves: int) -> WorkersOutcome:
        half = num_waves // 2 * self._schedule.wave_size
        from_s = max(worker.ended_s[half - 1] for worker in self._workers)
        to_s = min(worker.ended_s[-1] for worker in self._workers)
        if not from_s < to_s:
            raise ValueError(
                f"The value of `num_waves` is {num_waves}, but must be larger: the fastest "
                "virtual worker is done before the slowest one is half done."
            )
        window = [(from_s, to_s)]
        ended = sum(sum(from_s < t <= to_s for t in w.ended_s) for w in self._workers)
        waited = [_common(worker.waited, window) for worker in self._workers]
        return WorkersOutcome(
            minibatches_per_s=ended / (to_s - from_s),
            waited_s=tuple(_total(w) for w in waited),
            idle_s=tuple(
                _total(w) - _total(_common(w, worker.stages[0].busy))
                for w, worker in zip(waited, self._workers, strict=True)
            ),
        )


def _always(number: int) -> bool:
    return True


def _common(some: list[Interval], others: list[Interval]) -> list[Interval]:
    """What is in both, each in order and without overlaps."""
    found, rest = [], iter(others)
    other = next(rest, None)
    for begin, end in some:
        while other is not None and other[0] < end:
            if other[1] > begin:
                found.append((max(begin, other[0]), min(end, other[1])))
            if other[1] > end:
                break
            other = next(rest, None)
    return found


def _total(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
