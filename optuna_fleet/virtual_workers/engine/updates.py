"""From gradients to updates that may be added up in any order: SGD, with momentum or without.

Under WSP the weights are the first ones plus a sum of updates, each from weights of its own
(HetPipe, section 5), so an update must not depend on the weights it is added to, nor on what
others add. That of SGD does not, nor does it with momentum, of which every virtual worker has its
own. As the updates of N virtual workers are summed, they go N times as far as those of one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.virtual_workers.engine.stage_messages import Tensors


class SgdRule:
    """The updates of a ``torch.optim.SGD``, whose options may change from minibatch to minibatch.

    Args:
        optimizer: Never steps; its state has the momenta.
        parameters: Of which names are known; those that the optimizer does not have stay.
        share: Of this virtual worker in what they all add up to.

    Raises:
        FleetConfigError: The optimizer is another one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[tuple[str, nn.Parameter]],
        share: float = 1.0,
    ) -> None:
        if type(optimizer) is not torch.optim.SGD:
            raise FleetConfigError(
                f"The optimizer is {type(optimizer).__name__}, but virtual workers that do not "
                "wait for each other sum up their updates, which is only right for "
                "torch.optim.SGD: others scale an update by what they saw before. Take SGD, or "
                "train with flushes."
            )
        self._optimizer = optimizer
        self._share = share
        self._parameters = dict(parameters)
        self._foreseen: deque[list[dict[str, Any]]] = deque()

    def foresee(self) -> None:
        """The next minibatch begins: its update has the options of now, whenever it is made."""
        self._foreseen.append([dict(group) for group in self._optimizer.param_groups])

    @torch.no_grad()
    def __call__(self, weights: Tensors, gradients: Tensors) -> dict[str, Tensor]:
        """As ``torch.optim.SGD.step`` does; momenta are in the optimizer's state."""
        groups = self._foreseen.popleft() if self._foreseen else self._optimizer.param_groups
        group_of = {id(p): group for group in groups for p in group["params"]}
        return {
            name: self._update(name, weights[name], gradient, group)
            for name, gradient in gradients.items()
            if (group := group_of.get(id(self._parameters[name])))
        }

    def _update(
        self, name: str, weight: Tensor, gradient: Tensor, group: Mapping[str, Any]
    ) -> Tensor:
        step = -gradient if group["maximize"] else gradient
        if group["weight_decay"]:
            step = step + group["weight_decay"] * weight
        if momentum := group["momentum"]:
            state = self._optimizer.state[self._parameters[name]]
            before = state.get("momentum_buffer")
            kept = step if before is None else momentum * before + (1 - group["dampening"]) * step
            state["momentum_buffer"] = kept
            step = step + momentum * kept if group["nesterov"] else kept
        moved: Tensor = -self._share * group["lr"] * step
        return moved


def added(some: Tensors, others: Tensors) -> dict[str, Tensor]:
    """By name, out of place; what is in one of them only is taken as it is."""
    sums = {n: some[n] + other if n in some else other for n, other in others.items()}
    return {**some, **sums}
