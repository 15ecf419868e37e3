"""A journal file is made readable by its user only, unless they chose otherwise."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import optuna

from optuna_fleet.sampler_bridge import compat

_PRIVATE = 0o600


def keep_to_ourselves(study: optuna.Study) -> None:
    """Narrow the study's journal file to 0600 if it has the mode that any new file gets.

    Another mode, an access list, or a folder that gives its files to a group, was somebody's
    choice and is left alone.
    """
    path = compat.journal_file_of(study)
    if path is None:
        return
    with contextlib.suppress(OSError):  # it may be gone for now, of which others tell
        status = os.stat(path)
        mode = stat.S_IMODE(status.st_mode)
        if mode & ~_PRIVATE == 0 or mode != 0o666 & ~_umask():
            return
        is_ours = (status.st_uid, status.st_gid) == (os.geteuid(), os.getegid())
        has_access_list = "system.posix_acl_access" in os.listxattr(path)
        if not is_ours or not stat.S_ISREG(status.st_mode) or has_access_list:
            return
        os.chmod(path, _PRIVATE)
        compat.fleet_logger.info(
            f"The journal file {path} had mode {mode:04o}, as every new file, and has "
            f"{_PRIVATE:04o} now: it is yours alone. To share it, give it another mode by hand, "
            "chmod 660 say, which is left alone."
        )


def _umask() -> int:
    """Where the system tells it; else it can only be had by setting it for a moment."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
