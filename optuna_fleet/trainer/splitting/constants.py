"""What tensors and numbers that do not depend on the batch may yet stand for on a part of it.

A loss may have the batch size in it as a constant: ``torch.arange(batch_size)``, a list of as many
numbers, labels that came through NumPy. They are taken as they are, unless a part of the batch
fails with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optuna_fleet.trainer.randomness import has_generator
from optuna_fleet.trainer.splitting.precision import exact
from optuna_fleet.trainer.splitting.tracked import escaped

FACTORIES = {"arange", "zeros", "ones", "full", "eye"}
"""Functions that make a tensor of numbers, the number of samples perhaps among them."""

Take = Callable[[Any, int], Any]
"""What a constant is taken for in a world: one of the methods of `Constants`."""


@dataclass(slots=True, eq=False)
class Constants:
    """The constants of the batches that are followed.

    Attributes:
        dtype: What worlds compute in.
        size: Samples of the batch.
        sizes: Those that are followed in each world.
        are_guessed: Some number was taken for one that depends on the batch.
    """

    dtype: torch.dtype
    size: int = 0
    sizes: tuple[int, int, int] = (0, 0, 0)
    are_guessed: bool = False
    _guesses: dict[int, tuple[Tensor, Sequence[Any]]] = field(default_factory=dict)

    def begin(self, size: int, most: int) -> None:
        """Batches are of that size; no more than `most` samples of each are followed."""
        first = -(-2 * most // 5)
        self.size, self.sizes = size, (most, first, most - first)

    def clear(self) -> None:
        """Forget all tensors."""
        self._guesses.clear()

    def rows(self, value: Any, world: int) -> Any:
        """Those of the batch, or of a list for its samples, that a world has."""
        most, first, _ = self.sizes
        return value[(slice(0, most), slice(0, first), slice(first, most))[world]]

    def guess(self, tensor: Tensor, in_worlds: Sequence[Any]) -> None:
        """A constant that is this in the worlds if it was made of the number of samples."""
        self._guesses[id(tensor)] = tensor, in_worlds

    def may_depend(self, name: str, values: Any) -> bool:
        """Whether a function of these, nested, may be of the number of samples."""
        if has_generator(values):
            return False
        leaves = pytree.tree_leaves(values)
        return any(isinstance(x, Tensor) and id(x) in self._guesses for x in leaves) or (
            name in FACTORIES and any(self.scaled(x, 1) != x for x in leaves)
        )

    def scaled(self, value: Any, world: int) -> Any:
        """A whole number as a multiple of the number of samples, if it is one."""
        if type(value) is int and value and value % self.size == 0:
            return value // self.size * self.sizes[world]
        return value

    def escaped_in(self, value: Any, world: int) -> Any:
        """A plain number, which may be one that escaped, or a multiple: ``len(x) * width``."""
        if value in escaped:
            found = escaped[value][world]
        elif self.size in escaped and value % self.size == 0:
            found = value // self.size * escaped[self.size][world]
        else:
            return value
        self.are_guessed = True
        return found

    def as_it_is(self, value: Any, world: int) -> Any:
        """A copy of a tensor, any other value itself."""
        return exact(value, self.dtype) if isinstance(value, Tensor) else value

    def as_guessed(self, value: Any, world: int) -> Any:
        """What `guess` was told of a tensor."""
        guess = self._guesses.get(id(value)) if isinstance(value, Tensor) else None
        return self.as_it_is(value, world) if guess is None else guess[1][world]

    def as_rows(self, value: Any, world: int) -> Any:
        """Something for each sample: what a world's samples have of it."""
        is_tensor = isinstance(value, Tensor) and value.dim() and len(value) == self.size
        if is_tensor or self.is_list(value):
            value = self.rows(value, world)
        return self.as_it_is(value, world)

    def is_list(self, value: Any) -> bool:
        """Whether it has a number for each sample."""
        return (
            isinstance(value, (list, tuple))
            and len(value) == self.size
            and all(type(one) in (int, float) for one in value)
        )
