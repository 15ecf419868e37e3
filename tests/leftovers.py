"""What processes started by the tests could leave behind on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import select
from pathlib import Path

MARK = "OPTUNA_FLEET_TESTS"
"""Environment variable that all processes started from here inherit."""

_ENDS_WITHIN_S = 60.0


def children() -> set[str]:
    """Of all threads, those that have ended and were not waited for included."""
    return {
        pid
        for path in Path("/proc/self/task").glob("*/children")
        for pid in path.read_text().split()
    }


def shared_memory() -> set[str]:
    """Names of shared-memory segments, less those that other tests may have made meanwhile.

    Those are of PostgreSQL, semaphores (of Python, joblib), which lose their names
    as they are made, and torch's whose makers live, as they are unlinked once they were received.
    An empty one is of a process that was killed as it made it.
    """
    names = os.listdir("/dev/shm")
    passing = ("sem.", "PostgreSQL.")
    return {name for name in names if not name.startswith(passing) and not _is_anothers(name)}


def _is_anothers(name: str) -> bool:
    maker = re.match(r"torch_(\d+)_", name)
    if maker is None or maker[1] == str(os.getpid()):
        return False
    try:
        return Path("/proc", maker[1]).exists() or not Path("/dev/shm", name).stat().st_size
    except FileNotFoundError:
        return True


def sockets() -> set[str]:
    """Names of the package's Unix sockets that this process has open; others died with theirs."""
    held = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of this very listing
            held.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    lines = (line.split() for line in Path("/proc/net/unix").read_text().splitlines())
    return {
        fields[-1]
        for fields in lines
        if "optuna-fleet" in fields[-1] and f"socket:[{fields[6]}]" in held
    }


def processes() -> list[str]:
    """Command lines of the processes that come from here and still live."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                command = (folder / "cmdline").read_text().replace("\0", " ")
                if _is_ours(folder) and "from multiprocessing" not in command:  # Python's own
                    found.append(f"{folder.name}: {command}")
            except OSError:  # it has just ended
                continue
    return found


def processes_in_the_end() -> list[str]:
    """Those that do not end, of which a few may just be about to: they have been killed."""
    for line in processes():
        with contextlib.suppress(ProcessLookupError):
            ending = os.pidfd_open(int(line.partition(":")[0]))
            select.select([ending], [], [], _ENDS_WITHIN_S)
            os.close(ending)
    return processes()


def _is_ours(folder: Path) -> bool:
    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    if state == "Z":
        return int(parent) == os.getpid()
    marked = f"{MARK}={os.getpid()}\0".encode() in (folder / "environ").read_bytes()
    return marked or int(parent) == os.getpid()
