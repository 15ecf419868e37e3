"""The chunks that are there: who holds them, and which go to make room."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import attrgetter

from optuna_fleet.pipeline.server.allocator import Space, pages
from optuna_fleet.pipeline.server.epochs import Epoch, Order, Place
from optuna_fleet.pipeline.server.lookahead import Lookahead
from optuna_fleet.pipeline.spec import EpochKey

BRIEF_SHARE = 0.5
"""Chunks beyond this part of the budget are only lent briefly, and not before they are needed.

So readers that stand still can't keep the others from going on.
"""

_SHRINK = 8
"""A chunk gives back what it does not need, if that is more than one part in so many."""


_rank = attrgetter("rank")


class Residents:
    """Keeps account of them; ``lookahead`` is told of those that are gone.

    First to go are those that no open pass will come to, by the rank of their epochs, the last
    chunk first; then those that are farthest ahead of every reader. What a pass is certain to read
    is worth more than what a trial to come may read.

    Attributes:
        num_dropped: How many made room for others.
    """

    def __init__(
        self,
        space: Space,
        epochs: dict[EpochKey, Epoch],
        lookahead: Lookahead,
    ) -> None:
        self._space = space
        self._epochs = epochs
        self._lookahead = lookahead
        self._unneeded: list[Epoch] = []  # those that have such chunks, by rank
        self.num_dropped = 0

    @property
    def lent_bytes(self) -> int:
        """Bytes of the chunks that passes hold."""
        return self._space.lent

    def update(self, epoch: Epoch) -> None:
        """The idle chunks of an epoch have changed, or the cursors of its passes."""
        if epoch.is_unneeded == epoch.has_unneeded:
            return
        epoch.is_unneeded = epoch.has_unneeded
        if epoch.is_unneeded:
            insort(self._unneeded, epoch, key=_rank)
        else:
            del self._unneeded[bisect_left(self._unneeded, epoch.rank, key=_rank)]

    def add(self, epoch: Epoch, order: Order, nbytes: int) -> None:
        """A chunk of so many bytes is there now, as it was ordered."""
        assert nbytes <= order.max_bytes, (nbytes, order)
        taken = order.max_bytes
        if (unused := taken - pages(nbytes)) > taken // _SHRINK:
            taken -= unused
            self._space.free(order.address + taken, unused)
        epoch.chunks[order.key.chunk] = Place(order.address, taken)
        epoch.rest(order.key.chunk)
        self._space.idle += taken
        self.update(epoch)

    def pin(self, epoch: Epoch, chunk: int) -> None:
        """One more pass holds a chunk."""
        epoch.pins[chunk] += 1
        if epoch.pins[chunk] == 1:
            place = epoch.chunks[chunk]
            epoch.wake(chunk)
            self._space.idle -= place.nbytes
            self._space.lent += place.nbytes
            self._space.held.add(place)
            self.update(epoch)

    def unpin(self, epoch: Epoch, chunk: int) -> None:
        """One pass less holds a chunk."""
        epoch.pins[chunk] -= 1
        if epoch.pins[chunk]:
            return
        del epoch.pins[chunk]
        place = epoch.chunks[chunk]
        self._space.held.remove(place)
        self._space.lent -= place.nbytes
        self._space.idle += place.nbytes
        epoch.rest(chunk)
        self.update(epoch)

    def is_short(self, epoch: Epoch, chunk: int, largest: int) -> bool:
        """Whether what is left beside this and the lent chunks is too little for comfort.

        The ``largest`` chunk must still find room in one piece.
        """
        place, space = epoch.chunks[chunk], self._space
        lent = space.lent + (0 if epoch.pins[chunk] else place.nbytes)
        if lent > BRIEF_SHARE * space.nbytes:
            return True
        if space.nbytes - lent >= largest * (len(space.held) + 2):
            return False  # however they lie, one of the pieces between them is as large
        return _room(space.held | {place}, space.nbytes) < largest

    def make_room(self, nbytes: int, *, spare: int) -> int | None:
        """Drops chunks until so many bytes fit in one piece, and returns where they do.

        Returns:
            None if they do not fit without what is held, or is one of the ``spare`` chunks from
            the cursor of an open pass on.
        """
        address = self._space.allocate(nbytes)
        if address is None and not self._space.could_fit(nbytes):
            return None  # known beforehand: not even without all idle chunks
        while address is None and (worst := self._worst(spare)) is not None:
            self._drop(*worst)
            address = self._space.allocate(nbytes)
        return address

    def drop_idle(self, epoch: Epoch) -> None:
        """Drops what nobody holds of an epoch: nobody else will come to it."""
        for chunk in [*epoch.idle]:
            self._drop(epoch, chunk)

    def forget(self, epoch: Epoch) -> None:
        """Forgets an epoch of which nothing is left."""
        if epoch.is_forgotten:
            self._epochs.pop(epoch.named, None)

    def _worst(self, spare: int) -> tuple[Epoch, int] | None:
        """The chunk to give up first."""
        if self._unneeded:
            return self._unneeded[-1], self._unneeded[-1].last_unneeded()
        found = [
            (distance, chunk, epoch)
            for epoch in {record.epoch for record in self._lookahead.passes}
            if epoch.idle
            for distance, chunk in epoch.farthest()
            if distance >= spare
        ]
        if not found:
            return None
        _, chunk, epoch = max(found, key=lambda each: (*each[:2], each[2].rank[1:]))
        return epoch, chunk

    def _drop(self, epoch: Epoch, chunk: int) -> None:
        place = epoch.chunks.pop(chunk)
        epoch.wake(chunk)
        self.num_dropped += 1
        self._space.idle -= place.nbytes
        self._space.free(*place)
        self._lookahead.absent(epoch, chunk)
        self.update(epoch)
        self.forget(epoch)


def _room(lent: Iterable[tuple[int, int]], end: int) -> int:
    """The most bytes in one piece, up to ``end``, that are not lent."""
    room = begin = 0
    for address, nbytes in sorted(lent):
        room, begin = max(room, address - begin), address + nbytes
    return max(room, end - begin)
