"""Whether a device works at all."""

from __future__ import annotations

import sys
from typing import Any

from optuna_fleet.resources import Device


def ailment_of(device: Device) -> str:
    """Returns what is wrong with this process's device, in words, or "".

    A GPU is tried where torch was imported; without it no trial uses one.
    """
    torch: Any = sys.modules.get("torch")
    if device.kind == "cpu" or torch is None:
        return ""
    try:
        torch.ones(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
