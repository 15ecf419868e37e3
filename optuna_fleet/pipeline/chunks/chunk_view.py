"""A trainer's view of one chunk: batches are cut out of the memory where it lies."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from optuna_fleet.exceptions import is_out_of_memory
from optuna_fleet.pipeline.chunks.layout import (
    ALIGNMENT,
    HEAD,
    Bytes,
    Column,
    Header,
    Named,
    Texts,
    chunk_in_memory,
    collates_as_torch,
)


class ChunkView:
    """Cuts samples and batches out of a chunk's bytes, to which nobody else keeps a reference.

    What the user's code does to a batch in place reaches neither the other trials nor a later
    pass, as the memory is the process' own or mapped copy-on-write.
    """

    def __init__(self, chunk: Bytes) -> None:
        self._chunk: Bytes | None = chunk
        self._found = weakref.ref(chunk)
        begin, length = HEAD.unpack_from(chunk.data)
        self.header: Header = pickle.loads(chunk.data[begin : begin + length])
        self._rows: dict[int, torch.Tensor] = {}
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
        self._rows.clear()
        self._chunk = None
        self._chunk = self._found()
        return self._chunk is not None

    def rows(self, column: Column, start: int, stop: int) -> torch.Tensor:
        """Returns samples [start, stop) of a column, without copying."""
        if (found := self._rows.get(column.offset)) is None:
            found = self._rows[column.offset] = column.rows(self.chunk, self.header.num_samples)
        return found[start:stop]

    def samples(self, start: int, stop: int) -> list[Any]:
        """Returns samples [start, stop) one by one, for a ``collate_fn``."""
        if self.header.batch is not None:
            return [self._sample(self.header.batch, number) for number in range(start, stop)]
        memory, found = self.chunk.data, []
        for blobs in self.header.blobs[start:stop]:
            pickled, *buffers = (memory[begin:end] for begin, end in blobs)
            found.append(pickle.loads(pickled, buffers=buffers))
        return found

    def _sample(self, batch: Any, number: int) -> Any:
        """Puts one together again, but for tuples: collating makes lists of them all the same."""
        if isinstance(batch, Texts):
            return batch.values[number]
        if isinstance(batch, Named):  # as it was: its class has seen these parts already
            return tuple.__new__(batch.kind, [self._sample(each, number) for each in batch.parts])
        if not isinstance(batch, Column):
            return _mapped(lambda part: self._sample(part, number), batch)
        (row,) = self.rows(batch, number, number + 1)
        match batch.kind:
            case "tensor":
                return row
            case "number":
                return row.item()
            case "array":
                return row.numpy()
            case "scalar":
                return row.numpy()[()]


def copied(value: Any) -> Any:
    """Returns a value as it comes out of a chunk where it is left as it is."""
    return ChunkView(chunk_in_memory([value], collated_by_user=True)).samples(0, 1)[0]


Part = tuple[ChunkView, int, int]
"""A chunk and the range of its samples."""


def cut_batch(
    parts: Sequence[Part], collate: Callable[[list[Any]], Any] | None, *, copies: bool = False
) -> Any:
    """Returns the batch of these samples, equal to what a DataLoader would have made of them.

    There is at least one. Without a ``collate_fn`` of the user's, what would be a view of a chunk
    is a copy where that is wanted.
    """
    batches = [chunk.header.batch for chunk, _, _ in parts]
    are_alike = batches[0] is not None and batches.count(batches[0]) == len(batches)
    if collate is None and are_alike and collates_as_torch():
        return _cut(parts, batches, copies)
    samples = [sample for chunk, start, stop in parts for sample in chunk.samples(start, stop)]
    return _collated(samples, collate)


def _cut(parts: Sequence[Part], batches: Sequence[Any], copies: bool) -> Any:
    first = batches[0]
    if isinstance(first, Column):
        found = [view.rows(each, *at) for (view, *at), each in zip(parts, batches, strict=True)]
        return _joined(found, copies)
    if isinstance(first, Texts):
        texts = [
            each.values[start:stop] for (_, start, stop), each in zip(parts, batches, strict=True)
        ]
        return sum(texts[1:], texts[0])
    return _mapped(lambda *each: _cut(parts, each, copies), *batches)


def _mapped(function: Callable[..., Any], *batches: Any) -> Any:
    """What a function makes of each part of batches that are alike, nested as they are."""
    first = batches[0]
    if type(first) is dict:
        return {key: function(*(each[key] for each in batches)) for key in first}
    if isinstance(first, Named):
        return first.kind(*map(function, *(each.parts for each in batches)))
    return [*map(function, *batches)]


def _joined(pieces: Sequence[torch.Tensor], copies: bool) -> torch.Tensor:
    if len(pieces) > 1:
        return torch.cat([*pieces])
    tensor = pieces[0]
    # Where a batch begins inside a chunk must not reach the last bits of what is computed from it:
    # some kernels depend on alignment, and torch's own tensors are always aligned.
    return tensor.clone() if copies or tensor.data_ptr() % ALIGNMENT else tensor


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
