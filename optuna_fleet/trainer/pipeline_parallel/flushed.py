"""The weights of a stage whose pipeline is flushed: one version, and any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from optuna_fleet.trainer.pipeline_parallel.messages import Snapshot, Tensors
from optuna_fleet.wsp.schedules import Tag


class FlushedWeights:
    """The parameters themselves; gradients add up in ``.grad`` as ``backward()`` would have them.

    Args:
        parameters: Of the stage, by name.
        optimizer: Of these alone; steps when a wave's last backward pass is done. One that looks
            at all gradients of a model together would see a part.
        wave_size: Microbatches of a step.
        before_step: Called with the parameters before each step, with all gradients there.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        wave_size: int,
        before_step: Callable[[Mapping[str, nn.Parameter]], object],
    ) -> None:
        self._before_step = before_step
        self._parameters = parameters
        self._optimizer = optimizer
        self._wave_size = wave_size
        self._stepped = 0

    @property
    def clock(self) -> int:
        """There are no parameter servers."""
        return 0

    def want(self, clock: int, *, exactly: bool) -> None:
        """There are no snapshots."""

    def receive(self, snapshot: Snapshot) -> None:
        """There are no snapshots."""
        raise AssertionError("a snapshot came, but there are no parameter servers")

    def has(self, tag: Tag) -> bool:
        """Whether the optimizer made all steps before, and none after."""
        return tag.local == self._stepped

    def at(self, tag: Tag) -> Tensors:
        """The parameters."""
        if not self.has(tag):
            raise AssertionError(f"Weights {tag} after {self._stepped} microbatches of steps.")
        return self._parameters

    @torch.no_grad()
    def finish(self, number: int, weights: Tensors, gradients: Tensors) -> None:
        """Add the gradients of a microbatch; the optimizer steps after a wave's last."""
        for name, gradient in gradients.items():
            parameter = self._parameters[name]
            before = parameter.grad
            parameter.grad = gradient if before is None else before + gradient
        if number % self._wave_size == 0:
            self._before_step(self._parameters)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self._stepped = number

    def latest(self) -> Tensors:
        """The parameters."""
        return self._parameters
