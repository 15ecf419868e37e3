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
"""Leaves of at least this size are written one by one, smaller ones in one array: measured."""

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


def describe(values: Sequence[Any]) -> Column | None:
    """Returns the column of these leaves, or None if they are not alike or of an unusual kind."""
    first = values[0]
    kind = type(first)
    if any(type(value) is not kind for value in values):
        return None
    if isinstance(first, torch.Tensor):
        return _describe_tensors(values)
    if kind is np.ndarray:
        return _describe_arrays(values)
    if isinstance(first, (str, bytes)):
        return Column(kind="text", texts=tuple(values))
    if kind in (int, float, bool) or isinstance(first, np.generic):
        return _describe_numbers(values)
    return None


def pieces(column: Column, values: Sequence[Any]) -> list[Any]:
    """Returns the leaves' bytes, in the order of the samples, as buffers to be written."""
    if column.kind == "tensor":
        tensors = [value.detach().as_subclass(torch.Tensor) for value in values]
        if values[0].nbytes < PIECE_BYTES:
            tensors = [torch.stack(tensors)]
        return [raw_bytes(tensor) for tensor in tensors]
    if column.kind == "array":
        # By NumPy, as torch warns about arrays that are not writable.
        arrays = values if values[0].nbytes >= PIECE_BYTES else [np.stack(values)]
        return [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    return [raw_bytes(default_collate(list(values)))]


def raw_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns the bytes of a tensor's elements; a view of them where they lie in order."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    # Not reshape: the stride of a single element may be anything.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()


def leaf(column: Column, row: torch.Tensor) -> Any:
    """Returns one sample's leaf as it was before it was stored."""
    if column.kind == "tensor":
        return row
    if column.kind == "number":
        return row.item()
    array = row.numpy()
    return array[()] if column.kind == "scalar" else array


def without_images(value: Any) -> Any:
    """Returns a PIL image as its uint8 tensor [channels, height, width], anything else as it is.

    The same as torchvision's ``pil_to_tensor``, whose import would cost each process seconds.
    """
    images = sys.modules.get("PIL.Image")
    if images is None or not isinstance(value, images.Image):
        return value
    pixels = torch.from_numpy(np.array(value))
    return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()


def leaf_bytes(value: Any) -> int:
    """Returns about how many bytes a leaf takes in a chunk."""
    return int(value.nbytes) if isinstance(value, (torch.Tensor, np.ndarray)) else 8


def _describe_tensors(values: Sequence[torch.Tensor]) -> Column | None:
    first = values[0]
    dtype, shape = first.dtype, first.shape
    if first.layout is not torch.strided or first.device.type != "cpu" or first.is_quantized:
        return None
    if type(first) is not torch.Tensor and type(default_collate([first])) is not torch.Tensor:
        return None
    if any(value.dtype != dtype or value.shape != shape for value in values):
        return None
    return Column(kind="tensor", dtype=dtype, shape=tuple(shape))


def _describe_arrays(values: Sequence[np.ndarray[Any, Any]]) -> Column | None:
    first = values[0]
    dtype, shape = first.dtype, first.shape
    if any(value.dtype != dtype or value.shape != shape for value in values):
        return None
    try:
        torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        return None
    return Column(kind="array", dtype=torch_dtype, shape=shape)


def _describe_numbers(values: Sequence[Any]) -> Column | None:
    try:
        batch = default_collate(list(values))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    if not isinstance(batch, torch.Tensor) or batch.ndim != 1:
        return None
    kind: ColumnKind = "scalar" if isinstance(values[0], np.generic) else "number"
    return Column(kind=kind, dtype=batch.dtype)
