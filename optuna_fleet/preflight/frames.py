"""Which frames are the user's, and what is in them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FrameType
from typing import Any

from optuna_fleet.trainer.heartbeat import PACKAGE, is_users


def users_frames(frames: Iterable[FrameType]) -> list[FrameType]:
    """Return those of the objective and of the user's functions within it, outermost first.

    Args:
        frames: Innermost first; those of who called the objective may follow.
    """
    found: list[FrameType] = []
    for frame in frames:
        path = frame.f_code.co_filename
        if is_users(path) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            found.append(frame)
        elif found and path.startswith(PACKAGE):
            break
    return found[::-1]


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a function's frame."""
    return dict(frame.f_locals)
