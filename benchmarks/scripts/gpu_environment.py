"""What the machine is; fails if there is no GPU that works where one is asked for."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys

import torch

from optuna_fleet.resources import cpu_count

PACKAGES = ("torch", "torchvision", "optuna", "mip", "numpy", "scikit-learn")


def main() -> None:
    print(f"- {platform.platform()}, {cpu_count()} cores, Python {platform.python_version()}")
    print(f"- {', '.join(f'{name} {version_of(name)}' for name in PACKAGES)}")
    if sys.argv[1] == "cpu":
        return
    if smi := shutil.which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,memory.total,compute_mode,mig.mode.current"
        told = subprocess.run(
            [smi, query, "--format=csv,noheader"], capture_output=True, text=True
        )
        print(f"- nvidia-smi: {told.stdout.strip() or told.stderr.strip()}", flush=True)
    print(f"- CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}", flush=True)
    print(
        f"- torch sees: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}", flush=True
    )
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "is missing"


if __name__ == "__main__":
    main()
