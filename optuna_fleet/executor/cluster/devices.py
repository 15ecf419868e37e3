"""Finding the devices of this machine, without initialising GPUs in any of our processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from optuna_fleet.accelerator import ACCELERATORS, Accelerator, accelerator_of
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.resources import Device, Fleet, cpu_count

_PROBE = """
import json, sys, torch
module = getattr(torch, sys.argv[1])
if module.is_available():
    module.init()  # before it, the number is that of cards, not of what MIG makes of them
names = [module.get_device_name(i) for i in range(module.device_count())]
print(json.dumps(names))
"""
_PROBE_TIMEOUT_S = 120.0


def find_fleet(devices: int | None, device_type: str | None, slots_per_device: int = 1) -> Fleet:
    """Return the local fleet: `slots_per_device` slots on each of `devices` of `device_type`.

    Args:
        devices: How many; None for all visible GPUs, or as many as there are cores if there are
            none.
        device_type: "cuda", "cpu", or None for "cuda" where there are GPUs.
        slots_per_device: Trainers that share one; neighbours in order are on unlike ones.

    Raises:
        FleetConfigError: More GPUs are asked for than there are.
    """
    for each in ACCELERATORS if device_type is None else ():
        if names := _gpu_names(each):
            return _gpu_fleet(each, names, devices, slots_per_device)
    if device_type not in (None, "cpu"):
        chosen = accelerator_of(device_type)
        return _gpu_fleet(chosen, _gpu_names(chosen), devices, slots_per_device)
    number = (devices if devices is not None else cpu_count()) * slots_per_device
    return Fleet(devices=tuple(Device(index=i, node=0, kind="cpu") for i in range(number)))


def _gpu_fleet(
    accelerator: Accelerator, names: list[str], devices: int | None, slots_per_device: int
) -> Fleet:
    number = len(names) if devices is None else devices
    if number > len(names) or not names:
        raise FleetConfigError(
            f"{number or 'all'} GPUs were asked for, but {len(names)} are visible here"
            + (f" ({', '.join(names)})" if names else "")
            + ". Ask for fewer, or pass device_type='cpu' for CPU slots; "
            "LocalCluster(slots_per_device=2) has two trials share each GPU."
        )
    visible = os.environ.get(accelerator.visible, "").replace(" ", "")
    ordinals = visible.split(",") if visible else [str(index) for index in range(len(names))]
    return Fleet(
        devices=tuple(
            Device(
                index=slot * number + gpu,
                node=0,
                kind=names[gpu],
                visible=ordinals[gpu],
                accelerator=accelerator.type,
            )
            for slot in range(slots_per_device)
            for gpu in range(number)
        )
    )


def _gpu_names(accelerator: Accelerator) -> list[str]:
    if not any(map(os.path.exists, accelerator.drivers)):
        return []
    probe = [sys.executable, "-c", _PROBE, accelerator.type]
    try:
        answer = subprocess.run(
            probe, capture_output=True, text=True, check=True, timeout=_PROBE_TIMEOUT_S
        )
    except subprocess.SubprocessError as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise FleetConfigError(
            f"This machine has a driver for {accelerator.type}, but torch can't list its GPUs; "
            f"pass device_type='cpu' to do without them. torch said:\n{said.strip()}"
        ) from error
    names: list[str] = json.loads(answer.stdout.splitlines()[-1])
    return names
