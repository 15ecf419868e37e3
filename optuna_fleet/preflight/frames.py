"""Which frames are the user's, what is in them, and what they have still to do."""

from __future__ import annotations

import dis
import inspect
import traceback
from types import FrameType

from optuna_fleet.trainer.heartbeat import PACKAGE, is_users

_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


def users_frames() -> list[FrameType]:
    """Return the objective's, and those of the functions of the user's in it, outermost first."""
    found: list[FrameType] = []
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        path = frame.f_code.co_filename
        if is_users(path) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            found.append(frame)
        elif found and path.startswith(PACKAGE):
            break
    return found[::-1]


def is_last_loop() -> bool:
    """Whether none can follow, by the names in what is left to do; called at a loop's end.

    Then the objective is left, as what follows would be done for nothing: a model saved, say.
    """
    sought = {"epochs", "steps"}
    for frame in reversed(users_frames()):
        here, code = frame.f_lasti, list(dis.get_instructions(frame.f_code))
        jumps = [one.argval for one in code if one.offset > here and one.opcode in _JUMPS]
        begin = min([here + 1, *jumps])  # of an outer loop, whose end jumps there
        if any(one.argval in sought for one in code if here != one.offset >= begin):
            return False
        sought.add(frame.f_code.co_name)
    return True
