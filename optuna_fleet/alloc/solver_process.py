"""The child process of :class:`optuna_fleet.alloc.isolation.IsolatedAllocator`.

Reads ``(allocator, problem)`` from stdin and writes a plan, or the text of what went wrong, to
stdout, as `multiprocessing.connection` does. Ends with its parent.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection

from optuna_fleet.alloc.isolation import timed
from optuna_fleet.processes import die_with


def main() -> None:
    """Answers requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # the end of stdin is not seen in mid-solve, which may hang
        die_with(os.getppid())
    requests, answers = _private_pipes()
    # Or a pipe breaks: the driver was killed and waits for no answer.
    with contextlib.suppress(EOFError, OSError), requests, answers:
        while True:
            answers.send_bytes(_answer(requests.recv_bytes()))


def _private_pipes() -> tuple[Connection, Connection]:
    """Moves our pipes off descriptors 0 and 1: what a solver prints must not get into answers."""
    requests = Connection(os.dup(0), writable=False)
    answers = Connection(os.dup(1), readable=False)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return requests, answers


def _answer(request: bytes) -> bytes:
    try:
        allocator, problem = pickle.loads(request)
        return pickle.dumps(timed(allocator, problem))
    except Exception as error:
        return pickle.dumps(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
