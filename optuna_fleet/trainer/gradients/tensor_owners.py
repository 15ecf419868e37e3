"""Whose a tensor is: told by where it lies in memory, or by the graph that it was made by.

Nodes that scale gradients are what a graph tells it by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from optuna_fleet.trainer.nested import tensors_in

Owner = TypeVar("Owner")


class Scaled(torch.autograd.Function):
    """The same value; its gradient times `factor()`, if any, asked for when that is there."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, call: object, factor: Callable[[], Tensor | float | None]
    ) -> Tensor:
        """Keep what `backward` needs, and `call`, which `owners_behind` looks for."""
        ctx.call, ctx.factor = call, factor
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


class Places(Generic[Owner]):
    """Where in memory tensors lie, and whose they are."""

    def __init__(self) -> None:
        self._found: dict[int, list[_Place[Owner]]] = {}
        self._num_added = 0

    def add(self, owner: Owner, data: Any) -> None:
        """The tensors in `data`, nested, are `owner`'s."""
        for tensor in _dense(data):
            storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            place = _Place(storage, tensor.nbytes, owner)
            others = [p for p in self._at(tensor) if p.num_bytes != tensor.nbytes]
            self._found[tensor.data_ptr()] = [*others, place]
        self._num_added += 1
        if self._num_added % 256 == 0:
            kept = ((at, [*filter(_Place.is_there, ps)]) for at, ps in self._found.items())
            self._found = {at: places for at, places in kept if places}

    def owners(self, inputs: Any) -> set[Owner]:
        """Whose these tensors are, or what they are views of from its first element on."""
        found = set()
        for tensor in _dense(inputs):
            places = self._at(tensor)
            exact = [place for place in places if place.num_bytes == tensor.nbytes]
            if exact or len(places) == 1:
                found.add((exact or places)[0].owner)
        return found

    def _at(self, tensor: Tensor) -> list[_Place[Owner]]:
        return [place for place in self._found.get(tensor.data_ptr(), ()) if place.is_there()]


@dataclass(frozen=True)
class _Place(Generic[Owner]):
    """The memory of a tensor, whose address means it for as long as its storage is there."""

    storage: StorageWeakRef
    num_bytes: int
    owner: Owner

    def is_there(self) -> bool:
        return not self.storage.expired()  # type: ignore[no-untyped-call]


def _dense(data: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tensors_in(data) if leaf.layout is torch.strided and leaf.numel())
