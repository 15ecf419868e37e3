"""What is read from, and changed in, graphs that autograd has recorded."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

Owner = TypeVar("Owner")


def owners_behind(loss: Tensor, kind: type[Owner]) -> set[Owner]:
    """The `call` of that type of each node that a loss was made by; of each branch, the last."""
    found: set[Owner] = set()
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(call := getattr(node, "call", None), kind):
            found.add(call)
        else:
            nodes += [function for function, _ in node.next_functions]
    return found


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
