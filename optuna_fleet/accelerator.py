"""What trials train on beside CPUs: the one place that knows what accelerators are called.

Another kind is another entry of `ACCELERATORS`. Imports no torch, unless it is asked for.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One kind."""

    type: str  # of torch's devices; `torch.<type>` has its streams, events, memory, generator
    backend: str  # of groups of processes that have one each; on CPUs it is gloo
    visible: str  # variable that says which of them a process sees
    drivers: tuple[str, ...]  # on a machine without these files torch is not asked: it is slow
    nodes: str  # what they are called in /dev
    names: tuple[str, ...] = ()  # how names begin that `visible` may have beside numbers
    slices: str = "\0"  # how those of parts begin, of which the backend makes no groups
    interface: str  # variable that has the backend use one interface of the network
    environment: Mapping[str, str] = field(default_factory=dict)  # unless the user has set it
    always: Mapping[str, str] = field(default_factory=dict)  # likewise, whatever he has set
    failures: tuple[str, ...] = ()  # what torch says where a device itself has failed
    wants_memory: tuple[str, ...] = ()  # what the backend says where it has none left
    switches: Mapping[str, Any] = field(default_factory=dict)  # torch's settings, their defaults

    @property
    def module(self) -> Any:
        """That of torch."""
        return getattr(importlib.import_module("torch"), self.type)

    def number(self, environment: Mapping[str, str], devices: Path) -> int:
        """How many a process with this environment sees; what is no name ends the list."""
        there = len(list(devices.glob(self.nodes)))
        visible = environment.get(self.visible)
        if visible is None:
            return there
        chosen = itertools.takewhile(self._is_name, (n.strip() for n in visible.split(",")))
        return min(there, len(list(chosen)))

    def _is_name(self, name: str) -> bool:
        return name.isdigit() or name.startswith(self.names)


ACCELERATORS: tuple[Accelerator, ...] = (
    Accelerator(
        type="cuda",
        backend="nccl",
        visible="CUDA_VISIBLE_DEVICES",
        drivers=("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"),  # the last is that of WSL
        nodes="nvidia[0-9]*",
        names=("GPU-", "MIG-"),
        slices="MIG-",
        interface="NCCL_SOCKET_IFNAME",
        environment={
            # The driver judges who hangs, and hears of errors from whoever raised them: torch's
            # own watchdog would abort the process first.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
            # A trial that resumes goes on bit for bit; has to be set before cuBLAS is first used.
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        },
        # One trial's error would be told by way of the store, below all prefixes: processes in
        # their first group on it, of whatever trial, would abort, now and later.
        always={"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
        failures=(
            "CUDA driver initialization failed",
            "Unexpected error from cudaGetDeviceCount",
            "No CUDA GPUs are available",
            "no CUDA-capable device is detected",
            "CUDA-capable device(s) is/are busy or unavailable",
            "uncorrectable ECC error",
            "uncorrectable NVLink error",
            "hardware stack error",
            "system not yet initialized",
            "CUDA error: unknown error",
        ),
        wants_memory=(
            "Failed to CUDA calloc",
            "Failed to CUDA malloc",
            "Failed to CUDA host alloc",
        ),
        switches={
            "backends.cuda.matmul.allow_fp16_accumulation": False,
            "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": True,
            "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": True,
            "backends.cuda.matmul.fp32_precision": "none",
        },
    ),
)


def device_types() -> tuple[str, ...]:
    """What torch calls what trials can train on."""
    return "cpu", *(each.type for each in ACCELERATORS)


def accelerator_of(device_type: str) -> Accelerator:
    """The kind whose devices torch calls so; there is none for "cpu"."""
    return next(each for each in ACCELERATORS if each.type == device_type)


def of_group(backend: str) -> Accelerator | None:
    """What the tensors are on that travel by this backend; None for the CPU."""
    return next((each for each in ACCELERATORS if each.backend == backend), None)


def in_use() -> Accelerator | None:
    """What this process has begun to use, if anything."""
    torch: Any = sys.modules.get("torch")
    there = ((each, getattr(torch, each.type, None)) for each in ACCELERATORS)
    return next((each for each, module in there if module and module.is_initialized()), None)
