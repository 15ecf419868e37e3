"""What is changed in graphs that autograd has recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def drop_nans(loss: Tensor, is_unweighted: Tensor) -> None:
    """Of a rank without any weight nothing must count, also where its loss is 0 / 0.

    Such a quotient lies between the loss and the sums that it is made of: among scalars.
    """

    def cleaned(grads: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        return tuple(
            None if grad is None else torch.where(is_unweighted, torch.zeros_like(grad), grad)
            for grad in grads
        )

    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or any(item.shape for item in node._input_metadata):
            continue
        node.register_hook(cleaned)
        nodes += [function for function, _ in node.next_functions]
