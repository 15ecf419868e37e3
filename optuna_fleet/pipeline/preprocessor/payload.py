"""The data sets on their way to the preprocessors: pickled once, in memory once per node.

``[number of blobs][length of each][padding to 64 bytes][blob][padding]...``, where the first blob
is the pickle and the others are the large arrays and tensors that it leaves out. The agent, who
never unpickles it, puts it into a sealed memory file as it is. Preprocessors map that file
copy-on-write: they share its pages, and each may write into its arrays as if they were its own.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from optuna_fleet.pipeline.chunks.memory_files import map_privately, sealed_file_of
from optuna_fleet.pipeline.preprocessor import tables
from optuna_fleet.pipeline.preprocessor.mapped_files import MappedFiles
from optuna_fleet.pipeline.preprocessor.order import Generator, is_generator
from optuna_fleet.pipeline.preprocessor.order_file import order_files
from optuna_fleet.pipeline.preprocessor.source import Source
from optuna_fleet.pipeline.spec import PipelineSpec
from optuna_fleet.wire import packing

LEAST_BYTES = 256
"""Arrays of fewer bytes stay in the pickle, where they take less with all that is about them."""

_ALIGNMENT = 64
_LENGTH = struct.Struct("<Q")


def pack(value: Any) -> bytes:
    """Returns a value as bytes.

    Raises:
        Exception: It can't be pickled.
    """
    stream, outside = io.BytesIO(), list[memoryview]()
    # Not a method of the pickler: in a cycle it would keep what it has seen for a while.
    stays_inside = functools.partial(_stays_inside, outside)
    _Pickler(stream, buffer_callback=stays_inside).dump_all(value)
    blobs = [stream.getbuffer(), *outside]
    lengths = [blob.nbytes for blob in blobs]
    head = struct.pack(f"<{1 + len(blobs)}Q", len(blobs), *lengths)
    pieces: list[Any] = [head, _padding(len(head))]
    for blob, length in zip(blobs, lengths, strict=True):
        pieces += [blob, _padding(length)]
    return b"".join(pieces)


def unpack(payload: bytes | memoryview) -> Any:
    """Returns what was packed; its large arrays are views of the payload.

    A `Source` is told of the random generators in it.

    Raises:
        Exception: It can't be unpickled here.
    """
    memory = memoryview(payload)
    (number,) = _LENGTH.unpack_from(memory)
    head_bytes = (1 + number) * _LENGTH.size
    lengths = struct.unpack_from(f"<{number}Q", memory, _LENGTH.size)
    first = head_bytes + len(_padding(head_bytes))
    begins = accumulate((n + len(_padding(n)) for n in lengths), initial=first)
    blobs = [memory[begin : begin + n] for begin, n in zip(begins, lengths, strict=False)]
    value, generators = pickle.loads(blobs[0], buffers=blobs[1:])
    return replace(value, generators=generators) if isinstance(value, Source) else value


def generators_in(value: Any) -> list[Generator]:
    """Returns the random generators that pickling a value comes across."""
    pickler = _Pickler(_Nowhere(), buffer_callback=lambda _: False)
    with suppress(Exception):  # what can't be pickled can be used in this process
        pickler.dump_all(value)
    return pickler.generators


class PayloadFile:
    """A payload in the memory of its node: the agent's side.

    Args:
        payload: What `pack` returned; whoever gave it should let go of it.
        spec: Tells which of the data sets have orders, which lie in another file.
    """

    def __init__(self, payload: bytes, spec: PipelineSpec) -> None:
        self._orders = order_files(spec)
        self._fd = sealed_file_of([payload])

    def load(self) -> Source:
        """Returns the content, in a process forked from this one."""
        found: Source = unpack(map_privately(self._fd))
        return replace(found, orders=self._orders)

    def close(self) -> None:
        """Closes the files; their memory is free once no preprocessor has them."""
        os.close(self._fd)
        for orders in self._orders.values():
            orders.close()


def _stays_inside(outside: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    raw = buffer.raw()
    if raw.nbytes < LEAST_BYTES:
        return True
    outside.append(raw)
    return False


def _padding(nbytes: int) -> bytes:
    return bytes(-nbytes % _ALIGNMENT)


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _Pickler(packing.Pickler):
    def __init__(self, stream: Any, *, buffer_callback: Callable[[Any], bool]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffer_callback)
        self.generators: list[Generator] = []
        self._files = MappedFiles()
        self._tables: dict[int, Any] = {}
        self._storages: dict[tuple[int, int], np.ndarray[Any, Any]] = {}

    def dump_all(self, value: Any) -> None:
        """Writes a value and, as the same objects, the random generators that it has in it."""
        self.dump((value, self.generators))  # in this order: they are found while it is written

    def reducer_override(self, obj: Any) -> Any:
        if is_generator(obj):
            self.generators.append(obj)
        found = None
        if isinstance(obj, np.ndarray):
            found = self._files.reduction(obj) or _array_reduction(obj)
        elif "torch" in sys.modules and type(obj) is sys.modules["torch"].Tensor:
            found = self._tensor_reduction(obj)
        else:
            found = tables.reduction(obj, self._tables)
        return super().reducer_override(obj) if found is None else found

    def _tensor_reduction(self, tensor: Any) -> Any:
        """By way of its whole storage, which tensors that share it go on sharing."""
        from optuna_fleet.pipeline.chunks import pickling  # it imports torch, which costs seconds

        storage = tensor.untyped_storage() if pickling.is_view_of_bytes(tensor) else None
        if storage is None or storage.nbytes() < LEAST_BYTES:
            return None
        key = storage.data_ptr(), storage.nbytes()
        raw = self._storages.setdefault(key, pickling.storage_bytes(tensor))
        place = tensor.storage_offset(), (*tensor.shape,), tensor.stride()
        return pickling.tensor_in, (raw, tensor.dtype, *place)


def _array_reduction(array: np.ndarray[Any, Any]) -> Any:
    flags = array.flags
    if type(array) is np.ndarray and not (flags.forc or array.dtype.hasobject):
        return np.ascontiguousarray(array).__reduce_ex__(5)  # of others NumPy pickles the bytes
    return None
