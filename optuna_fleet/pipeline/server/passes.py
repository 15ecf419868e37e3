"""What is known of a pass: a reader's way through one epoch of a data set."""

from __future__ import annotations

from dataclasses import dataclass, field

from optuna_fleet.pipeline.spec import ChunkKey


@dataclass(slots=True)
class Pass:
    """A pass that is open.

    Attributes:
        name: The data set.
        epoch: Which epoch.
        cursor: The first chunk that is still needed.
        continues: The reader will go on with the next epoch.
        wanted: Chunks it waits for.
        held: Chunks that it was given.
        recalled: It was asked to copy those and give them back.
    """

    name: str
    epoch: int
    cursor: int
    continues: bool
    wanted: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    recalled: bool = False

    def key(self, chunk: int) -> ChunkKey:
        """Returns the name of a chunk of its epoch."""
        return ChunkKey(self.name, self.epoch, chunk)
