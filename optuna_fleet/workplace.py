"""Where a script is at work: its folder, where it imports from, the variables that it has changed.

Read in the driver as each call of `optimize` begins, and taken on by the processes of the fleet.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from optuna_fleet.accelerator import ACCELERATORS
from optuna_fleet.exceptions import FleetError

# What each node, or process, of the fleet has of its own, whatever the script has set.
_OF_EACH = {
    *(name for each in ACCELERATORS for name in (each.visible, each.interface, *each.always)),
    *("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "OPTUNA_FLEET_JOIN", "OPTUNA_FLEET_TOKEN"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """What relative paths, imports and `os.environ` mean to a script.

    Attributes:
        folder: Its working directory; None if that was removed.
        sys_path: Where its imports are found.
        argv: Its arguments.
        variables: Those of the environment that it has ever changed, as they are now; None for
            those that it has removed.
        key: By which its `multiprocessing.Manager` knows who may ask it.
    """

    folder: str | None
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    variables: Mapping[str, str | None]
    key: bytes = field(repr=False)

    def take_on(self, *, but: Collection[str] = ()) -> None:
        """Have them mean the same to this process.

        Args:
            but: Variables that stay as they are.

        Raises:
            FleetError: There is no such folder here.
        """
        for name in self.variables.keys() - set(but):
            if (value := self.variables[name]) is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        time.tzset()
        sys.path[:], sys.argv[:] = self.sys_path, self.argv
        multiprocessing.current_process().authkey = self.key
        importlib.invalidate_caches()  # its folders may have new modules
        try:
            if self.folder is not None:
                os.chdir(self.folder)
        except OSError as error:
            raise FleetError(
                f"{socket.gethostname()} has no folder {self.folder}, where the script is at work "
                f"({error.strerror}). Give all nodes the same paths."
            ) from error


def workplace_here() -> Workplace:
    """That of this process, the driver."""
    names = {*os.environ, *_AT_FIRST}
    _changed.update(n for n in names if os.environ.get(n) != _AT_FIRST.get(n))
    try:
        folder = os.getcwd()
    except OSError:
        folder = None
    return Workplace(
        folder=folder,
        sys_path=tuple(sys.path),
        argv=tuple(sys.argv),
        key=bytes(multiprocessing.current_process().authkey),
        variables={name: os.environ.get(name) for name in _changed - _OF_EACH},
    )


def _at_first() -> dict[str, str]:
    """The environment that this process was started with.

    It can't be read where somebody has written his title over it.
    """
    entries: list[str] = []
    with contextlib.suppress(OSError):
        entries = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    found = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    return found if found.keys() & os.environ.keys() else dict(os.environ)


_AT_FIRST = _at_first()
_changed: set[str] = set()
