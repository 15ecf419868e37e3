"""How samples lie in a chunk's file.

``[length of header: 8 bytes][header: pickle][padding to 64 bytes][body]``. In the *dense* layout
the body holds each leaf of all samples as one contiguous array, so a batch is a slice. Where
samples differ in structure or shape, or the user collates, it is the *object* layout: pickled
samples one after another. The header says which; the choice is made chunk by chunk.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import cloudpickle
import torch

from optuna_fleet.pipeline import columns
from optuna_fleet.pipeline.columns import Column
from optuna_fleet.pipeline.structure import Structure, flatten

ALIGNMENT = 64
"""Bytes. Arrays begin at multiples of it, as torch's own do."""

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseHeader:
    """Columns and, for each, its place in bytes from the beginning of the body."""

    num_samples: int
    structure: Structure
    columns: tuple[Column, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectHeader:
    """Sample i is the pickle in bytes [offsets[i], offsets[i + 1]) of the body."""

    offsets: tuple[int, ...]


def aligned(nbytes: int) -> int:
    """Returns ``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def write_chunk(samples: Sequence[Any], *, collated_by_user: bool) -> int:
    """Stores samples in a new sealed memory file.

    Args:
        samples: At least one sample.
        collated_by_user: They must come out as they are, for the user's ``collate_fn``.

    Returns:
        The file's descriptor, which the caller must close.
    """
    if not collated_by_user:
        dense = _plan(samples)
        if dense is not None:
            return _write_dense(*dense)
    return _write_objects(samples)


def sample_bytes(sample: Any, *, collated_by_user: bool) -> int:
    """Returns about how many bytes a sample takes in a chunk."""
    leaves: list[Any] = []
    if not collated_by_user and _plan([sample]):
        flatten(sample, leaves)
        return sum(map(columns.leaf_bytes, leaves))
    return len(_dumps(sample))


def _plan(samples: Sequence[Any]) -> tuple[DenseHeader, list[Sequence[Any]]] | None:
    """The dense layout of these samples and the leaves of each column, if they have one."""
    first: list[Any] = []
    structure = flatten(samples[0], first)
    rows = [first]
    for sample in samples[1:]:
        leaves: list[Any] = []
        if flatten(sample, leaves) != structure:
            return None
        rows.append(leaves)
    values: list[Sequence[Any]] = list(zip(*rows, strict=True))
    described = [columns.describe(column) for column in values]
    found = [column for column in described if column is not None]
    if len(found) < len(described):
        return None
    ends = accumulate((aligned(_nbytes(column, len(samples))) for column in found), initial=0)
    header = DenseHeader(
        num_samples=len(samples),
        structure=structure,
        columns=tuple(found),
        offsets=tuple(ends),
    )
    return header, values


def _nbytes(column: Column, num_samples: int) -> int:
    if column.dtype is None:
        return 0
    return num_samples * torch.Size(column.shape).numel() * column.dtype.itemsize


def _write_dense(header: DenseHeader, values: list[Sequence[Any]]) -> int:
    head = _head(header)

    def fill(memory: mmap.mmap) -> None:
        memory[: len(head)] = head
        for column, offset, leaves in zip(header.columns, header.offsets, values, strict=False):
            if count := _nbytes(column, header.num_samples):
                assert column.dtype is not None
                destination = torch.frombuffer(
                    memory,
                    dtype=column.dtype,
                    count=count // column.dtype.itemsize,
                    offset=len(head) + offset,
                )
                columns.write(column, leaves, destination.view(header.num_samples, *column.shape))

    return _sealed_file(len(head) + header.offsets[-1], fill)


def _write_objects(samples: Sequence[Any]) -> int:
    pickles = [_dumps(sample) for sample in samples]
    head = _head(ObjectHeader(offsets=tuple(accumulate(map(len, pickles), initial=0))))

    def fill(memory: mmap.mmap) -> None:
        for part in (head, *pickles):
            memory.write(part)

    return _sealed_file(len(head) + sum(map(len, pickles)), fill)


def _head(header: DenseHeader | ObjectHeader) -> bytes:
    packed = _dumps(header)
    head = LENGTH.pack(len(packed)) + packed
    return head.ljust(aligned(len(head)), b"\0")


def _sealed_file(nbytes: int, fill: Callable[[mmap.mmap], None]) -> int:
    """Makes an immutable memory file: no trainer can change what the others read."""
    fd = os.memfd_create("optuna-fleet-chunk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes)
        fill(memory)
        memory.close()  # a file that is mapped for writing can't be sealed
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


class _Pickler(pickle.Pickler):
    """Stores CPU tensors as arrays: a tenth of the time that torch's own reduction takes."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _like_array(obj):
            return torch.from_numpy, (obj.detach().numpy(),)
        return NotImplemented


def _like_array(tensor: torch.Tensor) -> bool:
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return plain and not tensor.requires_grad and tensor.dtype not in _NO_ARRAY


_NO_ARRAY = {torch.bfloat16, torch.complex32} | {
    dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and name.startswith(("float8", "float4", "q"))
}


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(value)
    except Exception:
        # Classes of the user's __main__, lambdas: cloudpickle's domain, at its price.
        return bytes(cloudpickle.dumps(value, protocol=5))
    return buffer.getvalue()
