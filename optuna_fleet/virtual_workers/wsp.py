"""The rules of pipelined virtual workers.

Which weights a minibatch may start with: Wave Synchronous Parallel (HetPipe), or a flush of the
pipeline. And what a stage does next: one forward, one backward, and no more held than it has
memory for. Minibatches of a virtual worker are counted from 1, waves from 0. Wave c is minibatches
c m + 1 to (c + 1) m. The global clock is how many waves *every* virtual worker has pushed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, TypeAlias


class Tag(NamedTuple):
    """Which updates the weights of a minibatch contain; the same on all its stages.

    ``w = w_0 + every virtual worker's updates of waves before `clock`, and its own from there up
    to, with, minibatch `local```.
    """

    local: int
    clock: int


@dataclass(frozen=True, slots=True)
class WaveSynchronous:
    """HetPipe's WSP (section 5).

    The paper's condition for starting minibatch p reads p > (D + 1)(s_global + 1) + s_local; its
    own example (D = 0, m = 4: minibatch 8 waits for wave 0) only holds for s_local in the place of
    s_global, and that is what is done here.

    Attributes:
        wave_size: m = N_m = s_local + 1, minibatches in flight.
        clock_distance: D, how many waves a virtual worker may be ahead of the slowest one; None
            for one that is alone, whose clock stands at 0.
    """

    wave_size: int
    clock_distance: int | None = 0

    def least_local(self, number: int) -> int:
        """Own updates, from the first on, that its weights contain: all but the s_local latest."""
        return max(0, number - self.wave_size)

    def least_clock(self, number: int) -> int:
        """Waves of all virtual workers that its weights contain.

        Only p = (c + 2) m with c >= D ever demands more than the minibatch before it.
        """
        if self.clock_distance is None:
            return 0
        return max(0, number // self.wave_size - 1 - self.clock_distance)

    @property
    def global_staleness(self) -> int:
        """s_global: most of the latest updates of another virtual worker that may be missing."""
        assert self.clock_distance is not None
        return (self.clock_distance + 2) * self.wave_size - 2

    def check_start(self, number: int, tag: Tag) -> None:
        """The published bounds, and what follows from them.

        Raises:
            AssertionError: It may not have these weights: a fault of the engine.
        """
        m = self.wave_size
        if self.clock_distance is None:
            _demand(tag == Tag(self.least_local(number), 0), "local staleness", number, tag)
            return
        _demand(max(0, number - m) <= tag.local < number, "local staleness", number, tag)
        _demand(tag.clock >= self.least_clock(number), "clock distance", number, tag)
        missing = number - 1 - tag.clock * m
        _demand(missing <= self.global_staleness, "global staleness", number, tag)
        ahead = ((number - 1) // m + self.clock_distance + 1) * m
        _demand(tag.clock * m <= ahead, "updates from the future", number, tag)


@dataclass(frozen=True, slots=True)
class Flush:
    """All minibatches of a wave have the weights that the waves before it led to (as in GPipe).

    A virtual worker that is flushed waits for no clock.

    Attributes:
        wave_size: Microbatches of one update of the weights.
    """

    wave_size: int

    def least_local(self, number: int) -> int:
        """All of the waves before its own."""
        return (number - 1) // self.wave_size * self.wave_size

    def least_clock(self, number: int) -> int:
        """There are no servers."""
        return 0

    def check_start(self, number: int, tag: Tag) -> None:
        """There is nothing to choose."""
        _demand(tag == Tag(self.least_local(number), 0), "flush", number, tag)


Schedule: TypeAlias = WaveSynchronous | Flush
"""When a minibatch may start, as published bounds of staleness demand."""


def tag_of(schedule: Schedule, number: int, clock: int) -> Tag:
    """The weights of a minibatch that starts when a virtual worker has the snapshot of `clock`."""
    return Tag(max(schedule.least_local(number), clock * schedule.wave_size), clock)


def check_clocks(pushed: list[int], clock_distance: int) -> None:
    """Waves pushed by each virtual worker: the fastest is at most D + 1 ahead of the slowest.

    One more than D, as a wave that was started within the distance may be pushed.

    Raises:
        AssertionError: It is further ahead.
    """
    if max(pushed) - min(pushed) > clock_distance + 1:
        raise AssertionError(f"Waves pushed: {pushed}, with a clock distance of {clock_distance}.")


def _demand(holds: bool, what: str, number: int, tag: Tag) -> None:
    if not holds:
        raise AssertionError(f"Minibatch {number} with weights {tag} breaks the bound: {what}.")


class Pass(Enum):
    """A pass of a minibatch through a stage."""

    FORWARD = auto()
    BACKWARD = auto()


class Turn(NamedTuple):
    """A pass of one minibatch, counted from 1."""

    what: Pass
    number: int


@dataclass(slots=True)
class Turns:
    """Passes of a stage, each kind in the order of minibatches (HetPipe, section 4).

    A backward pass goes first, as it frees memory and the stages before wait for it. The last
    stage's backward pass is ready with its forward pass, so it follows at once, as in the paper.

    Attributes:
        credit: Most minibatches that may be between their two passes.
        forward_ready: Latest minibatch whose input is there.
        backward_ready: Latest minibatch whose gradient is there.
        forward_done: Latest minibatch whose forward pass is done.
        backward_done: Latest minibatch whose backward pass is done.
    """

    credit: int
    forward_ready: int = 0
    backward_ready: int = 0
    forward_done: int = 0
    backward_done: int = 0

    @property
    def held(self) -> int:
        """Minibatches between their two passes."""
        return self.forward_done - self.backward_done

    def arrive(self, turn: Turn) -> None:
        """What the pass needs is there.

        Raises:
            AssertionError: It is not that of the next minibatch: the transport mixes up messages.
        """
        if turn.what is Pass.FORWARD:
            _demand_next(turn, self.forward_ready)
            self.forward_ready = turn.number
        else:
            _demand_next(turn, self.backward_ready)
            self.backward_ready = turn.number

    def next(self, may_start: Callable[[int], bool]) -> Turn | None:
        """The pass to do now; None if there is none.

        Args:
            may_start: Whether the weights for the forward pass of a minibatch are there.
        """
        if self.backward_done < self.backward_ready:
            return Turn(Pass.BACKWARD, self.backward_done + 1)
        number = self.forward_done + 1
        if number <= self.forward_ready and self.held < self.credit and may_start(number):
            return Turn(Pass.FORWARD, number)
        return None

    def finish(self, turn: Turn) -> None:
        """The pass is done, or has begun: it is not given out again."""
        if turn.what is Pass.FORWARD:
            _demand_next(turn, self.forward_done)
            self.forward_done = turn.number
        else:
            _demand_next(turn, self.backward_done)
            self.backward_done = turn.number


def held_minibatches(stage: int, num_stages: int, in_flight: int) -> int:
    """Most minibatches that are between their forward and backward pass on a stage.

    A minibatch comes back after at most two turns of each later stage, so more would not keep the
    pipeline fuller. Stages admit no more forward passes than this; first come, first served, as in
    the paper (section 4), would pile up to ``in_flight`` on every stage but the last.
    """
    return min(in_flight, 2 * (num_stages - 1 - stage) + 1)


def _demand_next(turn: Turn, latest: int) -> None:
    if turn.number != latest + 1:
        raise AssertionError(f"{turn} came after that of minibatch {latest}.")
