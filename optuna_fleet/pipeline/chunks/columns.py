"""One leaf of many samples as one array: what it looks like, how it is written, how it is read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import default_collate

PIECE_BYTES = 8192
"""Leaves of at least this size are written when they are there, smaller ones in one array."""

ColumnKind = Literal["tensor", "array", "number", "scalar", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column whose samples all look the same.

    Attributes:
        kind: What one sample's leaf was: a tensor, a NumPy array, a Python number, a NumPy scalar,
            or text (str, bytes), which stays a list of objects.
        dtype: Element type of the batch, as ``default_collate`` chooses it; None for text.
        shape: Shape of one sample's leaf.
        texts: The leaves themselves, for text.
    """

    kind: ColumnKind
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    texts: tuple[str | bytes, ...] = ()

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample's leaf in the chunk's body."""
        return 0 if self.dtype is None else torch.Size(self.shape).numel() * self.dtype.itemsize


def describe(value: Any) -> Column | None:
    """Returns the column of leaves like this one; None if it is of an unusual kind."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    if kind is np.ndarray:
        return _describe_array(value)
    if isinstance(value, (str, bytes)):
        return Column(kind="text")
    if kind in (int, float, bool) or isinstance(value, np.generic):
        return _describe_number(value)
    return None


def is_alike(column: Column, first: Any, value: Any) -> bool:
    """Returns whether a leaf belongs into the column of the first one."""
    if type(value) is not type(first):
        return False
    if column.kind == "tensor":
        return (
            value.dtype == column.dtype and tuple(value.shape) == column.shape and _is_plain(value)
        )
    if column.kind == "array":
        _check_strides(value)
        return bool(value.dtype == first.dtype and value.shape == column.shape)
    return type(value) is not int or -(1 << 63) <= value < 1 << 63


def is_large(column: Column) -> bool:
    """Returns whether leaves are written one by one."""
    return column.kind in ("tensor", "array") and column.sample_bytes >= PIECE_BYTES


def write(row: torch.Tensor, value: Any) -> None:
    """Writes a large leaf into its row."""
    if isinstance(value, np.ndarray):  # by NumPy, as torch warns about arrays not writable
        np.copyto(row.numpy(), value)
    else:
        row.copy_(_bare(value))


def joined(column: Column, values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Returns the bytes of small leaves, in the order of the samples."""
    if column.kind == "tensor":
        return raw_bytes(torch.stack([_bare(value) for value in values]))
    if column.kind == "array":
        stacked: np.ndarray[Any, Any] = np.stack(values)
        return stacked.reshape(-1).view(np.uint8)
    return raw_bytes(default_collate(list(values)))


def _bare(value: torch.Tensor) -> torch.Tensor:
    """Without gradient and subclass; within a mode torch 2.4 makes no subclass that it is."""
    bare = value.detach()
    return bare if type(bare) is torch.Tensor else bare.as_subclass(torch.Tensor)


def raw_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns the bytes of a tensor's elements; a view of them where they lie in order."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    # Not reshape: the stride of a single element may be anything.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()


def leaf(column: Column, row: Any) -> Any:
    """Returns one sample's leaf as it was before it was stored, of its row or its text."""
    if column.kind in ("tensor", "text"):
        return row
    if column.kind == "number":
        return row.item()
    array = row.numpy()
    return array[()] if column.kind == "scalar" else array


def is_picture(value: Any) -> bool:
    """Returns whether the value is a PIL image; imports nothing."""
    images = sys.modules.get("PIL.Image")
    return images is not None and isinstance(value, images.Image)


def leaf_bytes(value: Any) -> int:
    """Returns about how many bytes a leaf takes."""
    if is_picture(value):
        return int(value.width * value.height * len(value.getbands()))
    return int(value.nbytes) if isinstance(value, (torch.Tensor, np.ndarray)) else 8


def _is_plain(value: torch.Tensor) -> bool:
    plain = value.layout is torch.strided and value.device.type == "cpu"
    return plain and not (value.is_quantized or value.is_nested or value.requires_grad)


def _describe_tensor(value: torch.Tensor) -> Column | None:
    if not _is_plain(value):
        return None
    if type(value) is not torch.Tensor and type(default_collate([value])) is not torch.Tensor:
        return None
    return Column(kind="tensor", dtype=value.dtype, shape=tuple(value.shape))


def _check_strides(value: np.ndarray[Any, Any]) -> None:
    """Raises ValueError where torch makes no tensor of an array, as it is reversed."""
    if any(stride < 0 for stride in value.strides):
        torch.from_numpy(value)


def _describe_array(value: np.ndarray[Any, Any]) -> Column | None:
    _check_strides(value)
    try:
        dtype = torch.from_numpy(np.empty(0, value.dtype)).dtype
    except (TypeError, ValueError):
        return None
    return Column(kind="array", dtype=dtype, shape=value.shape)


def _describe_number(value: Any) -> Column | None:
    try:
        batch = default_collate([value])
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    if not isinstance(batch, torch.Tensor) or batch.ndim != 1:
        return None
    kind: ColumnKind = "scalar" if isinstance(value, np.generic) else "number"
    return Column(kind=kind, dtype=batch.dtype)
