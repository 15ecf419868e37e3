"""Samples in a form that a chunk keeps without loss, PIL images and tv_tensors included."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from optuna_fleet.pipeline.chunks.columns import without_images
from optuna_fleet.pipeline.chunks.layout import write_chunk
from optuna_fleet.pipeline.chunks.structure import flatten, map_leaves, rebuild
from optuna_fleet.pipeline.chunks.view import ChunkView
from optuna_fleet.wire import packing

Stored = tuple[str, bytes, Any]
"""One mark per leaf, pickled ``info`` of PIL images by leaf, and the sample of plain leaves."""

AS_IS, PICTURE, PICKLED = ".", "p", "o"
TENSOR = {"Tensor": "t", "Image": "i", "Mask": "m", "Video": "v"}
"""Marks of tensors by class; in upper case, the channels came last in memory."""

_PLAIN = (int, float, bool, str, bytes)
_PICTURE_MODES = ("L", "RGB")


def pack(sample: Any, *, faithful: bool) -> Stored:
    """Returns the sample in a form that both layouts of a chunk keep.

    Args:
        sample: Any nest of any objects.
        faithful: Keep also what torchvision's transforms do not look at: the ``info`` of PIL
            images (EXIF) and their subclasses. For code that is not known.
    """
    leaves: list[Any] = []
    structure = flatten(sample, leaves)
    packed = [_pack(leaf, faithful=faithful) for leaf in leaves]
    marks = "".join(mark for mark, _ in packed)
    infos = {
        number: leaf.info
        for number, (leaf, mark) in enumerate(zip(leaves, marks, strict=True))
        if faithful and mark == PICTURE and leaf.info
    }
    plain = rebuild(structure, iter([leaf for _, leaf in packed]))
    return marks, packing.pack(infos) if infos else b"", plain


def unpack(stored: Stored, *, copy: bool) -> Any:
    """Returns the sample that was packed.

    Args:
        stored: What ``pack`` gave, perhaps from a chunk.
        copy: The sample may be changed in place without changing what is stored.
    """
    marks, pickled_infos, sample = stored
    infos: dict[int, Any] = pickle.loads(pickled_infos) if pickled_infos else {}
    leaves: list[Any] = []
    structure = flatten(sample, leaves)
    unpacked = []
    for number, (mark, leaf) in enumerate(zip(marks, leaves, strict=True)):
        unpacked.append(_unpack(mark, leaf, copy=copy))
        if number in infos:
            unpacked[-1].info = infos[number]
    return rebuild(structure, iter(unpacked))


def nbytes(sample: Any) -> int:
    """Returns about how many bytes the sample's leaves take, PIL images as they are stored."""
    leaves: list[Any] = []
    flatten(sample, leaves)
    return sum(map(_leaf_bytes, leaves))


def same(left: Any, right: Any) -> bool:
    """Whether two samples are of the same structure, types and bits.

    Objects that are no tensors, arrays, images or numbers must be equal by ``==``.
    """
    lefts: list[Any] = []
    rights: list[Any] = []
    if flatten(left, lefts) != flatten(right, rights):
        return False
    return all(map(_same_leaf, lefts, rights))


def through_chunk(sample: Any, *, pickled: bool) -> Any:
    """Returns the sample as it comes out of a chunk of it alone, of one layout or the other."""
    return ChunkView(write_chunk([sample], collated_by_user=pickled)).samples(0, 1)[0]


def batch_of_two(sample: Any) -> Any:
    """Returns the batch of the sample and itself, as ``default_collate`` makes it."""
    return default_collate([map_leaves(sample, without_images)] * 2)


def is_picture(value: Any) -> bool:
    """Whether the value is a PIL image; imports nothing."""
    images = sys.modules.get("PIL.Image")
    return images is not None and isinstance(value, images.Image)


def channels_last(tensor: torch.Tensor) -> bool:
    """Whether an image [C, H, W] lies in memory as [H, W, C]."""
    return (
        tensor.ndim == 3 and not tensor.is_contiguous() and tensor.permute(1, 2, 0).is_contiguous()
    )


def _pack(leaf: Any, *, faithful: bool) -> tuple[str, Any]:
    if isinstance(leaf, torch.Tensor):
        return _pack_tensor(leaf)
    if is_picture(leaf) and _simple_picture(leaf, faithful=faithful):
        return PICTURE, torch.from_numpy(np.array(leaf))
    if type(leaf) is np.ndarray and leaf.dtype.kind in "biufc" and leaf.dtype.isnative:
        return AS_IS, leaf.copy(order="C")
    if type(leaf) in _PLAIN or isinstance(leaf, np.generic):
        return AS_IS, leaf
    return PICKLED, packing.pack(leaf)


def _pack_tensor(tensor: torch.Tensor) -> tuple[str, Any]:
    mark = _tensor_classes().get(type(tensor))
    usual = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if mark is None or not usual or tensor.is_quantized or tensor.requires_grad:
        return PICKLED, packing.pack(tensor)
    plain = tensor.as_subclass(torch.Tensor)
    # The order in memory is kept: it decides how fast a crop is resized, and its last bits.
    if channels_last(plain):
        return mark.upper(), plain.permute(1, 2, 0)
    return mark, plain.contiguous()


def _unpack(mark: str, leaf: Any, *, copy: bool) -> Any:
    if mark == AS_IS:
        return leaf.copy() if copy and isinstance(leaf, np.ndarray) else leaf
    if mark == PICKLED:
        return pickle.loads(leaf)
    if mark == PICTURE:
        import PIL.Image  # stored by another preprocessor: this one may not have met any yet

        return PIL.Image.fromarray(leaf.numpy())
    tensor: torch.Tensor = leaf.clone() if copy else leaf
    if mark.isupper():
        tensor = tensor.permute(2, 0, 1)
    classes = {mark: kind for kind, mark in _tensor_classes(load=mark not in "tT").items()}
    return tensor.as_subclass(classes[mark.lower()])


def _tensor_classes(*, load: bool = False) -> dict[type[torch.Tensor], str]:
    classes: dict[type[torch.Tensor], str] = {torch.Tensor: TENSOR["Tensor"]}
    name = "torchvision.tv_tensors"
    module = importlib.import_module(name) if load else sys.modules.get(name)
    if module is not None:
        classes |= {getattr(module, name): mark for name, mark in TENSOR.items() if mark != "t"}
    return classes


def _simple_picture(picture: Any, *, faithful: bool) -> bool:
    simple = picture.mode in _PICTURE_MODES and 0 not in picture.size
    return simple and (not faithful or type(picture) is sys.modules["PIL.Image"].Image)


def _leaf_bytes(leaf: Any) -> int:
    if is_picture(leaf):
        return int(leaf.width * leaf.height * len(leaf.getbands()))
    return int(leaf.nbytes) if isinstance(leaf, (torch.Tensor, np.ndarray)) else 8


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
        return _same_tensor(left, right)
    if isinstance(left, (np.ndarray, np.generic)):
        return _same_array(left, right)
    return bool(left == right or (left != left and right != right))


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    looks: Sequence[str] = ("dtype", "shape", "device", "layout", "requires_grad")
    if any(getattr(left, look) != getattr(right, look) for look in looks):
        return False
    # What tv_tensors know beside their values: the format and canvas of boxes.
    if vars(left) != vars(right):
        return False
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor).contiguous().reshape(-1).view(torch.uint8)


def _same_array(left: Any, right: Any) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.hasobject:
        return bool((left == right).all())
    return bool(left.tobytes() == right.tobytes())
