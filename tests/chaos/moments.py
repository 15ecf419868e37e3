"""Said by a sweep's processes: which moment was reached. The demon may strike before it answers.

A moment is logical ("trial 3 has reported step 2", "the 4th decision"), so the same seed strikes
at the same moments on any machine. Whoever reaches one waits for the demon's answer: "go", or the
name of a fault that only the process itself can play.
"""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.clusters.forked import FORKED
from tests.clusters.forked import SOCKET as FORKS

SOCKET = "OPTUNA_FLEET_CHAOS"
"""Environment variable: where the demon listens. Without it there is no demon."""

_JUMP_S = 36_000.0


class InjectedError(Exception):
    """An exception of the objective, out of nowhere."""


def reach(site: str, **where: int) -> None:
    """Tell the demon that this process has reached a moment, and do what it answers.

    Raises:
        Exception: What the demon wants to be raised here.
    """
    if path := os.environ.get(SOCKET):
        with socket.socket(socket.AF_UNIX) as demon:
            demon.connect(path)
            demon.sendall(json.dumps({"site": site, "pid": os.getpid(), **where}).encode())
            demon.shutdown(socket.SHUT_WR)
            _ORDERS[demon.recv(100).decode()]()


def watch_checkpoints() -> None:
    """Have this process reach a moment "write" just before a checkpoint gets its name."""
    if getattr(os.replace, "is_watched", False):
        return
    replace = os.replace

    def watched(source: Any, target: Any) -> None:
        match = re.search(r"/trial-(\d+)\.[^/]*-\d+\.pt$", os.fspath(target))
        if match:
            reach("write", trial=int(match[1]))
        replace(source, target)

    watched.is_watched = True  # type: ignore[attr-defined]
    os.replace = watched  # type: ignore[assignment]


def _raise() -> None:
    raise InjectedError("injected")


def _raise_memory_error() -> None:
    raise MemoryError("injected")


def _raise_cuda_memory_error() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory (injected)")


def _run_out_of_memory() -> None:
    """Ask for more memory than this process may have."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (256 << 20), hard))
    torch.empty(1 << 30).fill_(1.0)


def _jump(by_s: float) -> None:
    """Let this process's clock jump, once and for all."""
    was = time.time
    time.time = lambda: was() + by_s


def _run_second_driver() -> None:
    """Run this driver's own command beside it; it has to be refused."""
    python = FORKED if FORKS in os.environ else [sys.executable]
    second = subprocess.run([*python, *sys.argv], capture_output=True, text=True)
    if second.returncode == 0 or f"in use by process {os.getpid()}" not in second.stderr:
        raise AssertionError(f"A second driver was not refused: {second}")


_ORDERS: dict[str, Callable[[], None]] = {
    "go": lambda: None,
    "": lambda: None,  # the demon is gone: so is the test
    "raise": _raise,
    "memory error": _raise_memory_error,
    "cuda memory error": _raise_cuda_memory_error,
    "no memory": _run_out_of_memory,
    "clock forward": lambda: _jump(_JUMP_S),
    "clock back": lambda: _jump(-_JUMP_S),
    "second driver": _run_second_driver,
}
