"""How samples lie in a chunk: put together once, so that batches are rows of what is there.

``[place and length of the pickle: 16 bytes][padding to 64][tensors][pickle]``. Of samples that are
alike, the pickle is the batch that torch's ``default_collate`` makes of all of them, with a
`Column` in the place of each tensor. Where samples differ in structure, type or shape, or the user
collates, they lie one after another: each a pickle and, beside it, its tensors and arrays, which
come out as views of the chunk. The choice is made chunk by chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torchs

from optuna_fleet.pipeline.chunks.pickling import dumps, dumps_outside

ALIGNMENT = 64
"""Bytes. Tensors begin at multiples of it, as torch's own do."""

HEAD = struct.Struct("<QQ")

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Column:
    """One leaf of all samples, as a tensor: equal to another if both can be in one batch.

    Attributes:
        kind: What it is in a sample: a tensor, a NumPy array, a Python number, a NumPy scalar.
        dtype: Of its elements, as ``default_collate`` chooses it.
        shape: Of one sample's leaf.
        offset: Where it begins in the chunk.
    """

    kind: Literal["tensor", "array", "number", "scalar"]
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = field(default=0, compare=False)

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample's leaf."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def rows(self, chunk: Any, num_samples: int) -> torch.Tensor:
        """Returns the tensor, as a view of the chunk."""
        shape = (num_samples, *self.shape)
        if not (count := torch.Size(shape).numel()):
            return torch.empty(shape, dtype=self.dtype, device="cpu")
        flat = torch.frombuffer(chunk, dtype=self.dtype, count=count, offset=self.offset)
        return flat.view(shape)


@dataclass(frozen=True, slots=True)
class Texts:
    """A leaf that is text in all samples; a tuple where ``default_collate`` gives one."""

    values: Sequence[Any] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Named:
    """A namedtuple of what a batch has; its class may compute, so it is called with that alone."""

    kind: type[Any]
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """What the pickle says.

    Attributes:
        num_samples: Of the chunk.
        batch: Dicts, lists and `Named` with `Column` and `Texts` in them; None if the samples lie
            one after another.
        blobs: Then, for each sample, where its blobs begin and end: the first is its pickle, the
            others are the tensors and arrays that the pickle leaves out.
    """

    num_samples: int
    batch: Any = None
    blobs: tuple[tuple[tuple[int, int], ...], ...] = ()


def collates_as_torch() -> bool:
    """Returns whether all of torch's ``default_collate_fn_map`` is as torch has made it."""
    makers = {getattr(each, "__module__", "") for each in torchs.default_collate_fn_map.values()}
    return makers == {torchs.__name__}


class _UnlikeError(Exception):
    """Samples can't be put together."""


class Chunk:
    """Samples that are put together, or pickled, but not yet written.

    Attributes:
        nbytes: What it takes.
    """

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._columns: list[tuple[Column, Any]] = []
        self._texts: list[Sequence[Any]] = []
        self._blobs: list[tuple[int, bytes | memoryview]] = []
        self._end = ALIGNMENT

    @classmethod
    def of(cls, samples: Sequence[Any], *, collated_by_user: bool) -> Chunk:
        """Returns the chunk of these samples; ``collated_by_user``, they come out as they are.

        Raises:
            ValueError: One has an array that torch makes no tensor of, as it is reversed.
            Exception: One can't be pickled.
        """
        if collates_as_torch() and not collated_by_user:
            chunk = cls(len(samples))
            with suppress(_UnlikeError):
                return chunk._finished(Header(len(samples), chunk._together(samples)))
        chunk = cls(len(samples))
        return chunk._finished(Header(len(samples), blobs=chunk._one_by_one(samples)))

    @classmethod
    def of_rows(cls, rows: Sequence[torch.Tensor]) -> Chunk | None:
        """Returns the chunk of samples that are tuples of a row of each tensor.

        None if they can't be put together.
        """
        chunk = cls(len(rows[0]))
        with suppress(_UnlikeError):
            if not collates_as_torch():
                raise _UnlikeError
            batch = [chunk._tensors(torch.Tensor, [each[0]], each) for each in rows]
            return chunk._finished(Header(len(rows[0]), batch))
        return None

    @property
    def sample_bytes(self) -> int:
        """What its largest sample takes, without what it takes for all of them."""
        if self._places:
            return max(sum(stop - begin for begin, stop in blobs) for blobs in self._places)
        texts = (sum(len(dumps(text)) for text in texts) for texts in _transposed(self._texts))
        return sum(column.row_bytes for column, _ in self._columns) + max(texts, default=0)

    def write(self, room: memoryview) -> None:
        """Writes it to where there is room, from a multiple of the alignment on."""
        for column, values in self._columns:
            if not (rows := column.rows(room, self._num_samples)).numel():
                continue
            if isinstance(values, torch.Tensor):
                rows.copy_(values)
            elif column.kind == "array":  # by NumPy, as torch warns about arrays not writable
                np.stack(values, out=rows.numpy())
            else:
                torch.stack(values, out=rows)
        for begin, blob in self._blobs:
            room[begin : begin + len(blob)] = blob
        HEAD.pack_into(room, 0, self._end, self.nbytes - self._end)

    def _finished(self, header: Header) -> Chunk:
        packed = dumps(header)
        self._places = header.blobs
        self.nbytes = self._end + len(packed)
        self._blobs.append((self._end, packed))
        return self

    def _one_by_one(self, samples: Sequence[Any]) -> tuple[tuple[tuple[int, int], ...], ...]:
        places = []
        for sample in samples:
            place = []
            for blob in dumps_outside(sample):
                begin = self._place(len(blob))
                self._blobs.append((begin, blob))
                place.append((begin, begin + len(blob)))
            places.append(tuple(place))
        return tuple(places)

    def _together(self, values: Sequence[Any]) -> Any:
        """Goes down the nest as ``default_collate`` does, if it is the same in all samples."""
        kind = type(values[0])
        if {*map(type, values)} != {kind}:
            raise _UnlikeError
        if kind is dict:
            if len({*map(tuple, values)}) > 1:
                raise _UnlikeError
            return {key: self._together([each[key] for each in values]) for key in values[0]}
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return Named(kind, tuple([self._together(leaves) for leaves in _transposed(values)]))
        if kind is tuple or kind is list:
            if len({*map(len, values)}) > 1:
                raise _UnlikeError
            return [self._together(leaves) for leaves in _transposed(values)]
        return self._leaves(kind, values)

    def _leaves(self, kind: type[Any], values: Sequence[Any]) -> Column | Texts:
        if issubclass(kind, (str, bytes)):
            self._texts.append(values)
            return Texts(values)
        if issubclass(kind, torch.Tensor):
            return self._tensors(kind, values)
        if kind is np.ndarray:
            return self._arrays(values)
        if kind in (int, float, bool) or issubclass(kind, np.generic):
            return self._numbers(kind, values)
        raise _UnlikeError

    def _tensors(
        self, kind: type[Any], values: Sequence[torch.Tensor], joined: torch.Tensor | None = None
    ) -> Column:
        first = values[0]
        if kind is not torch.Tensor:
            if first.is_nested or type(torch.stack([first])) is not torch.Tensor:
                raise _UnlikeError
            values = [each.as_subclass(torch.Tensor) for each in values]
            first = values[0]
        if first.is_nested or first.is_quantized or first.device.type != "cpu":
            raise _UnlikeError
        looks = {(each.dtype, each.shape, each.layout, each.requires_grad) for each in values}
        if looks != {(first.dtype, first.shape, torch.strided, False)}:
            raise _UnlikeError
        found = values if joined is None else joined
        return self._column("tensor", first.dtype, first.shape, found)

    def _arrays(self, values: Sequence[Any]) -> Column:
        for each in values:
            if any(stride < 0 for stride in each.strides):
                torch.from_numpy(each)  # raises ValueError, as under a DataLoader
        if len({(each.dtype, each.shape) for each in values}) > 1:
            raise _UnlikeError
        try:
            dtype = torch.from_numpy(np.empty(0, values[0].dtype)).dtype
        except (TypeError, ValueError):
            raise _UnlikeError from None
        return self._column("array", dtype, values[0].shape, values)

    def _numbers(self, kind: type[Any], values: Sequence[Any]) -> Column:
        try:
            joined = default_collate([*values])
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise _UnlikeError from None
        if not isinstance(joined, torch.Tensor) or joined.ndim != 1:
            raise _UnlikeError
        is_scalar = issubclass(kind, np.generic)
        return self._column("scalar" if is_scalar else "number", joined.dtype, (), joined)

    def _column(self, kind: Any, dtype: torch.dtype, shape: Sequence[int], values: Any) -> Column:
        nbytes = Column(kind, dtype, (*shape,)).row_bytes * self._num_samples
        column = Column(kind, dtype, (*shape,), self._place(nbytes))
        self._columns.append((column, values))
        return column

    def _place(self, nbytes: int) -> int:
        """Returns where so many bytes are to lie, alone."""
        begin, end = self._end, self._end + max(nbytes, 1)
        self._end = -(-end // ALIGNMENT) * ALIGNMENT
        return begin


def _transposed(values: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    for number in range(len(values[0]) if values else 0):
        yield tuple([each[number] for each in values])


def chunk_in_memory(samples: Sequence[Any], *, collated_by_user: bool) -> Bytes:
    """Returns a chunk of these samples, in memory of its own."""
    chunk = Chunk.of(samples, collated_by_user=collated_by_user)
    memory = np.empty(chunk.nbytes + ALIGNMENT, np.uint8)
    room = memory[-memory.ctypes.data % ALIGNMENT :][: chunk.nbytes]
    chunk.write(room.data)
    return room
