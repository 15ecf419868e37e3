"""How samples lie in a chunk: put together once, so that batches are rows of what is there.

``[place and length of the pickle: 16 bytes][padding to 64][tensors][pickle]``. Of samples that are
alike, the pickle is the batch that torch's ``default_collate`` makes of all of them, with a
`Column` in the place of each tensor. Where samples differ in structure, type or shape, or the user
collates, they lie one after another: each a pickle and, beside it, its tensors and arrays, which
come out as views of the chunk. The choice is made chunk by chunk.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torchs

from optuna_fleet.exceptions import is_out_of_memory
from optuna_fleet.wire import packing

_BufferCallback = Callable[[pickle.PickleBuffer], Any]

_NO_BYTES = {
    dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and name.startswith(("float4", "q", "bits"))
}


def dumps(value: Any) -> bytes:
    """Returns the pickle of a value."""
    return _dumped(value, None)


def dumps_outside(value: Any) -> list[bytes | memoryview]:
    """Returns the pickle of a value, followed by the bytes of each of its tensors and arrays."""
    buffers: list[pickle.PickleBuffer] = []
    return [_dumped(value, buffers), *(buffer.raw() for buffer in buffers)]


def raw_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns the bytes of a tensor's elements; a view of them where they lie in order."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    # Not reshape: the stride of a single element may be anything.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()


def is_view_of_bytes(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is no more than its place in a piece of this machine's memory."""
    return _is_usual(tensor) and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg())


def storage_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns the memory that a tensor is a view of, all of it; not a copy."""
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    return whole.numpy()


def tensor_in(
    raw: np.ndarray[Any, Any],
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    """Returns a tensor that lies in these bytes as another one lay in its storage."""
    storage = torch.from_numpy(raw).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, strides)


class _Pickler(pickle.Pickler):
    """Takes tensors and arrays as bytes: a tenth of the time that torch's own reduction takes."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_usual(obj):
            if _is_channels_last(obj):
                return _channels_last, (obj.permute(1, 2, 0),)
            raw = _outside(raw_bytes(obj)) if obj.numel() else None
            return _tensor, (raw, obj.dtype, (*obj.shape,))
        if type(obj) is np.ndarray and obj.size and obj.itemsize and not obj.dtype.hasobject:
            # A trainer may write into its own, whatever the original allows.
            array = np.ascontiguousarray(obj) if obj.flags.writeable else obj.copy()
            return np.ndarray, (obj.shape, obj.dtype, _outside(array))
        if _is_tv_tensor(obj):
            return _tv_tensor, (obj.as_subclass(torch.Tensor), type(obj))
        return NotImplemented


def _dumped(value: Any, buffers: list[pickle.PickleBuffer] | None) -> bytes:
    keep: _BufferCallback | None = None if buffers is None else buffers.append
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=keep).dump(value)
    except Exception:
        # Classes of the user's __main__, lambdas: what `pack` is for, at its price.
        if buffers is not None:
            buffers.clear()
        return packing.pack(value, keep)
    return stream.getvalue()


def _is_usual(tensor: torch.Tensor) -> bool:
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    bare = not tensor.requires_grad and not tensor.__dict__
    return plain and bare and tensor.dtype not in _NO_BYTES


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """That order decides how fast a crop is resized, and its last bits."""
    if tensor.ndim != 3 or tensor.is_contiguous():
        return False
    return tensor.permute(1, 2, 0).is_contiguous()


def _is_tv_tensor(value: Any) -> bool:
    """Whether it is a tensor of torchvision's of which no more is known than its values."""
    module = sys.modules.get("torchvision.tv_tensors")
    if module is None or type(value) not in (module.Image, module.Mask, module.Video):
        return False
    return not value.requires_grad


def _outside(array: np.ndarray[Any, Any]) -> pickle.PickleBuffer:
    raw: Any = array.reshape(-1).view(np.uint8)
    return pickle.PickleBuffer(raw)


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if buffer is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(2, 0, 1)


def _tv_tensor(tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
    return tensor.as_subclass(kind)


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
