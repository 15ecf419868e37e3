"""A stage of a virtual worker: hears messages, does one pass at a time."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import assert_never

from optuna_fleet.accelerator import accelerator_of
from optuna_fleet.trainer.nested import map_tensors, tensors_in
from optuna_fleet.trainer.randomness import own_randomness
from optuna_fleet.virtual_workers.stage_messages import (
    Activations,
    Gradients,
    Snapshot,
    StageAddress,
    Tensors,
    ToStage,
    Transport,
)
from optuna_fleet.virtual_workers.versions import Weights
from optuna_fleet.virtual_workers.wsp import (
    Pass,
    Schedule,
    Tag,
    Turn,
    Turns,
    held_minibatches,
    tag_of,
)

Loss = Callable[[Any, Any], Tensor]
"""From a model's output and a minibatch's targets to a scalar."""


class PassDone(NamedTuple):
    """What a stage has done, and with which weights.

    Attributes:
        loss: Of a backward pass: the minibatch's, without gradients; else None.
    """

    turn: Turn
    tag: Tag
    loss: Tensor | None


_UNKNOWN = Tag(0, 0)


@dataclass(slots=True)
class _Minibatch:
    """What a stage knows of one, until its backward pass is done."""

    values: Any = None
    tag: Tag = _UNKNOWN
    targets: Any = None
    weight: float | None = None  # its loss has in the update; None while it is not given
    held: HeldPass | None = None
    gradients: tuple[Tensor | None, ...] = ()
    loss: Tensor | None = None


class PipelineStage:
    """Knows what its next pass is; who runs it (a loop, a process) is somebody else's matter.

    Args:
        loss: The last stage's.
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
        credit = held_minibatches(address.stage, num_stages, schedule.wave_size)
        self._turns = Turns(credit if most_held is None else min(credit, most_held))
        self._minibatches: defaultdict[int, _Minibatch] = defaultdict(_Minibatch)

    @property
    def started(self) -> int:
        """Minibatches whose forward pass is done here."""
        return self._turns.forward_done

    @property
    def completed(self) -> int:
        """Minibatches whose backward pass is done here."""
        return self._turns.backward_done

    def give(self, number: int, inputs: Any, targets: Any, weight: float = 1.0) -> None:
        """The next minibatch, counted from 1, whose loss has a weight in the update.

        Inputs are for the first stage, all else is for the last.
        """
        if self._is_first or self._is_last:
            minibatch = self._minibatches[number]
            minibatch.targets, minibatch.weight = targets, weight
        if self._is_first:
            self._minibatches[number].values = inputs
            self._turns.arrive(Turn(Pass.FORWARD, number))

    def receive(self, message: ToStage) -> None:
        """Take note; nothing is computed."""
        match message:
            case Activations():
                self._turns.arrive(Turn(Pass.FORWARD, message.number))
                minibatch = self._minibatches[message.number]
                minibatch.values, minibatch.tag = message.values, message.tag
                self.weights.want(message.clock, exactly=True)
            case Gradients(number=number, loss_and_gradients=(loss, gradients)):
                self._turns.arrive(Turn(Pass.BACKWARD, number))
                minibatch = self._minibatches[number]
                minibatch.loss, minibatch.gradients = loss, gradients
            case Snapshot():
                self.weights.receive(message)
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

    def run(self, turn: Turn) -> PassDone:
        """Do a pass that `next_turn` gave, and send on what came of it."""
        self._turns.finish(turn)
        if turn.what is Pass.BACKWARD:
            minibatch = self._minibatches.pop(turn.number)
            self._backward(turn.number, minibatch)
            return PassDone(turn, minibatch.tag, minibatch.loss)
        minibatch = self._minibatches[turn.number]
        self._forward(turn.number, minibatch)
        return PassDone(turn, minibatch.tag, None)

    def _may_start(self, number: int) -> bool:
        minibatch = self._minibatches[number]
        if self._is_last and minibatch.weight is None:
            return False
        if self._is_first:
            minibatch.tag = tag_of(self._schedule, number, self.weights.clock)
            if minibatch.tag.clock < self._schedule.least_clock(number):
                return False
        return self.weights.has(minibatch.tag)

    def _forward(self, number: int, minibatch: _Minibatch) -> None:
        self._schedule.check_start(number, minibatch.tag)
        weights = self.weights.at(minibatch.tag)
        output, minibatch.held = self._module.forward(weights, minibatch)
        minibatch.values = minibatch.targets = None
        if self._is_last:
            minibatch.loss = output
            self._turns.arrive(Turn(Pass.BACKWARD, number))
        else:
            self._send(1, Activations(number, *minibatch.tag, output))

    def _backward(self, number: int, minibatch: _Minibatch) -> None:
        held, loss = minibatch.held, minibatch.loss
        assert held is not None
        assert loss is not None
        gradients, returned = self._module.backward(held, minibatch.gradients)
        if not self._is_first:  # first of all: others wait for it
            self._send(-1, Gradients(number, (loss, returned)))
        self.weights.finish(number, held.weights, gradients, loss)

    def _send(self, distance: int, message: ToStage) -> None:
        worker, stage = self.address
        self._transport.send(StageAddress(worker, stage + distance), message)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPass:
    """What a stage keeps of a minibatch until its backward pass.

    Attributes:
        weights: Those of the forward pass, as leaves of its graph.
        received: Floating-point tensors that the stage before sent, as leaves of the graph.
        sent: Floating-point tensors that the next stage got; of the last stage its loss.
    """

    weights: Tensors
    received: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]


class StageModule:
    """A part of the model, with the loss at its end.

    Buffers, as BatchNorm's statistics, are the module's own: they follow this virtual worker's
    forward passes.

    Args:
        module: The part.
        is_first: Whether nothing goes back from here.
        loss: Of the last stage; else None.
    """

    def __init__(self, module: nn.Module, *, is_first: bool, loss: Loss | None) -> None:
        self._module = module
        self._at_weights = _AtWeights(module)
        self._is_first = is_first
        self._loss = loss

    def forward(self, weights: Tensors, minibatch: _Minibatch) -> tuple[Any, HeldPass]:
        """Return what goes on, or of the last stage its loss, and what to keep."""
        values = minibatch.values
        leaves = values if self._is_first else map_tensors(values, leaf_of)
        # A copy, as the module may change it in place: neither a leaf, nor what the stage before
        # keeps, nor the batch, of which other minibatches are views, may change.
        given = map_tensors(leaves, torch.clone)
        output = functional_call(self._module, dict(weights), (given,))
        if self._loss is not None:
            output = self._loss(output, minibatch.targets)
            if minibatch.weight not in (None, 1.0):
                output = output * minibatch.weight
        received = () if self._is_first else _floating(leaves)
        held = HeldPass(weights=weights, received=received, sent=_floating(output))
        return map_tensors(output, torch.Tensor.detach), held

    def backward(
        self, held: HeldPass, gradients: tuple[Tensor | None, ...]
    ) -> tuple[dict[str, Tensor], tuple[Tensor | None, ...]]:
        """Return gradients by the weights that have one, and by what was received."""
        outputs, chosen = [], []
        given = gradients if self._loss is None else (None,)
        for tensor, gradient in zip(held.sent, given, strict=True):
            if tensor.requires_grad and (gradient is not None or self._loss is not None):
                outputs.append(tensor)
                chosen.append(gradient)
        trained = {name: w for name, w in held.weights.items() if w.requires_grad}
        if not outputs:
            return {}, (None,) * len(held.received)
        inputs = *trained.values(), *held.received
        # With activation checkpointing layers run again in it.
        do = partial(torch.autograd.grad, outputs, inputs, chosen, allow_unused=True)
        found = functional_call(self._at_weights, dict(held.weights), (do,))
        by_name = {n: g for n, g in zip(trained, found, strict=False) if g is not None}
        return by_name, found[len(trained) :]


class _AtWeights(nn.Module):
    """Has what a module has, for whatever is to be done while that is at other weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, own in module.named_children():
            self.add_module(name, own)

    def forward(self, do: Callable[[], Any]) -> Any:
        return do()


def leaf_of(tensor: Tensor) -> Tensor:
    """The same, as the beginning of a graph if it can have a gradient."""
    leaf = tensor.detach()
    return leaf.requires_grad_() if _can_have_gradient(leaf) else leaf


def _can_have_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _floating(values: Any) -> tuple[Tensor, ...]:
    """Floating-point tensors, also complex ones, in a fixed order."""
    return tuple(tensor for tensor in tensors_in(values) if _can_have_gradient(tensor))


class Noise:
    """Seeds each layer's forward pass from (seed, minibatch, layer): all generators.

    These are then what they were, as objectives draw from them too, and those of ranks are alike.
    """

    def __init__(
        self, layers: Mapping[int, nn.Module], device: torch.device, seed: tuple[int, ...]
    ) -> None:
        self._device = device
        self._seed = seed
        self._minibatch: tuple[int, ...] | None = None
        places: dict[nn.Module, deque[int]] = {}
        for place, layer in layers.items():  # a module may be several of the layers
            places.setdefault(layer, deque()).append(place)
        self._depth = 0  # a layer may also be within another, which has begun already then
        self._handles = []
        for layer, own in places.items():
            begin = layer.register_forward_pre_hook(lambda *_, own=own: self._begin(own))
            end = layer.register_forward_hook(self._end, always_call=True)
            self._handles += [begin, end]

    def close(self) -> None:
        """The layers are what they were."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def of(self, *minibatch: int) -> Iterator[None]:
        """The forward pass of a minibatch, counted over the whole training or an evaluation."""
        with own_randomness():
            self._minibatch = minibatch
            try:
                yield
            finally:
                self._minibatch = None

    def _begin(self, places: deque[int]) -> None:
        self._depth += 1
        if self._minibatch is None or self._depth > 1:
            return
        sequence = np.random.SeedSequence(self._seed, spawn_key=(*self._minibatch, places[0]))
        places.rotate(-1)
        seed, of_python, of_numpy = map(int, sequence.generate_state(3, np.uint64))
        random.seed(of_python)
        np.random.seed(of_numpy % 2**32)
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            accelerator_of(self._device.type).module.manual_seed(seed)

    def _end(self, *_: Any) -> None:
        self._depth -= 1
