"""Finding the devices of this machine, without initialising CUDA in any of our processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.resources import Device, Fleet, cpu_count

_PROBE = """
import json, torch
if torch.cuda.is_available():
    torch.cuda.init()  # before it, the number is that of cards, not of what MIG makes of them
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps(names))
"""
_PROBE_TIMEOUT_S = 120.0
_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")  # the last is that of WSL


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
    gpus = [] if device_type == "cpu" else _gpu_names()
    if device_type == "cuda" or gpus:
        return _gpu_fleet(gpus, devices, slots_per_device)
    number = (devices if devices is not None else cpu_count()) * slots_per_device
    return Fleet(devices=tuple(Device(index=i, node=0, kind="cpu") for i in range(number)))


def _gpu_fleet(names: list[str], devices: int | None, slots_per_device: int) -> Fleet:
    number = len(names) if devices is None else devices
    if number > len(names) or not names:
        raise FleetConfigError(
            f"{number or 'all'} GPUs were asked for, but {len(names)} are visible here"
            + (f" ({', '.join(names)})" if names else "")
            + ". Ask for fewer, or pass device_type='cpu' for CPU slots; "
            "LocalCluster(slots_per_device=2) has two trials share each GPU."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    ordinals = visible.split(",") if visible else [str(index) for index in range(len(names))]
    return Fleet(
        devices=tuple(
            Device(index=slot * number + gpu, node=0, kind=names[gpu], visible=ordinals[gpu])
            for slot in range(slots_per_device)
            for gpu in range(number)
        )
    )


def _gpu_names() -> list[str]:
    # Asking torch costs seconds, and no NVIDIA driver means no GPU.
    if not any(map(os.path.exists, _DRIVERS)):
        return []
    probe = [sys.executable, "-c", _PROBE]
    try:
        answer = subprocess.run(
            probe, capture_output=True, text=True, check=True, timeout=_PROBE_TIMEOUT_S
        )
    except subprocess.SubprocessError as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise FleetConfigError(
            "This machine has an NVIDIA driver, but torch can't list its GPUs; pass "
            f"device_type='cpu' to do without them. torch said:\n{said.strip()}"
        ) from error
    names: list[str] = json.loads(answer.stdout.splitlines()[-1])
    return names
