"""What to make ahead of the readers: so many chunks from each cursor on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace

from optuna_fleet.pipeline.server.epochs import ABSENT, HELD, IDLE, Epoch, Pass
from optuna_fleet.pipeline.spec import ChunkKey, EpochKey


class Windows:
    """Finds what is absent there, without a look at those in which nothing has changed.

    Attributes:
        length: How many chunks.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        # Dictionaries without values are sets with an order here.
        self._open: dict[Pass, None] = {}  # something in their windows may be absent
        self._finishing: dict[Pass, None] = {}  # or at the beginning of their next epochs

    def look_at(self, reader: Pass) -> None:
        """A pass has begun or moved."""
        self._open[reader] = None
        if reader.continues and reader.cursor + self.length > len(reader.epoch.status):
            self._finishing[reader] = None

    def look_again(self, passes: Iterable[Pass]) -> None:
        """A chunk of what they read is there no more."""
        self._open.update(dict.fromkeys(passes))

    def forget(self, reader: Pass) -> None:
        """A pass has ended."""
        self._open.pop(reader, None)
        self._finishing.pop(reader, None)

    def ready(self, passes: Iterable[Pass]) -> tuple[int, int]:
        """Returns how many chunks are there ahead of passes, and how many could be."""
        num_ready = num_ahead = 0
        for each in passes:
            ahead = each.epoch.status[each.cursor + 1 : each.cursor + self.length]
            num_ahead += len(ahead)
            num_ready += ahead.count(IDLE) + ahead.count(HELD)
        return num_ready, num_ahead

    def nearest(self) -> Iterator[ChunkKey]:
        """Yields what is absent in the windows, the nearest to a cursor first."""
        found = []
        for number, each in enumerate([*self._open]):
            chunk = each.epoch.status.find(ABSENT, each.cursor, each.cursor + self.length)
            if chunk >= 0:
                found.append((chunk - each.cursor, number, each))
            else:
                del self._open[each]
        heapify(found)
        while found:
            distance, number, each = found[0]
            yield each.epoch.chunk(each.cursor + distance)
            begin, end = each.cursor + distance + 1, each.cursor + self.length
            if (chunk := each.epoch.status.find(ABSENT, begin, end)) >= 0:
                heapreplace(found, (chunk - each.cursor, number, each))
            else:
                heappop(found)

    def upcoming(self, epochs: Mapping[EpochKey, Epoch]) -> Iterator[ChunkKey]:
        """Yields absent chunks at the beginning of epochs that passes will go on to."""
        for each in [*self._finishing]:
            num_chunks = len(each.epoch.status)
            key = each.epoch.key._replace(epoch=each.epoch.key.epoch + 1)
            epoch = epochs.get(key) or Epoch(key, bytearray(num_chunks))
            chunk, end = -1, each.cursor + self.length - num_chunks
            while (chunk := epoch.status.find(ABSENT, chunk + 1, end)) >= 0:
                yield epoch.chunk(chunk)
            del self._finishing[each]  # until it moves
