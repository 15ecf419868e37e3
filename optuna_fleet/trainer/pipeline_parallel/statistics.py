"""BatchNorm's statistics, where ranks have some parts of each batch: as if one had them all.

They are running means: each part moves them a share of the way to its own. Whatever they are
before, parts in a row leave behind (1 - momentum) ** n of that and add something. So the ranks
with later parts begin with zero, and in the end all that is left of each is added up.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def can_add_up(module: nn.Module) -> bool:
    """Whether it is a BatchNorm of that kind."""
    is_one = isinstance(module, _BatchNorm) and module.running_mean is not None
    return is_one and module.momentum is not None


def leaves_something(layer: nn.Module, before: nn.Module) -> bool:
    """Whether passes have changed buffers of a copy otherwise."""
    for now, was in zip(layer.modules(), before.modules(), strict=True):
        if not can_add_up(now):
            for name, buffer in was._buffers.items():
                after = now._buffers[name]
                if buffer is not None and not (
                    after is not None and torch.equal(after.cpu(), buffer.cpu())
                ):
                    return True
    return False


class Statistics:
    """Those of this rank's layers.

    Args:
        part: The layers.
        parts: Which of a batch's parts go through them here.
        num_parts: Of a batch.
    """

    def __init__(self, part: nn.Module, parts: range, num_parts: int) -> None:
        self._part = part
        self._parts = parts
        self._num_parts = num_parts
        self._began: dict[_BatchNorm, int] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """A batch begins."""
        self._began = {module: _calls(module) for module in self._modules()}
        if self._parts.start:
            for module in self._began:
                for tensor in _of(module):
                    tensor.zero_()

    @torch.no_grad()
    def left(self) -> list[Tensor]:
        """What is left of them here at the batch's end."""
        found: list[Tensor] = []
        for module, calls in self._each():
            assert module.momentum is not None
            later = calls * (self._num_parts - self._parts.stop)
            found += [(1 - module.momentum) ** later * tensor for tensor in _of(module)]
        return found

    @torch.no_grad()
    def take(self, sums: list[Tensor]) -> None:
        """The sums over the ranks of what is left."""
        left = iter(sums)
        for module, calls in self._each():
            for tensor in _of(module):
                tensor.copy_(next(left))
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.fill_(self._began[module] + calls * self._num_parts)

    def _modules(self) -> Iterator[_BatchNorm]:
        for module in self._part.modules():
            if isinstance(module, _BatchNorm) and can_add_up(module) and module.training:
                yield module

    def _each(self) -> Iterator[tuple[_BatchNorm, int]]:
        """Modules, and how often each part goes through them."""
        for module, before in self._began.items():
            yield module, (_calls(module) - before) // len(self._parts)


def _of(module: _BatchNorm) -> Iterator[Tensor]:
    for tensor in (module.running_mean, module.running_var):
        assert tensor is not None
        yield tensor


def _calls(module: _BatchNorm) -> int:
    assert module.num_batches_tracked is not None
    return int(module.num_batches_tracked)
