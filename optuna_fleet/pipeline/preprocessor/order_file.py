"""The orders of epochs, drawn once per node, in memory that all its preprocessors share."""

from __future__ import annotations

import fcntl
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from optuna_fleet.pipeline.spec import PipelineSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_BYTES = 64 << 20
"""The orders of a data set take no more, unless two of them do."""

_ITEM = np.dtype(np.int64)
_ENTRY = struct.Struct("<Q")  # epoch + 1; 0 for none


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shelf:
    """The orders of one data set: a table of which epochs are there, then a slot for each."""

    begin: int
    num_slots: int
    slot_bytes: int

    def entry(self, epoch: int) -> int:
        return self.begin + _ENTRY.size * (epoch % self.num_slots)

    def slot(self, epoch: int) -> int:
        table_bytes = _ENTRY.size * self.num_slots
        return self.begin + table_bytes + self.slot_bytes * (epoch % self.num_slots)

    @property
    def end(self) -> int:
        return self.begin + (_ENTRY.size + self.slot_bytes) * self.num_slots


class OrderFile:
    """Orders of epochs. Memory is taken as they are drawn, and a later epoch takes an old one's.

    Processes forked from the one that made it may share it: what they get as a pickle refers to
    the same file. Who is killed while drawing leaves nothing behind, not even a lock.

    Args:
        lengths: Samples per epoch, by data set; of those that have orders.
    """

    def __init__(self, lengths: Mapping[str, int]) -> None:
        self._fd = os.memfd_create("optuna-fleet-orders", os.MFD_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._fd)
        self._lay_out(lengths)
        os.ftruncate(self._fd, self._end)

    def _lay_out(self, lengths: Mapping[str, int]) -> None:
        self._lengths = dict(lengths)
        self._shelves: dict[str, _Shelf] = {}
        self._end = 0
        for name, length in lengths.items():
            num_slots = min(max(MOST_BYTES // (length * _ITEM.itemsize), 2), 64)
            shelf = _Shelf(
                begin=self._end, num_slots=num_slots, slot_bytes=length * _ITEM.itemsize
            )
            self._shelves[name] = shelf
            self._end = shelf.end

    def __reduce__(self) -> Any:
        return _attached, (self._fd, self._lengths)

    def read(
        self, name: str, epoch: int, start: int, stop: int, draw: Callable[[], NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """Returns positions ``start`` to ``stop`` of the order of an epoch.

        Args:
            name: The data set.
            epoch: From 0.
            start: First position.
            stop: Behind the last one.
            draw: Returns the whole order; called if nobody has, while others wait for it.
        """
        shelf = self._shelves[name]
        with self._locked(shelf.entry(epoch), fcntl.LOCK_SH):
            if self._has(shelf, epoch):
                return self._read(shelf, epoch, start, stop)
        with self._locked(shelf.entry(epoch), fcntl.LOCK_EX):
            if not self._has(shelf, epoch):
                self._write(shelf, epoch, draw())
            return self._read(shelf, epoch, start, stop)

    @contextmanager
    def _locked(self, place: int, how: int) -> Iterator[None]:
        # A lock of the process, not of the descriptor, which the others have as well.
        fcntl.lockf(self._fd, how, _ENTRY.size, place)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, _ENTRY.size, place)

    def _has(self, shelf: _Shelf, epoch: int) -> bool:
        entry = os.pread(self._fd, _ENTRY.size, shelf.entry(epoch))
        return _ENTRY.unpack(entry) == (epoch + 1,)

    def _write(self, shelf: _Shelf, epoch: int, order: NDArray[np.int64]) -> None:
        os.pwrite(self._fd, _ENTRY.pack(0), shelf.entry(epoch))
        content = np.ascontiguousarray(order, dtype=_ITEM).view(np.uint8).data
        assert len(content) == shelf.slot_bytes
        written = 0
        while written < len(content):  # 2 GB at a time
            written += os.pwrite(self._fd, content[written:], shelf.slot(epoch) + written)
        os.pwrite(self._fd, _ENTRY.pack(epoch + 1), shelf.entry(epoch))

    def _read(self, shelf: _Shelf, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        place = shelf.slot(epoch) + start * _ITEM.itemsize
        return np.frombuffer(os.pread(self._fd, (stop - start) * _ITEM.itemsize, place), _ITEM)


def order_lengths(spec: PipelineSpec) -> dict[str, int]:
    """Returns the samples per epoch of the data sets that have orders."""
    return {each.name: each.num_samples for each in spec.datasets if each.has_order}


def _attached(fd: int, lengths: Mapping[str, int]) -> OrderFile:
    attached = OrderFile.__new__(OrderFile)
    attached._fd = fd
    attached._lay_out(lengths)
    return attached
