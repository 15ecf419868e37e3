"""What to make ahead of the readers: the absent chunk that is nearest to any of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush

from optuna_fleet.pipeline.server.epochs import Epoch, Pass, Size
from optuna_fleet.pipeline.spec import ChunkKey, EpochKey

_SLACK = 64


class Lookahead:
    """Finds it without looking at the chunks that are there: each pass has a frontier.

    So many chunks ahead of each open pass are its ``window``; ``sizes`` say how data sets are cut.

    Attributes:
        passes: Those that are open.
    """

    def __init__(
        self,
        window: int,
        epochs: Mapping[EpochKey, Epoch],
        sizes: Mapping[str, Size],
    ) -> None:
        self._window = window
        self._epochs = epochs
        self._sizes = sizes
        self._nearest: list[tuple[int, int, Pass]] = []  # also outdated entries
        self._finishing: dict[Pass, None] = {}
        self.passes: set[Pass] = set()

    def add(self, record: Pass) -> None:
        """A pass begins."""
        self.passes.add(record)
        record.frontier = record.cursor
        self.update(record)

    def remove(self, record: Pass) -> None:
        """A pass ends."""
        record.distance = None
        self.passes.discard(record)
        self._finishing.pop(record, None)

    def update(self, record: Pass) -> None:
        """The cursor of a pass has moved, or what lies ahead of it has changed."""
        epoch, cursor = record.epoch, record.cursor
        if record.continues and cursor + self._window > epoch.num_chunks:
            self._finishing[record] = None
        end = self._end(record)
        chunk = max(cursor, record.frontier)
        while chunk < end and epoch.is_known(chunk):
            chunk += 1
        record.frontier = chunk
        distance = chunk - cursor if chunk < end else None
        if distance is not None and distance != record.distance:
            heappush(self._nearest, (distance, record.number, record))
        record.distance = distance
        if len(self._nearest) > 4 * len(self.passes) + _SLACK:
            self._nearest = [
                (each.distance, each.number, each)
                for each in self.passes
                if each.distance is not None
            ]
            heapify(self._nearest)

    def absent(self, epoch: Epoch, chunk: int) -> None:
        """A chunk is not there any more, and not in production."""
        if epoch.cursors and chunk >= epoch.cursors[0]:
            for record in epoch.passes.values():
                if record.cursor <= chunk < record.frontier:
                    record.frontier = chunk
                    self.update(record)

    def next(self) -> ChunkKey | None:
        """Returns the absent chunk in a window that is nearest to a cursor; None if all are there.

        Of several the one of the pass that was opened first.
        """
        while self._nearest:
            distance, _, record = self._nearest[0]
            if distance == record.distance:
                chunk = record.cursor + distance
                if not record.epoch.is_known(chunk):
                    return record.epoch.key(chunk)
            heappop(self._nearest)
            if distance == record.distance:
                record.distance = None
                self.update(record)
        return None

    def all(self) -> Iterator[ChunkKey]:
        """Yields all that is absent in a window, the nearest first."""
        records = sorted(self.passes, key=lambda record: record.number)
        for distance in range(self._window if records else 0):
            for record in records:
                chunk = record.cursor + distance
                if chunk < record.epoch.num_chunks and not record.epoch.is_known(chunk):
                    yield record.epoch.key(chunk)

    def upcoming(self) -> ChunkKey | None:
        """Returns an absent chunk at the beginning of an epoch that a pass will go on to."""
        for record in [*self._finishing]:
            name, number, owner = record.epoch.named
            following = self._epochs.get(EpochKey(name, number + 1, owner))
            beyond = record.cursor + self._window - record.epoch.num_chunks
            beyond = min(beyond, self._sizes[name].num_chunks)
            chunk = record.next_frontier
            while chunk < beyond and following is not None and following.is_known(chunk):
                chunk += 1
            record.next_frontier = chunk
            if chunk < beyond:
                return ChunkKey(name, number + 1, chunk, owner)
            del self._finishing[record]
        return None

    def ready(self) -> tuple[int, int]:
        """Returns how many chunks are there ahead of the passes, and how many could be."""
        num_ready = num_ahead = 0
        for record in self.passes:
            first, end = record.cursor + 1, self._end(record)
            num_ahead += max(0, end - first)
            in_production = sum(first <= c < record.frontier for c in record.epoch.producing)
            num_ready += max(0, record.frontier - first - in_production)
        return num_ready, num_ahead

    def _end(self, record: Pass) -> int:
        return min(record.cursor + self._window, record.epoch.num_chunks)
