"""Whether this process's device works, and can serve another run."""

from __future__ import annotations

import gc
import sys
from typing import Any

from optuna_fleet.accelerator import accelerator_of, in_use
from optuna_fleet.resources import Device


def ailment_of(device: Device) -> str:
    """Returns what is wrong with this process's device, in words, or "".

    A GPU is tried where torch was imported; without it no trial uses one.
    """
    torch: Any = sys.modules.get("torch")
    if device.type == "cpu" or torch is None:
        return ""
    try:
        torch.ones(1, device=device.type).add_(1)
        accelerator_of(device.type).module.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def gpu_works(*, waits: bool) -> bool:
    """Whether this process can go on to use its GPU, if it does: errors there are for good.

    To wait for all that the GPU has to do takes for ever if other ranks have left a collective.
    """
    if (accelerator := in_use()) is None:
        return True
    gpu = accelerator.module
    try:
        gpu.synchronize() if waits else gpu.current_stream().query()
    except RuntimeError:
        return False
    return True


def clean_up(*, collect: bool) -> bool:
    """Free what the run held; return whether the process can serve another one."""
    if not gpu_works(waits=True):
        return False
    accelerator = in_use()
    if collect or accelerator:
        gc.collect()
    if accelerator:
        accelerator.module.empty_cache()
    return True


def forget_compiled(*, is_same: bool) -> None:
    """Drop what earlier runs have compiled here: else it decides how other trials' code is.

    A trial that has moved, `is_same`, finds what it has compiled, if that can be used again.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo and _has_compiled(dynamo) and not (is_same and _is_of_use(dynamo)):
        dynamo.reset()
        if accelerator := in_use():
            accelerator.module.empty_cache()


def _has_compiled(dynamo: Any) -> bool:
    """Whether it has, or torch does not say: with a GPU a reset takes seconds."""
    codes = getattr(dynamo.convert_frame, "input_codes", None)
    return bool(getattr(codes, "seen", True))


def _is_of_use(dynamo: Any) -> bool:
    """Whether what was compiled can be used again, or torch does not say.

    Torch limits how often it compiles a function, beyond that it does not. What was compiled for
    classes that are gone, or hooks, counts too.
    """
    try:
        limit = dynamo.config.recompile_limit
        entries_of = dynamo.eval_frame._debug_get_cache_entry_list
        codes = [known() for known in dynamo.convert_frame.input_codes.seen]
        guards = [[entry.guard_manager for entry in entries_of(code)] for code in codes if code]
    except AttributeError:
        return False
    is_near = any(len(of_one) > limit // 2 for of_one in guards)
    return not is_near and not any(
        type(guard).__name__ == "DeletedGuardManagerWrapper"
        for of_one in guards
        for guard in of_one
    )
