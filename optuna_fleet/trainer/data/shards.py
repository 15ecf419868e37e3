"""What `FleetTrial.batches` returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna_fleet.trainer.data.shard_loader import ShardLoader


class Shards:
    """One epoch's batches of a data set, this rank's share of each."""

    def __init__(
        self, loader: ShardLoader, name: str, batch_size: int, drop_last: bool, movable: bool
    ) -> None:
        self._loader = loader
        self._arguments = (name, batch_size, drop_last)
        self._movable = movable

    def __len__(self) -> int:
        """Number of steps in the epoch, the same on every rank."""
        return self._loader.num_steps(*self._arguments)

    def __iter__(self) -> Iterator[Any]:
        return self._loader.read(*self._arguments, self._movable)
