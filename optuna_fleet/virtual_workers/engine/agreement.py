"""What virtual workers come to agree on beside the weights: momenta and buffers, as means.

And BatchNorm's statistics, where ranks have some parts of each batch: as if one had them all. They
are running means: each part moves them a share of the way to its own. Whatever they are before,
parts in a row leave behind (1 - momentum) ** n of that and add something. So the ranks with later
parts begin with zero, and in the end all that is left of each is added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from optuna_fleet.virtual_workers.engine.directory import Directory
from optuna_fleet.virtual_workers.engine.stage_messages import StageAddress, Tensors
from optuna_fleet.virtual_workers.engine.whole import parameters_of, part_of

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
            before = self._before.get(name)
            if before is None or before.shape != buffer.shape:
                continue  # the pass has made it
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


def can_add_up(module: nn.Module) -> bool:
    """Whether it is a BatchNorm of that kind."""
    if not isinstance(module, _BatchNorm) or module.momentum is None:
        return False
    return module.running_mean is not None and module.num_batches_tracked is not None


def writes_weights(module: nn.Module) -> bool:
    """Whether its passes do, other than training."""
    embeddings = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return any(embedding.max_norm for embedding in embeddings)


def leaves_something(layer: nn.Module, before: nn.Module) -> bool:
    """Whether passes have changed buffers of a copy otherwise, or made some, or write weights."""
    if writes_weights(layer):
        return True
    kept = dict(before.named_buffers())
    return any(
        name not in kept or not torch.equal(buffer.cpu(), kept[name].cpu())
        for path, module in layer.named_modules()
        if not can_add_up(module)
        for name, buffer in module.named_buffers(path, recurse=False)
    )


class Statistics:
    """Those of this rank's layers.

    Args:
        worker: This virtual worker: those before it have earlier parts of each batch.
    """

    def __init__(self, part: nn.Module, worker: int, num_workers: int) -> None:
        self._part = part
        self._worker = worker
        self._num_workers = num_workers
        self._began: dict[str, int] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """A batch begins."""
        self._began = {name: _calls(module) for name, module in self._modules()}
        if self._worker > 0:
            for _, module in self._modules():
                for tensor in _of(module).values():
                    tensor.zero_()

    def calls(self) -> dict[str, Tensor]:
        """How often each module was called, here in this rank's place; by names of a buffer.

        Ranks need not call it alike: a layer may look at a part before it does.
        """
        found: dict[str, Tensor] = {}
        for name, module in self._modules():
            numbers = torch.zeros(self._num_workers)
            numbers[self._worker] = _calls(module) - self._began[name]
            found[_key(name, "running_mean")] = numbers
        return found

    @torch.no_grad()
    def left(self, calls: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is left of them here at the batch's end, by names as `Agreement` has them.

        Args:
            calls: The sums over the ranks.
        """
        found: dict[str, Tensor] = {}
        for name, module in self._modules():
            assert module.momentum is not None
            later = calls[_key(name, "running_mean")][self._worker + 1 :].sum().item()
            for of, tensor in _of(module).items():
                found[_key(name, of)] = (1 - module.momentum) ** later * tensor
        return found

    @torch.no_grad()
    def take(self, sums: Mapping[str, Tensor], calls: Mapping[str, Tensor]) -> None:
        """The sums over the ranks of what is left."""
        for name, module in self._modules():
            for of, tensor in _of(module).items():
                tensor.copy_(sums[_key(name, of)])
            assert module.num_batches_tracked is not None
            called = int(calls[_key(name, "running_mean")].sum())
            module.num_batches_tracked.fill_(self._began[name] + called)

    def _modules(self) -> Iterator[tuple[str, _BatchNorm]]:
        for name, module in self._part.named_modules():
            if isinstance(module, _BatchNorm) and can_add_up(module) and module.training:
                yield name, module


def _key(name: str, of: str) -> str:
    return f"{BUFFER}{name}.{of}"


def _of(module: _BatchNorm) -> dict[str, Tensor]:
    assert module.running_mean is not None
    assert module.running_var is not None
    return {"running_mean": module.running_mean, "running_var": module.running_var}


def _calls(module: _BatchNorm) -> int:
    assert module.num_batches_tracked is not None
    return int(module.num_batches_tracked)
