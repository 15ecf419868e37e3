"""Which frames are the user's, and what is in them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

from optuna_fleet.trainer.heartbeat import NOT_THE_USERS, PACKAGE


def users_frames(frames: Iterable[FrameType]) -> list[FrameType]:
    """Return those of the objective and of the user's functions within it, outermost first.

    Args:
        frames: Innermost first; those of who called the objective may follow.
    """
    found: list[FrameType] = []
    for frame in frames:
        path = frame.f_code.co_filename
        is_users = not path.startswith(NOT_THE_USERS) and "-packages/" not in path  # site-, dist-
        if is_users and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            found.append(frame)
        elif found and path.startswith(PACKAGE):
            break
    return found[::-1]


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a function's frame, which is left as it was."""
    shown = frame.f_locals
    found = dict(shown)
    # Up to Python 3.12 the frame keeps what it has shown, and all that was in it; unless
    # somebody called `locals()`, whose dict this is.
    if type(shown) is dict and sys.getrefcount(shown) <= 3:
        shown.clear()
    return found
