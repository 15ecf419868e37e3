"""A trainer's view of one chunk: batches are cut out of its private copy-on-write mapping."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import default_collate

from optuna_fleet.pipeline.chunks.columns import Column, leaf
from optuna_fleet.pipeline.chunks.layout import (
    ALIGNMENT,
    LENGTH,
    DenseHeader,
    ObjectHeader,
    aligned,
)
from optuna_fleet.pipeline.chunks.memory_files import map_privately, populate
from optuna_fleet.pipeline.chunks.structure import rebuild, rebuild_batch

_LEAST_POPULATED = 16 << 10  # bytes: of fewer, page faults cost less than a call


@lru_cache(maxsize=4)
def _header(packed: bytes) -> DenseHeader | ObjectHeader:
    """Most chunks of a data set have the same."""
    header: DenseHeader | ObjectHeader = pickle.loads(packed)
    return header


class ChunkView:
    """Maps a chunk's file.

    Copy-on-write: what the user's code does to a batch in place reaches neither the other trials
    nor a later pass. A batch that the user keeps keeps the mapping alive.

    Args:
        fd: The file; the view takes it over and closes it.
    """

    def __init__(self, fd: int) -> None:
        try:
            self._memory = map_privately(fd)
        finally:
            os.close(fd)
        (length,) = LENGTH.unpack_from(self._memory)
        end = LENGTH.size + length
        self.header = _header(bytes(self._memory[LENGTH.size : end]))
        self._body = aligned(end)
        self._columns: list[torch.Tensor | list[Any]] | None = None

    def detach(self) -> None:
        """Copies the chunk, so that its file's memory can be freed; batches cut before keep it."""
        copy = mmap.mmap(-1, len(self._memory), flags=mmap.MAP_PRIVATE)
        copy[:] = self._memory
        self._memory, self._columns = memoryview(copy), None

    def columns(self, start: int, stop: int) -> list[torch.Tensor | list[Any]]:
        """Returns samples [start, stop) of each column of a dense chunk, without copying."""
        assert isinstance(self.header, DenseHeader)
        if self._columns is None:
            places = zip(self.header.columns, self.header.offsets, strict=False)
            self._columns = [self._map(column, offset) for column, offset in places]
        cut = [column[start:stop] for column in self._columns]
        for part in cut:
            if isinstance(part, torch.Tensor) and part.nbytes >= _LEAST_POPULATED:
                populate(part.data_ptr(), part.nbytes)
        return cut

    def samples(self, start: int, stop: int) -> list[Any]:
        """Returns samples [start, stop) one by one, as the data set gave them."""
        if isinstance(self.header, ObjectHeader):
            body = self._memory[self._body :]
            found = []
            for blobs in self.header.blobs[start:stop]:
                pickled, *buffers = (body[begin:end] for begin, end in blobs)
                found.append(pickle.loads(pickled, buffers=buffers))
            return found
        structure = self.header.structure
        parts = list(zip(self.header.columns, self.columns(start, stop), strict=True))
        return [
            rebuild(structure, (_leaf(column, part[i]) for column, part in parts))
            for i in range(stop - start)
        ]

    def _map(self, column: Column, offset: int) -> torch.Tensor | list[Any]:
        assert isinstance(self.header, DenseHeader)
        if column.dtype is None:
            return list(column.texts)
        shape = (self.header.num_samples, *column.shape)
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=column.dtype, device="cpu")
        flat = torch.frombuffer(
            self._memory, dtype=column.dtype, count=count, offset=self._body + offset
        )
        return flat.view(shape)


Part = tuple[ChunkView, int, int]
"""A chunk and the range of its samples."""


def cut_alike(
    parts: Sequence[Part],
    collate: Callable[[list[Any]], Any] | None,
    finish: Callable[[Any], Any] | None,
) -> tuple[Any, bool]:
    """Returns the batch of these samples, and whether it is finished.

    Args:
        parts: As for `cut_batch`.
        collate: Likewise.
        finish: Finishes a sample of a chunk that is not, where others of the batch are.
    """
    finished = [chunk.header.is_finished for chunk, _, _ in parts]
    if all(finished) or not any(finished):
        return cut_batch(parts, collate), all(finished)
    assert finish is not None
    samples: list[Any] = []
    for chunk, start, stop in parts:
        own = chunk.samples(start, stop)
        samples += own if chunk.header.is_finished else map(finish, own)
    return (default_collate if collate is None else collate)(samples), True


def cut_batch(parts: Sequence[Part], collate: Callable[[list[Any]], Any] | None) -> Any:
    """Returns the batch of these samples, equal to what a DataLoader would have made of them.

    Args:
        parts: Ranges of consecutive chunks, at least one sample in all.
        collate: The user's ``collate_fn``; None for torch's default.
    """
    if collate is None and _alike(parts):
        header = parts[0][0].header
        assert isinstance(header, DenseHeader)
        pieces = zip(*(chunk.columns(start, stop) for chunk, start, stop in parts), strict=True)
        return rebuild_batch(header.structure, map(_join, pieces))
    samples = [sample for chunk, start, stop in parts for sample in chunk.samples(start, stop)]
    return default_collate(samples) if collate is None else collate(samples)


def _alike(parts: Sequence[Part]) -> bool:
    first = parts[0][0].header
    return isinstance(first, DenseHeader) and all(
        isinstance(chunk.header, DenseHeader)
        and chunk.header.structure == first.structure
        and [_looks(c) for c in chunk.header.columns] == [_looks(c) for c in first.columns]
        for chunk, _, _ in parts[1:]
    )


def _looks(column: Column) -> tuple[object, ...]:
    return column.kind, column.dtype, column.shape


def _join(pieces: Sequence[Any]) -> Any:
    if isinstance(pieces[0], list):
        return [text for piece in pieces for text in piece]
    if len(pieces) > 1:
        return torch.cat(list(pieces))
    tensor = pieces[0]
    # Where a batch begins inside a chunk must not reach the last bits of what is computed from it:
    # some kernels depend on alignment, and torch's own tensors are always aligned.
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def _leaf(column: Column, part: Any) -> Any:
    return part if column.dtype is None else leaf(column, part)
