"""Whether this process's device works, and can serve another run."""

from __future__ import annotations

import gc
import sys
from typing import Any

from optuna_fleet.resources import Device


def ailment_of(device: Device) -> str:
    """Returns what is wrong with this process's device, in words, or "".

    A GPU is tried where torch was imported; without it no trial uses one.
    """
    torch: Any = sys.modules.get("torch")
    if device.type == "cpu" or torch is None:
        return ""
    try:
        torch.ones(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def gpu_works(*, waits: bool) -> bool:
    """Whether this process can go on to use its GPU, if it does: errors there are for good.

    To wait for all that the GPU has to do takes for ever if other ranks have left a collective.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize() if waits else torch.cuda.current_stream().query()
    except RuntimeError:
        return False
    return True


def clean_up(*, collect: bool) -> bool:
    """Free what the run held; return whether the process can serve another one."""
    if not gpu_works(waits=True):
        return False
    torch: Any = sys.modules.get("torch")
    has_gpu = torch is not None and torch.cuda.is_initialized()
    if collect or has_gpu:
        gc.collect()
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo and _has_compiled(dynamo):
        dynamo.reset()  # else what other trials have compiled decides how the next one is
    if has_gpu:
        torch.cuda.empty_cache()
    return True


def _has_compiled(dynamo: Any) -> bool:
    """Whether it has, or torch does not say: with a GPU a reset takes seconds."""
    codes = getattr(dynamo.convert_frame, "input_codes", None)
    return bool(getattr(codes, "seen", True))
