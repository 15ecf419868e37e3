"""A trainer's view of one chunk: batches are cut out of the memory where it lies."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from optuna_fleet.exceptions import is_out_of_memory
from optuna_fleet.pipeline.chunks.columns import Column, leaf
from optuna_fleet.pipeline.chunks.layout import ALIGNMENT, HEAD, DenseHeader, ObjectHeader
from optuna_fleet.pipeline.chunks.structure import rebuild, rebuild_batch

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@lru_cache(maxsize=16)
def _header(packed: bytes) -> DenseHeader | ObjectHeader:
    """Most chunks of a data set have the same."""
    header: DenseHeader | ObjectHeader = pickle.loads(packed)
    return header


class ChunkView:
    """Cuts samples and batches out of a chunk's bytes, to which nobody else keeps a reference.

    What the user's code does to a batch in place reaches neither the other trials nor a later
    pass, as the memory is the process' own or mapped copy-on-write.
    """

    def __init__(self, chunk: Bytes) -> None:
        self._chunk: Bytes | None = chunk
        self._found = weakref.ref(chunk)
        begin, length = HEAD.unpack_from(chunk.data)
        self.header = _header(chunk[begin : begin + length].tobytes())
        self._columns: list[torch.Tensor | list[Any]] | None = None
        self._nbytes = begin + length

    @property
    def memory(self) -> memoryview:
        """The bytes of the chunk, without what may lie behind it."""
        return self.chunk.data[: self._nbytes]

    @property
    def chunk(self) -> Bytes:
        """The chunk's bytes."""
        assert self._chunk is not None
        return self._chunk

    def is_used(self) -> bool:
        """Returns whether anybody has a batch or a part of one; if not, the view is at its end."""
        self._columns = self._chunk = None
        self._chunk = self._found()
        return self._chunk is not None

    def columns(self, start: int, stop: int) -> list[torch.Tensor | list[Any]]:
        """Returns samples [start, stop) of each column of a dense chunk, without copying."""
        assert isinstance(self.header, DenseHeader)
        if self._columns is None:
            places = zip(self.header.columns, self.header.offsets, strict=False)
            self._columns = [self._map(column, offset) for column, offset in places]
        return [column[start:stop] for column in self._columns]

    def samples(self, start: int, stop: int) -> list[Any]:
        """Returns samples [start, stop) one by one, as the data set gave them."""
        if isinstance(self.header, ObjectHeader):
            memory = self.chunk.data
            found = []
            for blobs in self.header.blobs[start:stop]:
                pickled, *buffers = (memory[begin:end] for begin, end in blobs)
                found.append(pickle.loads(pickled, buffers=buffers))
            return found
        structure = self.header.structure
        parts = list(zip(self.header.columns, self.columns(start, stop), strict=True))
        return [
            rebuild(structure, (leaf(column, part[i]) for column, part in parts))
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
        flat = torch.frombuffer(self.chunk, dtype=column.dtype, count=count, offset=offset)
        return flat.view(shape)


Part = tuple[ChunkView, int, int]
"""A chunk and the range of its samples."""


def cut_batch(
    parts: Sequence[Part], collate: Callable[[list[Any]], Any] | None, *, copies: bool = False
) -> Any:
    """Returns the batch of these samples, equal to what a DataLoader would have made of them.

    There is at least one. Without a ``collate_fn`` of the user's, what would be a view of a chunk
    is a copy where that is wanted.
    """
    if collate is None and _alike(parts):
        header = parts[0][0].header
        assert isinstance(header, DenseHeader)
        pieces = zip(*(chunk.columns(start, stop) for chunk, start, stop in parts), strict=True)
        return rebuild_batch(header.structure, map(partial(_join, copies=copies), pieces))
    samples = [sample for chunk, start, stop in parts for sample in chunk.samples(start, stop)]
    return _collated(samples, collate)


def _collated(samples: list[Any], collate: Callable[[list[Any]], Any] | None) -> Any:
    if collate is not None:
        return collate(samples)
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError, KeyError) as error:
        if is_out_of_memory(error) or type(error) not in (TypeError, RuntimeError, KeyError):
            raise
        raise type(error)(
            f"The samples of a batch can't be put together by torch's default_collate: {error}. "
            "Let all have the same structure and shapes (of PIL images, transforms like ToImage() "
            "make tensors), or give SharedPipeline(collate_fn=...), as for a DataLoader."
        ) from error


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


def _join(pieces: Sequence[Any], *, copies: bool) -> Any:
    if isinstance(pieces[0], list):
        return [text for piece in pieces for text in piece]
    if len(pieces) > 1:
        return torch.cat(list(pieces))
    tensor = pieces[0]
    # Where a batch begins inside a chunk must not reach the last bits of what is computed from it:
    # some kernels depend on alignment, and torch's own tensors are always aligned.
    return tensor.clone() if copies or tensor.data_ptr() % ALIGNMENT else tensor
