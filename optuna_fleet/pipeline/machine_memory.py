"""How much memory is left on this machine, and within the control groups of this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """The names of the files of one version of control groups.

    Attributes:
        limit: Most bytes the processes of a group may use.
        used: Those they use, the page cache of files they have read or written included.
        page_cache: Lines of ``memory.stat`` with what the kernel takes back when it is needed.
        kills: Its line ``oom_kill`` counts those that the kernel has killed.
    """

    limit: str
    used: str
    page_cache: tuple[str, ...]
    kills: str


_V1 = _Version(
    limit="memory.limit_in_bytes",
    used="memory.usage_in_bytes",
    page_cache=("total_inactive_file", "total_active_file"),  # of the groups below it too
    kills="memory.oom_control",
)
_V2 = _Version(
    limit="memory.max",
    used="memory.current",
    page_cache=("inactive_file", "active_file"),
    kills="memory.events.local",
)


def available_bytes() -> int:
    """Returns the memory that is available, inside the control groups' limits if any."""
    return min([_of_machine(), *cgroup_headrooms()])


def cgroup_headrooms(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> list[int]:
    """Returns what the groups of this process, from its own upwards, leave to it.

    This is how Slurm's --mem arrives, and the limit of a container. The file ``membership`` says
    which groups the process is in.
    """
    found = (_headroom(group, version) for version, group in _groups(root, membership))
    return [room for room in found if room is not None]


def num_out_of_memory(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Returns how many processes the kernel has killed for want of memory.

    Of this process' control group or, where that does not say, of the whole machine.
    """
    groups = (group / version.kills for version, group in _groups(root, membership))
    counts = map(_num_killed, [*groups, Path("/proc/vmstat")])
    return next((count for count in counts if count is not None), 0)


def _num_killed(counters: Path) -> int | None:
    try:
        lines = counters.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _groups(root: Path, membership: Path) -> Iterator[tuple[_Version, Path]]:
    """The groups that limit this process' memory, upwards, by version: machines may have both."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):
            version, mount = _V1, root / "memory"
        elif number == "0" and not controllers:
            version, mount = _V2, root
        else:
            continue
        # In a container its path may be the host's, the mount never is.
        group = mount / name.lstrip("/")
        for level in (group, *group.parents):
            if level.is_relative_to(mount):
                yield version, level


def _headroom(group: Path, version: _Version) -> int | None:
    try:
        limit = int((group / version.limit).read_text())  # "max" is no number: no limit
        used = int((group / version.used).read_text())
    except (OSError, ValueError):
        return None
    # A group that has read files is always full to its limit: that is no want of memory.
    return max(0, limit - max(0, used - _page_cache(group, version)))


def _page_cache(group: Path, version: _Version) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = dict(line.split(maxsplit=1) for line in lines)
    return sum(int(stat.get(name, 0)) for name in version.page_cache)


def _of_machine() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 30
