"""The data sets on their way to the preprocessors: packed once, in memory once per machine.

``[pickle][padding to 64 bytes][blob][padding]...[length of each][number of them]``, where the
blobs are the large arrays and tensors that the pickle leaves out. It is written into a memory file
as it arises, which is sealed then. All processes of the machine map that file copy-on-write: they
share its pages, and each may write into its arrays as if they were its own.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import pickle
import struct
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from optuna_fleet.exceptions import FleetConfigError, FleetError
from optuna_fleet.pipeline.preprocessor.order import is_generator
from optuna_fleet.pipeline.spec import Generator, PipelineSpec, Source
from optuna_fleet.settings import Settings, settings_here
from optuna_fleet.wire import packing
from optuna_fleet.wire.unpicklable import explained

_Array = np.ndarray[Any, Any]
_FileName = str | os.PathLike[str]

_mapped: weakref.WeakValueDictionary[_FileName, np.memmap[Any, Any]]
_mapped = weakref.WeakValueDictionary()  # so a thousand views of one file are one mapping


def _mapped_file_reduction(array: _Array) -> Any:
    """Returns how pickle is to put an array together; None if no file could be mapped for it."""
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    # A memmap whose elements were computed or copied is plain memory, and what was written into
    # one of mode "c" is not in the file.
    if type(root) is not np.memmap or root.filename is None or root.mode == "c":
        return None
    if type(array) not in (np.ndarray, np.memmap) or not array.size:
        return None
    begin = root.offset + array.ctypes.data - root.ctypes.data
    place = begin, array.dtype, array.shape, array.strides
    try:
        # A relative path NumPy has made absolute.
        offset = array.offset if isinstance(array, np.memmap) else None
        arguments = root.filename, os.stat(root.filename).st_size, place, offset
        _view(*arguments)
    except (OSError, ValueError, FleetError):  # removed, cut off, strides that lead out of it
        return None
    return _view, arguments


def _view(path: _FileName, file_bytes: int, place: tuple[Any, ...], offset: int | None) -> Any:
    """What lies at this place of a file; with an ``offset``, which only describes it, a memmap."""
    if (found := os.stat(path).st_size) != file_bytes:
        raise FleetError(
            f"The file {os.fspath(path)!r}, which a data set maps, has {found} bytes, but had "
            f"{file_bytes} when the pipeline started. It must stay as it is as long as that runs."
        )
    if (file := _mapped.get(path)) is None:
        file = _mapped[path] = np.memmap(path, dtype=np.uint8, mode="r")
    begin, dtype, shape, strides = place
    view: Any = np.ndarray(shape, dtype, file, begin, strides)
    if offset is not None:
        view = view.view(np.memmap)
        view.__array_finalize__(file)  # it gets to know the file
        view.offset = offset
    return view


LEAST_BYTES = 256
"""Arrays of fewer bytes stay in the pickle, where they take less with all that is about them."""

_ALIGNMENT = 64
_LENGTH = struct.Struct("<Q")
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Payload:
    """A sealed memory file, which lasts as long as somebody has it open or mapped.

    Pickled, it is its path: it comes out opened anew, or as None where that can't be opened.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def written(cls, write: Callable[[Any], object]) -> Payload:
        """Returns what a function writes into the file that it is given."""
        payload = cls(os.memfd_create("optuna-fleet-data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        with open(payload.descriptor, "wb", closefd=False) as file:
            write(file)
        fcntl.fcntl(payload.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return payload

    @property
    def path(self) -> str:
        """Where processes of this machine and user open it, as long as this one has it open."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def load(self) -> Any:
        """Returns what `pack` has put there."""
        return unpack(memoryview(mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE)))

    def __reduce__(self) -> Any:
        return _opened, (self.path,)


def _opened(path: str) -> Payload | None:
    with suppress(OSError):  # not of this machine, or not for the eyes of this process
        found = Payload(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        if fcntl.fcntl(found.descriptor, fcntl.F_GET_SEALS) == _SEALS:
            return found  # else it was closed, and its number is another file's
    return None


def pack(value: Any, file: Any) -> None:
    """Writes a value into a file."""
    outside: list[memoryview] = []
    # Not a method of the pickler: in a cycle it would keep what it has seen for a while.
    stays_inside = functools.partial(_stays_inside, outside)
    _Pickler(file, buffer_callback=stays_inside).dump_all(value)
    lengths = [file.tell(), *(blob.nbytes for blob in outside)]
    file.write(_padding(lengths[0]))
    for blob in outside:
        file.write(blob)
        file.write(_padding(blob.nbytes))
    file.write(struct.pack(f"<{len(lengths) + 1}Q", *lengths, len(lengths)))


def unpack(memory: memoryview) -> Any:
    """Returns what was packed; its large arrays are views of the memory.

    A `Source` is told of the random generators in it.
    """
    end = memory.nbytes - _LENGTH.size
    (number,) = _LENGTH.unpack_from(memory, end)
    lengths = struct.unpack_from(f"<{number}Q", memory, end - number * _LENGTH.size)
    begins = accumulate((n + len(_padding(n)) for n in lengths), initial=0)
    blobs = [memory[begin : begin + n] for begin, n in zip(begins, lengths, strict=False)]
    value, generators = pickle.loads(blobs[0], buffers=blobs[1:])
    return replace(value, generators=generators) if isinstance(value, Source) else value


def generators_in(value: Any) -> list[Generator]:
    """Returns the random generators that pickling a value comes across."""
    with open(os.devnull, "wb") as nowhere:
        pickler = _Pickler(nowhere, buffer_callback=lambda _: False)
        with suppress(Exception):  # what can't be pickled can be used in this process
            pickler.dump_all(value)
    return pickler.generators


def _stays_inside(outside: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    raw = buffer.raw()
    if raw.nbytes < LEAST_BYTES:
        return True
    outside.append(raw)
    return False


def _padding(nbytes: int) -> bytes:
    return bytes(-nbytes % _ALIGNMENT)


class _Pickler(packing.Pickler):
    def __init__(self, stream: Any, *, buffer_callback: Callable[[Any], bool]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffer_callback)
        self.generators: list[Generator] = []
        self._storages: dict[tuple[int, int], np.ndarray[Any, Any]] = {}

    def dump_all(self, value: Any) -> None:
        """Writes a value and, as the same objects, the random generators that it has in it."""
        self.dump((value, self.generators))  # in this order: they are found while it is written

    def reducer_override(self, obj: Any) -> Any:
        if is_generator(obj):
            self.generators.append(obj)
        found = None
        if isinstance(obj, np.ndarray):
            found = _mapped_file_reduction(obj) or _array_reduction(obj)
        elif "torch" in sys.modules and type(obj) is sys.modules["torch"].Tensor:
            found = self._tensor_reduction(obj)
        return super().reducer_override(obj) if found is None else found

    def _tensor_reduction(self, tensor: Any) -> Any:
        """By way of its whole storage, which tensors that share it go on sharing."""
        from optuna_fleet.pipeline.chunks import layout  # it imports torch, which costs seconds

        storage = tensor.untyped_storage() if layout.is_view_of_bytes(tensor) else None
        if storage is None or storage.nbytes() < LEAST_BYTES:
            return None
        key = storage.data_ptr(), storage.nbytes()
        raw = self._storages.setdefault(key, layout.storage_bytes(tensor))
        place = tensor.storage_offset(), (*tensor.shape,), tensor.stride()
        return layout.tensor_in, (raw, tensor.dtype, *place)


def _array_reduction(array: np.ndarray[Any, Any]) -> Any:
    flags = array.flags
    if type(array) is np.ndarray and not (flags.forc or array.dtype.hasobject):
        return np.ascontiguousarray(array).__reduce_ex__(5)  # of others NumPy pickles the bytes
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSetup:
    """The pipeline as whoever serves it gets it.

    Attributes:
        payload: The data sets and their stages; None if they are to be fetched from the driver.
        spec: Their description.
        finishes: The elementwise ends that trainers may do, as bytes, by data set.
        memory_bytes: Bytes for preprocessed data; None where the machine decides.
        spill_dir: The folder of the file for them; None for memory.
        chunk_bytes: Size of a chunk to aim at; None where that follows from the others.
        num_preprocessors: Most preprocessors at a time; 0 until `setup` if the user gave none.
        is_adaptive: Run as many of them as are needed, not all.
        niceness: What is added to theirs, so that trials that compute on the CPU go first.
        settings: What the script's process is set to, which holds for them too.
        num_alone: Most that work for each run, which shares nothing with others; None if all runs
            share what is made.
    """

    payload: Payload | None
    spec: PipelineSpec
    finishes: Mapping[str, bytes | None] = field(default_factory=dict)
    memory_bytes: int | None = None
    spill_dir: str | None = None
    chunk_bytes: int | None = None
    num_preprocessors: int = 0
    is_adaptive: bool = False
    niceness: int = 0
    settings: Settings = field(default_factory=Settings)
    num_alone: int | None = None

    def setup(
        self,
        default_preprocessors: int,
        *,
        is_adaptive: bool = False,
        niceness: int = 0,
        finish_on_device: bool = False,
        num_slots: int = 1,
    ) -> PipelineSetup:
        """Returns it for whoever serves it on some machine.

        There are no more than ``default_preprocessors``, or, if ``is_adaptive``, as many of them
        as are needed; if the user gave a number, there are so many. Where trials share nothing,
        each of ``num_slots`` has its own. With ``finish_on_device`` trainers do the elementwise
        end of the preprocessing.
        """
        spec = self.spec
        if finish_on_device:
            datasets = [replace(d, finish=self.finishes.get(d.name)) for d in spec.datasets]
            spec = replace(spec, datasets=tuple(datasets))
        number = num_slots * (self.num_alone or 0) or self.num_preprocessors
        return replace(
            self,
            spec=spec,
            finishes={},
            num_preprocessors=number or default_preprocessors,
            is_adaptive=is_adaptive and not number,
            niceness=niceness,
            settings=settings_here(),
        )


def packed_part(argument: str, name: str, value: Any) -> bytes | None:
    """Returns something of the user's as bytes, for trainers; None of None."""
    if value is None:
        return None
    try:
        return packing.pack(value)
    except Exception as error:
        what = f"{argument} of data set {name!r}"
        raise unpicklable(what, {argument: value}, error) from error


def unpicklable(what: str, wholes: Mapping[str, Any], error: Exception) -> FleetConfigError:
    """Returns the error for things of which, by their names, one can't be pickled."""
    reason = explained(wholes, "given to SharedPipeline", error)
    return FleetConfigError(
        f"The {what} can't be pickled, as preprocessors and trainers, which are other processes, "
        f"need it: {reason} Create such a thing (an open file, a lock, a connection) when it is "
        "first used, in the __getitem__ of a data set, and leave it out in its __getstate__ if "
        "the script has used it before."
    )
