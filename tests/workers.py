"""Workers of pytest-xdist, forked from one nursery: each would import torch by itself."""

from __future__ import annotations

import os
import sys
from typing import Any

from tests import leftovers, nursery

ours: nursery.Nursery | None = None
"""In a worker: where processes for its tests come from; in their master: the workers."""


def fork_them() -> None:
    """In the master: have all workers forked from a nursery that begins now."""
    from execnet import gateway_base, gateway_io

    global ours
    os.environ[leftovers.MARK] = str(os.getpid())
    ours = forks = nursery.Nursery()

    class Gateway(gateway_io.Popen2IOMaster):
        def __init__(self, args: Any, execmodel: Any) -> None:
            self.popen = worker = forks.start_main(nursery.WORKER, answers=True)
            gateway_base.Popen2IO.__init__(self, worker.stdin, worker.stdout, execmodel)

    gateway_io.Popen2IOMaster = Gateway


def end_them() -> None:
    """In the master, which is done with the workers: see that they left nothing behind."""
    if ours is not None:
        ours.close()
        left = leftovers.processes_in_the_end()
        assert not left, left


def main(forks: nursery.Nursery) -> None:
    """In a worker: serve the master."""
    global ours
    ours = forks
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})  # what execnet sends to any worker
