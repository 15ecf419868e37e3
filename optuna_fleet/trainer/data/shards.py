"""What `FleetTrial.batches` returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from optuna_fleet.trainer.data.reading import Asked

if TYPE_CHECKING:
    from optuna_fleet.trainer.data.shard_loader import ShardLoader


class Shards:
    """One epoch's batches, this rank's share of each."""

    def __init__(self, loader: ShardLoader, asked: Asked, *, movable: bool) -> None:
        self._loader = loader
        self._asked = asked
        self._movable = movable

    @property
    def most_samples(self) -> int:
        """Of a batch, over all ranks."""
        return min(self._asked.batch_size, self._loader.num_samples(self._asked.name))

    def __len__(self) -> int:
        """Number of steps in the epoch, the same on every rank."""
        return self._loader.num_steps(self._asked)

    def __iter__(self) -> Iterator[Any]:
        return self._loader.read(self._asked, movable=self._movable)
