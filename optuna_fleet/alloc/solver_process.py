"""The child process of :class:`optuna_fleet.alloc.isolation.IsolatedAllocator`.

Reads ``(allocator, problem)`` from stdin and writes a plan, or the text of what went wrong, to
stdout; each as a pickle after its length (8 bytes, big endian). Ends with its parent.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from typing import BinaryIO

from optuna_fleet.alloc.isolation import HEADER
from optuna_fleet.alloc.timing import timed
from optuna_fleet.processes import die_with


def main() -> None:
    """Answers requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # the end of stdin is not seen in mid-solve, which may hang
        die_with(os.getppid())
    requests, answers = _private_pipes()
    # A broken pipe: the driver was killed and waits for no answer.
    with contextlib.suppress(BrokenPipeError), requests, answers:
        while (request := _read(requests)) is not None:
            body = _answer(request)
            answers.write(HEADER.pack(len(body)) + body)
            answers.flush()


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Moves our pipes off descriptors 0 and 1: what a solver prints must not get into answers."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return requests, answers


def _read(requests: BinaryIO) -> bytes | None:
    header = requests.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    body = requests.read(size)
    return body if len(body) == size else None


def _answer(request: bytes) -> bytes:
    try:
        allocator, problem = pickle.loads(request)
        return pickle.dumps(timed(allocator, problem))
    except Exception as error:
        return pickle.dumps(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
