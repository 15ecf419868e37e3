"""Pickles of samples whose tensors and arrays stay outside, so that reading need not copy them."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

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
