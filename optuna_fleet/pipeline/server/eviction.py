"""The chunks that are resident, who pins them, and which to give up first."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from optuna_fleet.pipeline.spec import ChunkKey, Place

_LATEST = 1 << 62
"""Later than any epoch."""


class _Victim(NamedTuple):
    """A chunk that may be dropped; the largest is dropped first.

    Attributes:
        unneeded: 1 if no open pass will come to it.
        rank: For unneeded chunks the epoch (-1 for fixed data sets), as every new trial starts at
            epoch 0, or in a rolling order with the latest; for needed ones how many chunks the
            nearest reader is away.
        chunk: Its number: a reader to come begins at chunk 0, so the last is missed latest.
    """

    unneeded: int
    rank: int
    chunk: int


@dataclass(slots=True)
class _Epoch:
    """How many chunks of an epoch there are, which nobody pins, and the cursors of its passes."""

    rank: int
    num_chunks: int = 0
    idle: set[int] = field(default_factory=set)
    cursors: dict[Hashable, int] = field(default_factory=dict)

    def victim(self, spare: int) -> _Victim | None:
        if not self.idle:
            return None
        cursors = sorted(self.cursors.values())
        behind = [chunk for chunk in self.idle if chunk < cursors[0]] if cursors else self.idle
        if behind:
            return _Victim(1, self.rank, max(behind))
        return max(self._needed(cursors, spare), default=None)

    def _needed(self, cursors: list[int], spare: int) -> Iterable[_Victim]:
        for chunk in self.idle:
            distance = chunk - cursors[bisect_right(cursors, chunk) - 1]
            if distance >= spare:
                yield _Victim(0, distance, chunk)


class EvictionPolicy:
    """Accounts for resident chunks and ranks them.

    Chunks no open pass will come to go first, latest epoch first (in a rolling order the oldest,
    as followers are yet to come to the latest) and fixed data sets last; then
    those farthest ahead of every reader. What a pass is certain to read is worth more than what a
    trial to come may read.

    Args:
        fixed: Names of the data sets whose only epoch is 0.
        rolling: Readers to come begin where the others are.
    """

    def __init__(self, fixed: Iterable[str] = (), *, rolling: bool = False) -> None:
        self._fixed = frozenset(fixed)
        self._rolling = rolling
        self._chunks: dict[ChunkKey, tuple[int, Place]] = {}
        self._pins: Counter[ChunkKey] = Counter()
        self._epochs: dict[tuple[str, int], _Epoch] = {}
        self._total: dict[Place, int] = {"memory": 0, "disk": 0}
        self._idle: dict[Place, int] = {"memory": 0, "disk": 0}

    def total_bytes(self, place: Place) -> int:
        """Returns the bytes of all resident chunks."""
        return self._total[place]

    def idle_bytes(self, place: Place) -> int:
        """Returns the bytes of those that nobody pins."""
        return self._idle[place]

    @property
    def num_idle(self) -> int:
        """Number of chunks that nobody pins."""
        return len(self._chunks) - len(self._pins)

    def num_chunks(self, name: str, epoch: int) -> int:
        """Returns how many chunks of an epoch are resident."""
        record = self._epochs.get((name, epoch))
        return record.num_chunks if record else 0

    def place(self, key: ChunkKey) -> Place:
        """Returns where a resident chunk is."""
        return self._chunks[key][1]

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._chunks

    def set_cursor(self, reader: Hashable, name: str, epoch: int, chunk: int) -> None:
        """Notes the first chunk of the epoch that ``reader`` still needs."""
        self._epoch(name, epoch).cursors[reader] = chunk

    def remove_cursor(self, reader: Hashable, name: str, epoch: int) -> None:
        """The reader needs no more of this epoch."""
        del self._epochs[name, epoch].cursors[reader]
        self._forget_if_empty(name, epoch)

    def add(self, key: ChunkKey, nbytes: int, place: Place) -> None:
        """A chunk is there; nobody pins it yet."""
        self._chunks[key] = (nbytes, place)
        self._total[place] += nbytes
        self._idle[place] += nbytes
        record = self._epoch(key.name, key.epoch)
        record.num_chunks += 1
        record.idle.add(key.chunk)

    def pin(self, key: ChunkKey) -> None:
        """One more pass holds the chunk; held chunks are never dropped."""
        self._pins[key] += 1
        if self._pins[key] == 1:
            nbytes, place = self._chunks[key]
            self._idle[place] -= nbytes
            self._epoch(key.name, key.epoch).idle.discard(key.chunk)

    def unpin(self, key: ChunkKey) -> None:
        """One pass less holds the chunk."""
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]
            nbytes, place = self._chunks[key]
            self._idle[place] += nbytes
            self._epoch(key.name, key.epoch).idle.add(key.chunk)

    def drop_worst(self, *, spare: int) -> ChunkKey | None:
        """Forgets the chunk least worth keeping and returns it; None if there is no candidate.

        Args:
            spare: So many chunks from the cursor of every open pass on are not touched.
        """
        best: tuple[_Victim, tuple[str, int]] | None = None
        for place, record in self._epochs.items():
            victim = record.victim(spare)
            if victim is not None and (best is None or victim > best[0]):
                best = (victim, place)
        if best is None:
            return None
        key = ChunkKey(*best[1], best[0].chunk)
        nbytes, where = self._chunks.pop(key)
        self._total[where] -= nbytes
        self._idle[where] -= nbytes
        record = self._epochs[best[1]]
        record.num_chunks -= 1
        record.idle.discard(key.chunk)
        self._forget_if_empty(*best[1])
        return key

    def _epoch(self, name: str, epoch: int) -> _Epoch:
        record = self._epochs.get((name, epoch))
        if record is None:
            record = self._epochs[name, epoch] = _Epoch(rank=self._rank(name, epoch))
        return record

    def _rank(self, name: str, epoch: int) -> int:
        if name in self._fixed:
            return -1
        return _LATEST - epoch if self._rolling else epoch

    def _forget_if_empty(self, name: str, epoch: int) -> None:
        record = self._epochs[name, epoch]
        if not record.num_chunks and not record.cursors:
            del self._epochs[name, epoch]
