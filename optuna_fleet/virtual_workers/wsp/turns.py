"""What a stage does next: one forward, one backward, and no more held than it has memory for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple


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

    Args:
        stage: Place in the pipeline, from 0.
        num_stages: Stages of the pipeline, k.
        in_flight: Minibatches in the whole pipeline, N_m.
    """
    return min(in_flight, 2 * (num_stages - 1 - stage) + 1)


def _demand_next(turn: Turn, latest: int) -> None:
    if turn.number != latest + 1:
        raise AssertionError(f"{turn} came after that of minibatch {latest}.")
