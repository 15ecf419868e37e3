"""The decoded store as a preprocessor sees it."""

from __future__ import annotations

import mmap
import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from optuna_fleet.pipeline.chunks.arena import Arena
from optuna_fleet.pipeline.chunks.pickling import dumps_outside
from optuna_fleet.pipeline.messages import Extent, Stored
from optuna_fleet.pipeline.server.decoded import ENTRY, first_entries


class DecodedSamples:
    """Reads the store, as the table says, and writes into what was lent to it."""

    def __init__(self, arena: Arena, table: mmap.mmap, lengths: Mapping[str, int]) -> None:
        self._first = first_entries(lengths)
        self._table = table
        self._arena = arena
        self._memory = arena.readable()
        self._extents: list[Extent] = []
        self._stored: list[Stored] = []

    def begin(self, extents: Iterable[Extent]) -> None:
        """Begins an order that may write into these extents."""
        self._extents = list(extents)
        self._stored = []

    def stored(self) -> tuple[Stored, ...]:
        """Returns what the order has written so far."""
        return tuple(self._stored)

    def get(self, name: str, index: int) -> tuple[Any] | None:
        """Returns a copy of the prepared sample in a tuple; None if it is not there."""
        entry = self._first[name] + index
        place, length = ENTRY.unpack_from(self._table, entry * ENTRY.size)
        if not place:
            return None
        return (_unpack(self._memory[place - 1 : place - 1 + length]),)

    def put(self, index: int, blobs: Sequence[bytes | memoryview]) -> None:
        """Keeps a prepared sample as `pack` made it, if there is room."""
        length = sum(map(len, blobs))
        for number, (address, room) in enumerate(self._extents):
            if length <= room:
                memory, end = self._arena.writable(address, length), 0
                for blob in blobs:
                    begin, end = end, end + len(blob)
                    memory[begin:end] = blob
                self._extents[number] = (address + length, room - length)
                self._stored.append((index, address, length))
                return


def pack(prepared: Any) -> list[bytes | memoryview]:
    """Returns a prepared sample as buffers of bytes, to be written one after another."""
    blobs = dumps_outside(prepared)
    return [struct.pack(f"<{1 + len(blobs)}Q", len(blobs), *map(len, blobs)), *blobs]


def copied(prepared: Any) -> Any:
    """Returns what was prepared as it comes out of the store."""
    return _unpack(memoryview(b"".join(pack(prepared))))


def _unpack(record: memoryview) -> Any:
    (count,) = struct.unpack_from("<Q", record)
    lengths = struct.unpack_from(f"<{count}Q", record, 8)
    ends = list(accumulate(lengths, initial=8 * (1 + count)))
    head, *blobs = (record[begin:end] for begin, end in pairwise(ends))
    return pickle.loads(head, buffers=[bytearray(blob) for blob in blobs])
