"""Samples in a form that the decoded store keeps without loss, images included; and comparison."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from optuna_fleet.pipeline.chunks.columns import without_images
from optuna_fleet.pipeline.chunks.structure import flatten, map_leaves
from optuna_fleet.pipeline.preprocessor import decoded_samples

_PICTURE_MODES = ("L", "RGB")
_TV_TENSORS = ("Image", "Mask", "Video")


@dataclass(frozen=True, slots=True)
class _Picture:
    """A PIL image: its pixels, and what else it knows (EXIF)."""

    pixels: np.ndarray[Any, Any]
    info: dict[Any, Any]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of torchvision's, or one whose channels come last in memory.

    That order decides how fast a crop is resized, and its last bits.
    """

    values: torch.Tensor
    kind: str | None
    channels_last: bool


def pack(sample: Any) -> Any:
    """Returns a sample of leaves that can be pickled fast, for `unpack`."""
    return map_leaves(sample, _pack)


def unpack(packed: Any, *, copy: bool) -> Any:
    """Returns the sample that was packed.

    Args:
        packed: What ``pack`` gave, perhaps by way of the store.
        copy: The sample may be changed in place without changing what is stored.
    """
    return map_leaves(packed, _unpack_copy if copy else _unpack)


def through_store(packed: Any) -> Any:
    """Returns what was packed as it comes out of the decoded store."""
    record = b"".join(decoded_samples.pack(packed))
    return decoded_samples.unpack(memoryview(record), copy=True)


def batch_of_two(sample: Any) -> Any:
    """Returns the batch of the sample and itself, as ``default_collate`` makes it."""
    return default_collate([map_leaves(sample, without_images)] * 2)


def nbytes(sample: Any) -> int:
    """Returns about how many bytes the sample's leaves take, PIL images as they are stored."""
    leaves: list[Any] = []
    flatten(sample, leaves)
    return sum(map(_leaf_bytes, leaves))


def is_picture(value: Any) -> bool:
    """Whether the value is a PIL image; imports nothing."""
    images = sys.modules.get("PIL.Image")
    return images is not None and isinstance(value, images.Image)


def _pack(leaf: Any) -> Any:
    if is_picture(leaf):
        is_plain = type(leaf) is sys.modules["PIL.Image"].Image and 0 not in leaf.size
        if is_plain and leaf.mode in _PICTURE_MODES:
            return _Picture(np.array(leaf), leaf.info)
        return leaf
    if not isinstance(leaf, torch.Tensor) or leaf.requires_grad:
        return leaf
    module = sys.modules.get("torchvision.tv_tensors")
    kinds = {getattr(module, name): name for name in _TV_TENSORS} if module is not None else {}
    channels_last = (
        leaf.ndim == 3 and not leaf.is_contiguous() and leaf.permute(1, 2, 0).is_contiguous()
    )
    if type(leaf) in kinds or (type(leaf) is torch.Tensor and channels_last):
        plain = leaf.as_subclass(torch.Tensor)
        values = plain.permute(1, 2, 0) if channels_last else plain
        return _Tensor(values, kinds.get(type(leaf)), channels_last)
    return leaf


def _unpack(leaf: Any) -> Any:
    if isinstance(leaf, _Picture):
        import PIL.Image  # stored by another preprocessor: this one may not have met any yet

        picture = PIL.Image.fromarray(leaf.pixels)
        picture.info = dict(leaf.info)
        return picture
    if isinstance(leaf, _Tensor):
        values = leaf.values.permute(2, 0, 1) if leaf.channels_last else leaf.values
        if leaf.kind is None:
            return values
        from torchvision import tv_tensors

        return values.as_subclass(getattr(tv_tensors, leaf.kind))
    return leaf


def _unpack_copy(leaf: Any) -> Any:
    leaf = _unpack(leaf)
    if isinstance(leaf, torch.Tensor):
        return leaf if leaf.requires_grad else leaf.clone()
    return leaf.copy() if type(leaf) is np.ndarray else leaf


def _leaf_bytes(leaf: Any) -> int:
    if is_picture(leaf):
        return int(leaf.width * leaf.height * len(leaf.getbands()))
    return int(leaf.nbytes) if isinstance(leaf, (torch.Tensor, np.ndarray)) else 8


def same(left: Any, right: Any) -> bool:
    """Whether two samples are of the same structure, types and bits.

    Objects that are no tensors, arrays, images or numbers must be equal by ``==``.
    """
    lefts: list[Any] = []
    rights: list[Any] = []
    if flatten(left, lefts) != flatten(right, rights):
        return False
    return all(map(_same_leaf, lefts, rights))


def _same_leaf(left: Any, right: Any) -> bool:
    if is_picture(left) and is_picture(right):
        return bool(
            (left.mode, left.size) == (right.mode, right.size)
            and left.getpalette() == right.getpalette()
            and left.tobytes() == right.tobytes()
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        looks = ("dtype", "shape", "device", "layout", "requires_grad")
        alike = all(getattr(left, look) == getattr(right, look) for look in looks)
        # What tv_tensors know beside their values: the format and canvas of boxes.
        return alike and vars(left) == vars(right) and torch.equal(_bits(left), _bits(right))
    if isinstance(left, (np.ndarray, np.generic)):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        is_equal = (left == right).all() if left.dtype.hasobject else None
        return left.tobytes() == right.tobytes() if is_equal is None else bool(is_equal)
    return bool(left == right or (left != left and right != right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor).contiguous().reshape(-1).view(torch.uint8)
