"""What the parts of a batch add up to where several virtual workers share them, with flushes.

The same bits as in one pipeline, however many share the parts: sums pass from one to the next,
layer by layer, and each adds what came of its own parts, one by one in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from optuna_fleet.virtual_workers.edges import Edges
from optuna_fleet.virtual_workers.parameter_server import Directory
from optuna_fleet.virtual_workers.stage_messages import StageAddress, Tensors

_LOSS = ""  # beside names of parameters and buffers, which begin with that of their layer
_RUNNING = "running_mean", "running_var"


def has_statistics(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether it is a BatchNorm with running means, each of a fixed share."""
    if not isinstance(module, _BatchNorm) or module.momentum is None:
        return False
    return module.running_mean is not None and module.num_batches_tracked is not None


class PartSums:
    """This stage's losses, gradients and statistics of BatchNorm, of the parts of one batch.

    Those of each part are kept, in the host's memory, until the flush.

    Args:
        part: The stage's layers.
        address: Of the stage.
    """

    def __init__(
        self, part: nn.Module, directory: Directory, address: StageAddress, edges: Edges
    ) -> None:
        self._edges = edges
        self._buffers = dict(part.named_buffers())
        self._terms: dict[str, list[tuple[float, Tensor]]] = {}
        self._sparse: set[str] = set()
        self._names = [*directory.layers]
        self._rings = {
            number: directory.ranks_with(piece)
            for number, piece in enumerate(directory.layers.values())
            if piece in directory.users[address]
        }
        self._aside: list[tuple[float, list[Tensor]]] = []
        self._handles: list[Any] = []
        for name, module in part.named_modules():
            if has_statistics(module):
                begin = module.register_forward_pre_hook(self._put_aside)
                end = partial(self._note_statistics, name)
                self._handles += [begin, module.register_forward_hook(end, always_call=True)]

    def close(self) -> None:
        """The layers are what they were."""
        for handle in self._handles:
            handle.remove()

    def note(self, loss: Tensor, gradients: Tensors) -> None:
        """Of one more part."""
        self._note(_LOSS, loss)
        for name, gradient in gradients.items():
            self._note(name, gradient)

    def _note(self, name: str, added: Tensor, kept: float = 1.0) -> None:
        if added.is_sparse:
            self._sparse.add(name)
            added = added.to_dense()
        self._terms.setdefault(name, []).append((kept, added.detach().cpu()))

    @torch.no_grad()
    def add_up(self, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        """Each parameter gets its gradient, if it has one; the loss is returned."""
        of_layers = self._edges.around(self._rings, self._with_own)
        self._terms.clear()
        sums = {name: total for sums in of_layers.values() for name, total in sums.items()}
        for name, total in sums.items():
            if name in self._buffers:
                self._buffers[name].copy_(total)
            elif name != _LOSS:
                # A copy, as that which is on its way must not change.
                own = total.to(parameters[name].device, copy=True)
                parameters[name].grad = own.to_sparse(1) if name in self._sparse else own
        return sums[_LOSS].clone()

    def meet(self) -> None:
        """Before something that all do, other than a step.

        Raises:
            TrialError: Others make a step.
        """
        self._edges.around(self._rings, lambda *_: {}, is_step=False)

    def _with_own(self, number: int, before: Tensors) -> Tensors:
        found = dict(before)
        for name, terms in self._terms.items():
            if name.partition(".")[0] not in (self._names[number], _LOSS):  # that is with each
                continue
            if name not in found and name in self._buffers:
                found[name] = self._buffers[name].cpu()
            for kept, added in terms:
                total = found.get(name)
                if total is not None and kept != 1.0:
                    total = kept * total
                found[name] = added if total is None else total + added
        return found

    # -- BatchNorm --------------------------------------------------------------------------------

    def _put_aside(self, module: Any, _: Any) -> None:
        """Have the pass leave behind its own statistics, instead of a mean of these and older."""
        if module.training:
            running = [getattr(module, name) for name in _RUNNING]
            self._aside.append((module.momentum, running))
            module.momentum = 1.0
            for name, tensor in zip(_RUNNING, running, strict=True):
                setattr(module, name, torch.zeros_like(tensor))

    @torch.no_grad()
    def _note_statistics(self, path: str, module: Any, *_: Any) -> None:
        if module.training:
            share, running = self._aside.pop()
            module.momentum = share
            for name, tensor in zip(_RUNNING, running, strict=True):
                own = getattr(module, name)
                self._note(f"{path}.{name}", share * own, 1 - share)
                setattr(module, name, tensor)
            module.num_batches_tracked.sub_(1)
            one = torch.ones_like(module.num_batches_tracked)
            self._note(f"{path}.num_batches_tracked", one)
