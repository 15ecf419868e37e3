"""How samples lie in a chunk's file.

``[length of header: 8 bytes][header: pickle][padding to 64 bytes][body]``. In the *dense* layout
the body holds each leaf of all samples as one contiguous array, so a batch is a slice. Where
samples differ in structure or shape, or the user collates, it is the *object* layout: samples one
after another, each a pickle and, beside it, its tensors and arrays, which come out as views of the
chunk. The header says which; the choice is made chunk by chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from optuna_fleet.pipeline.chunks import columns
from optuna_fleet.pipeline.chunks.columns import Column
from optuna_fleet.pipeline.chunks.memory_files import sealed_file as sealed_file
from optuna_fleet.pipeline.chunks.memory_files import sealed_file_of
from optuna_fleet.pipeline.chunks.pickling import dumps as dumps
from optuna_fleet.pipeline.chunks.pickling import dumps_outside
from optuna_fleet.pipeline.chunks.structure import Structure, flatten

ALIGNMENT = 64
"""Bytes. Arrays begin at multiples of it, as torch's own do."""

_ZEROS = bytes(ALIGNMENT)

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseHeader:
    """Columns and, for each, its place in bytes from the beginning of the body.

    Trainers have nothing more to do with the samples if the chunk ``is_finished``.
    """

    num_samples: int
    structure: Structure
    columns: tuple[Column, ...]
    offsets: tuple[int, ...]
    is_finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectHeader:
    """Where each sample's blobs begin and end in the body.

    The first is its pickle, the others are the tensors and arrays that the pickle leaves out.
    """

    blobs: tuple[tuple[tuple[int, int], ...], ...]
    is_finished: bool


def aligned(nbytes: int) -> int:
    """Returns ``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def write_chunk(
    samples: Sequence[Any],
    *,
    collated_by_user: bool,
    is_finished: bool = True,
    read_often: bool = False,
) -> int:
    """Stores samples in a new sealed memory file.

    Args:
        samples: At least one sample.
        collated_by_user: They must come out as they are, for the user's ``collate_fn``.
        is_finished: Trainers have nothing more to do with them.
        read_often: More often than once by each trial.

    Returns:
        The file's descriptor, which the caller must close.
    """
    if not collated_by_user:
        dense = _plan(samples, is_finished)
        if dense is not None:
            return sealed_file_of(_dense(*dense), read_often=read_often)
    return sealed_file_of(_objects(samples, is_finished), read_often=read_often)


def sample_bytes(sample: Any, *, collated_by_user: bool) -> int:
    """Returns about how many bytes a sample takes in a chunk."""
    leaves: list[Any] = []
    if not collated_by_user and _plan([sample], True):
        flatten(sample, leaves)
        return sum(map(columns.leaf_bytes, leaves))
    return len(dumps(sample))


def _plan(
    samples: Sequence[Any], is_finished: bool
) -> tuple[DenseHeader, list[Sequence[Any]]] | None:
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
    ends = accumulate((aligned(len(samples) * column.sample_bytes) for column in found), initial=0)
    header = DenseHeader(
        num_samples=len(samples),
        structure=structure,
        columns=tuple(found),
        offsets=tuple(ends),
        is_finished=is_finished,
    )
    return header, values


def _dense(header: DenseHeader, values: list[Sequence[Any]]) -> list[Any]:
    written: list[Any] = [_head(header)]
    for column, leaves in zip(header.columns, values, strict=True):
        if nbytes := header.num_samples * column.sample_bytes:
            written += [*columns.pieces(column, leaves), bytes(-nbytes % ALIGNMENT)]
    return written


def _objects(samples: Sequence[Any], is_finished: bool) -> list[Any]:
    places, written, end = [], [], 0
    for sample in samples:
        place = []
        for blob in dumps_outside(sample):
            begin, end = end, end + len(blob)
            place.append((begin, end))
            padding = -end % ALIGNMENT
            written += [blob, _ZEROS[:padding]]
            end += padding
        places.append(tuple(place))
    return [_head(ObjectHeader(blobs=tuple(places), is_finished=is_finished)), *written]


def _head(header: DenseHeader | ObjectHeader) -> bytes:
    packed = dumps(header)
    head = LENGTH.pack(len(packed)) + packed
    return head.ljust(aligned(len(head)), b"\0")
