"""What virtual workers come to agree on beside the weights: momenta and statistics, as means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optuna_fleet.trainer.pipeline_parallel.directory import Directory
from optuna_fleet.trainer.pipeline_parallel.messages import StageAddress, Tensors
from optuna_fleet.trainer.pipeline_parallel.whole import parameters_of, part_of

BUFFER = "buffer "
_MOMENTUM = "momentum of "


def names_of(part: nn.Module) -> tuple[str, ...]:
    """All that virtual workers add up of some layers."""
    parameters = tuple(name for name, _ in part.named_parameters())
    momenta = (_MOMENTUM + name for name in parameters)
    return (*parameters, *momenta, *(BUFFER + name for name in _buffers(part)))


def names_by_piece(
    model: nn.Sequential, directory: Directory, address: StageAddress
) -> dict[int, tuple[str, ...]]:
    """Those of each piece of a stage."""
    return {
        place: names_of(part_of(model, *directory.pieces[place]))
        for place in directory.users[address]
    }


class Agreement:
    """What a stage gives to a sum over virtual workers, and takes from it.

    Momenta of SGD are linear in the gradients: their mean is that of one virtual worker which
    trains on whole batches. Buffers that passes change, as BatchNorm's statistics, go as far as
    the mean of what virtual workers have changed; others stay what they are, to the bit.

    Args:
        optimizer: Whose momenta differ between virtual workers; None if they do not.
    """

    def __init__(
        self, part: nn.Module, optimizer: torch.optim.Optimizer | None, share: float
    ) -> None:
        self._part = part
        self._trained = parameters_of(part)
        self._optimizer = optimizer
        self._share = share
        self._before = {name: buffer.clone() for name, buffer in _buffers(part).items()}

    @torch.no_grad()
    def rest(self) -> dict[str, Tensor]:
        """To be summed up over the virtual workers."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._trained.items():
            state = self._state.get(parameter, {})
            if (momentum := state.get("momentum_buffer")) is not None:
                found[_MOMENTUM + name] = self._share * momentum
        for name, buffer in _buffers(self._part).items():
            before = self._before[name]
            moved = torch.where(buffer == before, 0.0, buffer - before)  # also of infinite ones
            found[BUFFER + name] = self._share * moved
        return found

    @torch.no_grad()
    def take(self, agreed: Tensors) -> None:
        """Weights, and sums of `rest`."""
        for name, parameter in self._trained.items():
            if name in agreed:
                parameter.copy_(agreed[name])
            if _MOMENTUM + name in agreed:
                self._state[parameter]["momentum_buffer"] = agreed[_MOMENTUM + name].clone()
        for name, buffer in _buffers(self._part).items():
            if BUFFER + name in agreed:
                buffer.copy_(self._before[name] + agreed[BUFFER + name])
                self._before[name] = buffer.clone()

    @property
    def _state(self) -> Mapping[Any, dict[str, Tensor]]:
        return {} if self._optimizer is None else self._optimizer.state


def _buffers(part: nn.Module) -> dict[str, Tensor]:
    return {name: b for name, b in part.named_buffers() if b.is_floating_point()}
