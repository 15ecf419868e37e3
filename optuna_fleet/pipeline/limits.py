"""How much of this machine the pipeline takes when the user does not say, and what it has left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from optuna_fleet.exceptions import FleetConfigError

LEAST_MEMORY_BYTES = 64 << 20
"""The default is no smaller: one of nothing would only fail later, with another message."""

NICENESS = 15
"""Added to the niceness of preprocessors where trials compute on the CPU.

Trainers then keep nearly all of their speed (docs/data.md has a measurement). When they
wait for data, preprocessors have their cores.
"""

STUCK_S = 600.0
"""A preprocessor that works on one sample for longer is replaced, where there is no executor.

Those of an executor have half of its ``hang_s``.
"""

CHUNK_BYTES = 20 << 20
"""Size of a chunk aimed at: 32 images of 3 x 224 x 224 in float32.

So that usual batches lie within one: putting a batch together from several costs three times as
much as reading it. Larger ones would only keep the first reader waiting.
"""

DECODED_PART = 3
"""One in so many bytes is for the decoded store: what it keeps is larger than a pool's samples,
and saves less."""


def budget(memory_bytes: int | None, spill_dir: str | None) -> int:
    """Returns how many bytes of preprocessed data this machine may have, of what was asked for."""
    if spill_dir is None:
        free, part, where = available_bytes(), 4, "of memory are available here"
    else:
        free, part, where = _disk_free(spill_dir), 2, f"are free in spill_dir={spill_dir!r}"
    wanted = memory_bytes or max(LEAST_MEMORY_BYTES, free // part)
    if wanted > free and (memory_bytes or spill_dir):
        raise FleetConfigError(
            f"A SharedPipeline is to have memory_bytes={wanted}, but only {free} bytes {where}. "
            f"Make room, or give a smaller number. Left out, it is one part in {part} of that."
        )
    return wanted


def _disk_free(folder: str) -> int:
    """Bytes free in a folder where files can be made."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600))
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise FleetConfigError(
            f"SharedPipeline was given spill_dir={folder!r}, where no file can be made "
            f"({error.strerror}). Give an existing folder on a local disk that can be written to."
        ) from error


def default_preprocessors(cpus: int, *, cpu_slots: bool) -> int:
    """Returns for how many preprocessors to set cores aside, of ``cpus`` that a node may use.

    With ``cpu_slots`` the trials themselves compute on those cores (no accelerators).
    """
    return max(1, cpus // 4) if cpu_slots else max(1, min(16, cpus // 2))


def most_preprocessors(cpus: int, *, num_slots: int, cpu_slots: bool) -> int:
    """Returns up to how many preprocessors to run where they are as many as are needed.

    Beside accelerators all ``cpus`` but one per trainer, which has kernels to launch. Where trials
    compute on the CPU half of the cores, which are theirs first: see `NICENESS`.
    """
    return max(1, cpus // 2 if cpu_slots else cpus - num_slots)


def default_chunk_bytes(memory_bytes: int | None) -> int:
    """Returns the chunk size for a budget that was given: smaller if that is tiny.

    It does not follow from the machine's memory: nodes that share chunks must cut alike.
    """
    return CHUNK_BYTES if memory_bytes is None else min(CHUNK_BYTES, max(4096, memory_bytes // 16))


def guess_sample_bytes(chunk_bytes: int) -> int:
    """Returns a sample's size to assume where none could be measured."""
    return max(1, chunk_bytes // 32)


# -- memory ---------------------------------------------------------------------------------------

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class _Group(NamedTuple):
    """The names of a control group's files, which differ between versions; lines of one of them.

    Its page cache counts as used, but the kernel takes that back when it is needed.
    """

    folder: Path
    limit: str
    used: str
    page_cache: tuple[str, ...]
    kills: str


_V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),  # of the groups below it too
    "memory.oom_control",
)
_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"), "memory.events.local")


def available_bytes() -> int:
    """Returns the memory that is available, inside the control groups' limits if any."""
    of_machine = _numbers(Path("/proc/meminfo")).get("MemAvailable:", 1 << 20) * 1024
    return min([of_machine, *cgroup_headrooms()])


def cgroup_headrooms(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> list[int]:
    """Returns what the groups of this process, from its own upwards, leave to it.

    This is how Slurm's --mem arrives, and the limit of a container. The file ``membership`` says
    which groups the process is in.
    """
    found = map(_headroom, _groups(root, membership))
    return [room for room in found if room is not None]


def num_out_of_memory(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Returns how many processes the kernel has killed for want of memory.

    Of this process' control group or, where that does not say, of the whole machine.
    """
    own = [group.folder / group.kills for group in _groups(root, membership)]
    counts = (_numbers(path).get("oom_kill") for path in [*own, Path("/proc/vmstat")])
    return next((count for count in counts if count is not None), 0)


def _groups(root: Path, membership: Path) -> Iterator[_Group]:
    """The groups that limit this process' memory, upwards, by version: machines may have both."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            names, mount = _V1, root / "memory"
        elif number == "0" and not controllers:
            names, mount = _V2, root
        else:
            continue
        # In a container its path may be the host's, the mount never is.
        group = mount / name.lstrip("/")
        for level in (group, *group.parents):
            if level.is_relative_to(mount):
                yield _Group(level, *names)


def _headroom(group: _Group) -> int | None:
    try:
        limit = int((group.folder / group.limit).read_text())  # "max" is no number: no limit
        used = int((group.folder / group.used).read_text())
    except (OSError, ValueError):
        return None
    stat = _numbers(group.folder / "memory.stat")
    # A group that has read files is always full to its limit: that is no want of memory.
    cached = sum(stat.get(name, 0) for name in group.page_cache)
    return max(0, limit - max(0, used - cached))


def _numbers(path: Path) -> dict[str, int]:
    """A file of names and numbers, of which there may be none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {words[0]: int(words[1]) for line in lines if (words := line.split())[1:]}
