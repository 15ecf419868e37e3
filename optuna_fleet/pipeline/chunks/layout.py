"""How samples lie in a chunk.

``[place and length of the header: 16 bytes][padding to 64][body][header: pickle]``. In the *dense*
layout the body holds each leaf of all samples as one contiguous array, so a batch is a slice, and
large leaves are written when their sample is there. Where samples differ in structure or shape, or
the user collates, it is the *object* layout: samples one after another, each a pickle and, beside
it, its tensors and arrays, which come out as views of the chunk. The header says which; the choice
is made chunk by chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from optuna_fleet.pipeline.chunks import columns
from optuna_fleet.pipeline.chunks.columns import Column
from optuna_fleet.pipeline.chunks.pickling import dumps, dumps_outside
from optuna_fleet.pipeline.chunks.structure import Structure, flatten, rebuild

ALIGNMENT = 64
"""Bytes. Arrays begin at multiples of it, as torch's own do."""

HEAD = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseHeader:
    """Columns and, for each, its place in bytes from the beginning of the chunk."""

    num_samples: int
    structure: Structure
    columns: tuple[Column, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectHeader:
    """Where each sample's blobs begin and end in the chunk.

    The first is its pickle, the others are the tensors and arrays that the pickle leaves out.
    """

    blobs: tuple[tuple[tuple[int, int], ...], ...]


class OutgrownError(Exception):
    """The samples do not fit; they take so many bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def aligned(nbytes: int) -> int:
    """Returns ``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class ChunkWriter:
    """Writes so many samples into a chunk, one by one.

    ``room`` begins at a multiple of the alignment. Those that are ``collated_by_user`` must come
    out as they are.
    """

    def __init__(self, room: memoryview, num_samples: int, *, collated_by_user: bool) -> None:
        self._room = room
        self._num_samples = num_samples
        self._dense: _Dense | None = None
        self._objects: list[Any] | None = [] if collated_by_user else None

    def add(self, sample: Any) -> None:
        """Adds a sample.

        Raises:
            OutgrownError: It is known by now that they do not fit.
        """
        if self._objects is None and self._dense is None:
            try:
                self._dense = _Dense.of(self._room, self._num_samples, sample)
            except OutgrownError:
                self._objects = [sample]
                raise
        if self._dense is not None:
            if self._dense.add(sample):
                return
            self._objects, self._dense = self._dense.samples(), None
        self._objects = self._objects or []
        self._objects.append(sample)

    def samples(self) -> list[Any]:
        """Returns what was added so far."""
        return self._objects or [] if self._dense is None else self._dense.samples()

    def finish(self) -> int:
        """Writes what is left to write, and returns the bytes that the chunk takes.

        Raises:
            OutgrownError: The samples do not fit.
        """
        if self._dense is not None:
            return self._dense.finish()
        return _write_objects(self._room, self._objects or [])


def write_rows(room: memoryview, rows: Sequence[torch.Tensor]) -> int | None:
    """Writes samples that are tuples of a row of each tensor, all at once.

    Returns:
        The bytes they take; None if they can't be written so.

    Raises:
        OutgrownError: They do not fit.
    """
    dense = _Dense.of(room, len(rows[0]), tuple(each[0] for each in rows))
    return None if dense is None else dense.write_rows(rows)


def write_chunk(
    samples: Sequence[Any], *, collated_by_user: bool
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns a chunk in memory of its own; arguments as of `ChunkWriter`."""
    nbytes = 4096
    while True:
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        chunk = memory[-memory.ctypes.data % ALIGNMENT :][:nbytes]
        writer = ChunkWriter(chunk.data, len(samples), collated_by_user=collated_by_user)
        try:
            for sample in samples:
                writer.add(sample)
            return chunk[: writer.finish()]
        except OutgrownError as error:
            nbytes = error.nbytes


def sample_bytes(sample: Any, *, collated_by_user: bool) -> int:
    """Returns about how many bytes a sample takes in a chunk."""
    leaves: list[Any] = []
    flatten(sample, leaves)
    if not collated_by_user and all(columns.describe(leaf) for leaf in leaves):
        return sum(map(columns.leaf_bytes, leaves))
    return sum(aligned(len(blob)) for blob in dumps_outside(sample))


class _Dense:
    """Samples of one structure, whose leaves are alike."""

    def __init__(self, room: memoryview, header: DenseHeader, first: list[Any], end: int) -> None:
        self._room = room
        self._header = header
        self._first = first
        self._end = end
        self._small: list[list[Any]] = [[] for _ in header.columns]
        self._num_added = 0
        self._large = {
            number: torch.frombuffer(
                room,
                dtype=column.dtype,
                count=header.num_samples * column.sample_bytes // column.dtype.itemsize,
                offset=offset,
            ).view(header.num_samples, *column.shape)
            for number, (column, offset) in enumerate(
                zip(header.columns, header.offsets, strict=True)
            )
            if column.dtype is not None and columns.is_large(column)
        }

    @classmethod
    def of(cls, room: memoryview, num_samples: int, sample: Any) -> _Dense | None:
        """Plans the layout of samples like this one; None if it has to be the other."""
        leaves: list[Any] = []
        structure = flatten(sample, leaves)
        described = [columns.describe(leaf) for leaf in leaves]
        found = tuple(column for column in described if column is not None)
        if len(found) < len(described):
            return None
        sizes = (aligned(num_samples * column.sample_bytes) for column in found)
        *offsets, end = accumulate(sizes, initial=ALIGNMENT)
        header = DenseHeader(
            num_samples=num_samples,
            structure=structure,
            columns=found,
            offsets=tuple(offsets),
        )
        if (need := end + len(dumps(header))) > room.nbytes:
            raise OutgrownError(need)
        return cls(room, header, leaves, end)

    def add(self, sample: Any) -> bool:
        """Adds a sample, if it is like the first one."""
        leaves: list[Any] = []
        if flatten(sample, leaves) != self._header.structure:
            return False
        if not all(map(columns.is_alike, self._header.columns, self._first, leaves)):
            return False
        for number, leaf in enumerate(leaves):
            if number in self._large:
                columns.write(self._large[number][self._num_added], leaf)
            else:
                self._small[number].append(leaf)
        self._num_added += 1
        return True

    def write_rows(self, rows: Sequence[torch.Tensor]) -> int:
        """Writes all leaves and the header; returns the bytes of it all."""
        for offset, each in zip(self._header.offsets, rows, strict=False):
            written = columns.raw_bytes(each.detach())
            self._room[offset : offset + written.nbytes] = written.data
        return _write_header(self._room, self._end, self._header)

    def samples(self) -> list[Any]:
        """Returns what was added, in memory of its own."""
        numbers = range(len(self._header.columns))
        return [
            rebuild(self._header.structure, (self._leaf(number, each) for number in numbers))
            for each in range(self._num_added)
        ]

    def _leaf(self, number: int, sample: int) -> Any:
        if number not in self._large:
            return self._small[number][sample]
        return columns.leaf(self._header.columns[number], self._large[number][sample].clone())

    def finish(self) -> int:
        """Writes small leaves and the header; returns the bytes of it all."""
        written = []
        for number, column in enumerate(self._header.columns):
            if column.kind == "text":
                column = replace(column, texts=tuple(self._small[number]))
            elif self._small[number] and column.sample_bytes:
                joined = columns.joined(column, self._small[number])
                begin = self._header.offsets[number]
                self._room[begin : begin + joined.nbytes] = joined.data
            written.append(column)
        header = replace(self._header, columns=tuple(written))
        return _write_header(self._room, self._end, header)


def _write_objects(room: memoryview, samples: Sequence[Any]) -> int:
    places, blobs, end = [], [], ALIGNMENT
    for sample in samples:
        place = []
        for blob in dumps_outside(sample):
            place.append((end, end + len(blob)))
            blobs.append(blob)
            end = aligned(end + len(blob))
        places.append(tuple(place))
    header = ObjectHeader(blobs=tuple(places))
    if end > room.nbytes:
        raise OutgrownError(end + len(dumps(header)))
    for (begin, stop), blob in zip(chain(*places), blobs, strict=True):
        room[begin:stop] = blob
    return _write_header(room, end, header)


def _write_header(room: memoryview, end: int, header: DenseHeader | ObjectHeader) -> int:
    packed = dumps(header)
    total = end + len(packed)
    if total > room.nbytes:
        raise OutgrownError(total)
    room[end:total] = packed
    HEAD.pack_into(room, 0, end, len(packed))
    return total
