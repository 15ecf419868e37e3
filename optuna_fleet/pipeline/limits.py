"""How much of this machine the pipeline takes when the user does not say."""

from __future__ import annotations

import resource
from pathlib import Path

MEMORY_SHARE = 0.25
"""Part of the available memory that chunks may occupy by default."""

CHUNK_BYTES = 4 << 20
"""Size of a chunk aimed at: long against a message, short against a preprocessor's patience."""


def default_preprocessors(cpus: int, *, cpu_slots: bool) -> int:
    """Returns how many preprocessors to run on ``cpus`` cores.

    Args:
        cpus: Cores this node may use.
        cpu_slots: True if the trials themselves compute on those cores (no accelerators).
    """
    return max(1, cpus // 4) if cpu_slots else max(1, min(16, cpus // 2))


def default_memory_bytes() -> int:
    """Returns a quarter of the memory that is available, inside the cgroup's limit if any."""
    return int(MEMORY_SHARE * min([_memory_available(), *_cgroup_headroom()]))


def default_chunk_bytes(memory_bytes: int, max_chunks: int) -> int:
    """Returns the chunk size for a budget: smaller if it is tiny, larger if files are scarce."""
    return max(min(CHUNK_BYTES, max(4096, memory_bytes // 64)), memory_bytes // max_chunks)


def guess_sample_bytes(chunk_bytes: int) -> int:
    """Returns a sample's size to assume where none could be measured."""
    return max(1, chunk_bytes // 32)


def raise_file_limit() -> int:
    """Raises the soft limit on open files to the hard one, and returns the chunks it allows.

    Each resident chunk is an open file of the agent; half of the files are left to all else.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    return max(16, files // 2)


def _memory_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 30


def _cgroup_headroom() -> list[int]:
    """What cgroup v2 leaves at each level above this process; Slurm's --mem arrives this way."""
    try:
        line = Path("/proc/self/cgroup").read_text().splitlines()[-1]
        root = Path("/sys/fs/cgroup")
        leaf = root / line.rpartition(":")[2].lstrip("/")
        levels = [leaf, *(parent for parent in leaf.parents if root in parent.parents)]
    except (OSError, IndexError):
        return []
    return [room for level in levels if (room := _headroom(level)) is not None]


def _headroom(cgroup: Path) -> int | None:
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)
