"""Whether an objective can come to another loop over epochs after the one that has ended."""

from __future__ import annotations

import dis
import inspect
import traceback

from optuna_fleet.preflight.frames import users_frames

_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


def is_last_loop() -> bool:
    """Whether none can follow, by the names in what is left to do; called at a loop's end.

    Then the objective is left, as what follows would be done for nothing: a model saved, say.
    """
    sought = {"epochs", "steps"}
    frames = users_frames(frame for frame, _ in traceback.walk_stack(inspect.currentframe()))
    for frame in reversed(frames):
        here, code = frame.f_lasti, list(dis.get_instructions(frame.f_code))
        jumps = [one.argval for one in code if one.offset > here and one.opcode in _JUMPS]
        begin = min([here + 1, *jumps])  # of an outer loop, whose end jumps there
        if any(one.argval in sought for one in code if here != one.offset >= begin):
            return False
        sought.add(frame.f_code.co_name)
    return True
