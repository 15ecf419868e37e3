"""The two passes of a minibatch through a stage, and the random numbers of its layers."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from optuna_fleet.accelerator import accelerator_of
from optuna_fleet.trainer.nested import map_tensors, tensors_in
from optuna_fleet.trainer.randomness import own_randomness
from optuna_fleet.virtual_workers.engine.stage_messages import Targets, Tensors

Loss = Callable[[Any, Any], Tensor]
"""From a model's output and a minibatch's targets to a scalar."""


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

    def forward(
        self, weights: Tensors, values: Any, targets: Targets | None
    ) -> tuple[Any, HeldPass]:
        """Return what goes on, or of the last stage its loss, and what to keep."""
        leaves = values if self._is_first else map_tensors(values, leaf_of)
        # A copy, as the module may change it in place: neither a leaf, nor what the stage before
        # keeps, nor the batch, of which other minibatches are views, may change.
        given = map_tensors(leaves, torch.clone)
        output = functional_call(self._module, dict(weights), (given,))
        if self._loss is not None:
            assert targets is not None
            output = self._loss(output, targets.values)
            if targets.weight != 1.0:
                output = output * targets.weight
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
