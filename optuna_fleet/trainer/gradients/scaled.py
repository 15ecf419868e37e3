"""Tensors whose gradients are scaled on their way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Scaled(torch.autograd.Function):
    """The same value; its gradient times `factor()`, if any, asked for when that is there."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, call: object, factor: Callable[[], Tensor | float | None]
    ) -> Tensor:
        """Keep what `backward` needs; `call` is whatever it is of."""
        ctx.call, ctx.factor = call, factor  # `owners_behind` looks for the call
        return value.detach()  # which, unlike a view, may be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Scale the gradient."""
        factor = ctx.factor()
        return grad if factor is None else (grad * factor).to(grad.dtype), None, None


def drop_nans(loss: Tensor, is_unweighted: Tensor) -> None:
    """Of a rank without any weight nothing must count, also where its loss is 0 / 0.

    Such a quotient lies between the loss and the sums that it is made of: among scalars.
    """
    if loss.grad_fn is not None:
        _clean(loss.grad_fn, is_unweighted)


def _clean(node: Any, is_unweighted: Tensor) -> None:
    """Clean what a node of scalars hands on, and those of scalars that it hands it to."""
    following = [function for function, _ in node.next_functions]

    def cleaned(grads: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        for function, grad in zip(following, grads, strict=True):
            if function is not None and grad is not None and not grad.shape:
                _clean(function, is_unweighted)
        return tuple(
            None if grad is None else torch.where(is_unweighted, torch.zeros_like(grad), grad)
            for grad in grads
        )

    node.register_hook(cleaned)
