"""Whether an objective can come to another loop over epochs after the one that has ended."""

from __future__ import annotations

import dis
import inspect
import traceback
from collections.abc import Iterator
from types import FrameType

from optuna_fleet.preflight.frames import users_frames

_LOOPS = frozenset({"epochs", "steps"})


def is_last_loop() -> bool:
    """Whether none can follow, by the names in what is left to do; called at a loop's end.

    Then the objective is left, as what follows would be done for nothing: a model saved, say.
    """
    frames = users_frames(frame for frame, _ in traceback.walk_stack(inspect.currentframe()))
    inner = _LOOPS
    for frame in reversed(frames):
        if not inner.isdisjoint(_names_to_come(frame)):
            return False
        inner = _LOOPS | {frame.f_code.co_name}
    return True


def _names_to_come(frame: FrameType) -> Iterator[str]:
    """Yield the names that may still be looked up: also those before, in a loop around here."""
    here = frame.f_lasti
    instructions = list(dis.get_instructions(frame.f_code))
    back = [
        one.argval
        for one in instructions
        if one.offset > here and one.opcode in dis.hasjrel and "BACKWARD" in one.opname
        if isinstance(one.argval, int) and one.argval < here
    ]
    begin = min(back, default=here + 1)
    for one in instructions:
        if one.offset >= begin and one.offset != here and isinstance(one.argval, str):
            yield one.argval
