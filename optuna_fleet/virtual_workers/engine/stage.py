"""A stage of a virtual worker: hears messages, does one pass at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from typing_extensions import assert_never

from optuna_fleet.virtual_workers.engine.passes import HeldPass, Loss, StageModule
from optuna_fleet.virtual_workers.engine.stage_messages import (
    Activations,
    Gradients,
    Inputs,
    Message,
    Pull,
    Push,
    Snapshot,
    StageAddress,
    Targets,
    Transport,
)
from optuna_fleet.virtual_workers.engine.versions import Weights
from optuna_fleet.virtual_workers.wsp.schedules import Schedule, Tag, tag_of
from optuna_fleet.virtual_workers.wsp.turns import Pass, Turn, Turns, held_minibatches


@dataclass(frozen=True, slots=True, kw_only=True)
class PassDone:
    """A pass has been done.

    Attributes:
        loss: Of a backward pass: the minibatch's, without gradients; else None.
    """

    address: StageAddress
    turn: Turn
    tag: Tag
    loss: Any = None


Observer = Callable[[PassDone], None]


class PipelineStage:
    """Knows what its next pass is; who runs it (a loop, a process) is somebody else's matter.

    Args:
        loss: From the model's output and a minibatch's targets to a scalar; the last stage's.
        most_held: Minibatches that it has memory for; None for as many as keep it busy.
    """

    def __init__(
        self,
        *,
        address: StageAddress,
        num_stages: int,
        part: nn.Module,
        loss: Loss,
        weights: Weights,
        schedule: Schedule,
        transport: Transport,
        observer: Observer | None = None,
        most_held: int | None = None,
    ) -> None:
        self.address = address
        self.weights = weights
        self._is_first = address.stage == 0
        self._is_last = address.stage == num_stages - 1
        its_loss = loss if self._is_last else None
        self._module = StageModule(part, is_first=self._is_first, loss=its_loss)
        self._schedule = schedule
        self._transport = transport
        self._observer = observer
        credit = held_minibatches(address.stage, num_stages, schedule.wave_size)
        self._turns = Turns(credit if most_held is None else min(credit, most_held))
        self._values: dict[int, Any] = {}
        self._tags: dict[int, Tag] = {}
        self._targets: dict[int, Targets] = {}
        self._gradients: dict[int, tuple[Any, ...]] = {}
        self._losses: dict[int, Any] = {}
        self._held: dict[int, HeldPass] = {}

    @property
    def started(self) -> int:
        """Minibatches whose forward pass is done here."""
        return self._turns.forward_done

    @property
    def completed(self) -> int:
        """Minibatches whose backward pass is done here."""
        return self._turns.backward_done

    def receive(self, message: Message) -> None:
        """Take note; nothing is computed."""
        match message:
            case Inputs(number=number, values=values):
                self._turns.arrive(Turn(Pass.FORWARD, number))
                self._values[number] = values
            case Activations(number=number, tag=tag, values=values):
                self._turns.arrive(Turn(Pass.FORWARD, number))
                self._values[number], self._tags[number] = values, tag
                self.weights.want(tag.clock, exactly=True)
            case Targets(number=number):
                self._targets[number] = message
            case Gradients(number=number, values=values, loss=loss):
                self._turns.arrive(Turn(Pass.BACKWARD, number))
                self._gradients[number], self._losses[number] = values, loss
            case Snapshot():
                self.weights.receive(message)
            case Push() | Pull():
                raise AssertionError(f"{self.address} is no parameter server")
            case _:
                assert_never(message)

    def next_turn(self) -> Turn | None:
        """The pass that can be done now; None while there is none.

        Asks for newer weights where these are what keeps the next minibatch from starting.
        """
        if self._is_first:
            needed = self._schedule.least_clock(self._turns.forward_done + 1)
            self.weights.want(needed, exactly=False)
        return self._turns.next(self._may_start)

    def run(self, turn: Turn) -> None:
        """Do a pass that `next_turn` gave, and send on what came of it."""
        self._turns.finish(turn)
        if turn.what is Pass.FORWARD:
            self._forward(turn)
        else:
            self._backward(turn)

    def _may_start(self, number: int) -> bool:
        if self._is_last and number not in self._targets:
            return False
        if self._is_first:
            if self.weights.clock < self._schedule.least_clock(number):
                return False
            tag = tag_of(self._schedule, number, self.weights.clock)
        else:
            tag = self._tags[number]
        return self.weights.has(tag)

    def _forward(self, turn: Turn) -> None:
        number = turn.number
        if self._is_first:
            self._tags[number] = tag_of(self._schedule, number, self.weights.clock)
        tag = self._tags[number]
        self._schedule.check_start(number, tag)
        weights = self.weights.at(tag)
        values, targets = self._values.pop(number), self._targets.pop(number, None)
        output, self._held[number] = self._module.forward(weights, values, targets)
        if self._is_last:
            self._gradients[number], self._losses[number] = (), output
            self._turns.arrive(Turn(Pass.BACKWARD, number))
        else:
            self._send(1, Activations(number=number, tag=tag, values=output))
        self._observe(turn, tag)

    def _backward(self, turn: Turn) -> None:
        number = turn.number
        held, tag = self._held.pop(number), self._tags.pop(number)
        gradients, returned = self._module.backward(held, self._gradients.pop(number))
        loss = self._losses.pop(number)
        if not self._is_first:  # first of all: others wait for it
            self._send(-1, Gradients(number=number, values=returned, loss=loss))
        self.weights.finish(number, held.weights, gradients)
        self._observe(turn, tag, loss)

    def _send(self, distance: int, message: Message) -> None:
        worker, stage = self.address
        self._transport.send(self.address, StageAddress(worker, stage + distance), message)

    def _observe(self, turn: Turn, tag: Tag, loss: Any = None) -> None:
        if self._observer is not None:
            self._observer(PassDone(address=self.address, turn=turn, tag=tag, loss=loss))
