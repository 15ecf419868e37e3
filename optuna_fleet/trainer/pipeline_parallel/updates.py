"""From gradients to updates that may be added up in any order: SGD, with momentum or without.

Under WSP the weights are the first ones plus a sum of updates, each from weights of its own
(HetPipe, section 5), so an update must not depend on the weights it is added to, nor on what
others add. That of SGD does not, nor does it with momentum, of which every virtual worker has its
own. As the updates of N virtual workers are summed, they go N times as far as those of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.pipeline_parallel.messages import Tensors


class UpdateRule(Protocol):
    """What to add to the weights after a minibatch."""

    def __call__(self, weights: Tensors, gradients: Tensors) -> dict[str, Tensor]:
        """The updates of those parameters that have a gradient, by the weights it was taken at."""


class SgdRule:
    """The updates of a ``torch.optim.SGD``, whose options may change from minibatch to minibatch.

    Args:
        optimizer: Is only read.
        parameters: Of which names are known; those that the optimizer does not have stay.

    Raises:
        FleetConfigError: The optimizer is another one.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> None:
        if type(optimizer) is not torch.optim.SGD:
            raise FleetConfigError(
                f"The optimizer is {type(optimizer).__name__}, but virtual workers that do not "
                "wait for each other sum up their updates, which is only right for "
                "torch.optim.SGD: others scale an update by what they saw before. Take SGD, or "
                "train with flushes."
            )
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._groups: dict[str, Mapping[str, Any]] = {
            name: group_of[id(p)] for name, p in parameters if id(p) in group_of
        }
        self._momenta: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, weights: Tensors, gradients: Tensors) -> dict[str, Tensor]:
        """As ``torch.optim.SGD.step`` does."""
        return {
            name: self._update(name, weights[name], gradient, self._groups[name])
            for name, gradient in gradients.items()
            if name in self._groups
        }

    def _update(
        self, name: str, weight: Tensor, gradient: Tensor, group: Mapping[str, Any]
    ) -> Tensor:
        step = -gradient if group["maximize"] else gradient
        if group["weight_decay"]:
            step = step + group["weight_decay"] * weight
        if momentum := group["momentum"]:
            before = self._momenta.get(name)
            kept = step if before is None else momentum * before + (1 - group["dampening"]) * step
            self._momenta[name] = kept
            step = step + momentum * kept if group["nesterov"] else kept
        moved: Tensor = -group["lr"] * step
        return moved
