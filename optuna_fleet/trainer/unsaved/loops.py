"""What a loop's variables carry from one pass to the next, read off the bytecode it runs.

Not off its source, which notebooks, `exec` and objectives that were sent here need not have.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
import sysconfig
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).parents[1])
NOT_THE_USERS = (PACKAGE, *map(sysconfig.get_path, ("stdlib", "purelib")))
_ACCESS = re.compile("(LOAD|STORE|DELETE)_(FAST|DEREF)")
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])
_ENDS_A_STATEMENT = re.compile("STORE|DELETE|POP|RETURN|RAISE|JUMP|RESUME|FOR_ITER")
_NO_STEPS = ("EXTENDED_ARG", "CACHE")
_CACHE = dis.opmap.get("CACHE", 0)
_GO_NOWHERE_ELSE = re.compile("RETURN|RAISE|RERAISE|JUMP_(FORWARD|BACKWARD|ABSOLUTE)")


def users_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the user's functions from `frame` outwards, up to who called those."""
    has_users = False
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(NOT_THE_USERS) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            has_users = True
            yield frame
        elif has_users and path.startswith(PACKAGE):
            return
        frame = frame.f_back


def looping_frame(frame: FrameType | None) -> FrameType | None:
    """Return the user's frame whose `for` loop has asked for an item, if `frame` was asked.

    Directly, or by way of generators that ask on their part, such as a progress bar's.
    """
    outermost = None
    while frame is not None and _header_of(frame) is not None:
        outermost, frame = frame, frame.f_back
    return outermost if next(users_frames(outermost), None) is outermost else None


def _header_of(frame: FrameType) -> int | None:
    """Where the `FOR_ITER` is that a frame is at, if it is at one."""
    code, offset = frame.f_code.co_code, frame.f_lasti
    while offset > 0 and code[offset] == _CACHE:  # 3.12 is at what follows
        offset -= 2
    while offset >= 0 and code[offset] == dis.EXTENDED_ARG:  # 3.10 at what precedes it
        offset += 2
    return offset if offset >= 0 and code[offset] == dis.opmap["FOR_ITER"] else None


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a function's frame, which is left as it was."""
    shown = frame.f_locals
    found = dict(shown)
    # Up to Python 3.12 the frame keeps what it has shown, and all that was in it; unless
    # somebody called `locals()`, whose dict this is.
    if type(shown) is dict and sys.getrefcount(shown) <= 3:
        shown.clear()
    return found


class Loop:
    """The `for` loop that a `looping_frame` is at."""

    def __init__(self, frame: FrameType) -> None:
        code, header = frame.f_code, _header_of(frame)
        assert header is not None
        self._steps = [i for i in dis.get_instructions(code) if i.opname not in _NO_STEPS]
        self._offsets = [step.offset for step in self._steps]
        self._cells = {*code.co_cellvars, *code.co_freevars}
        self._header = bisect_left(self._offsets, header)
        self._body = range(self._header + 1, self._end(self._header))

    def carries(self, name: str) -> bool:
        """Whether a pass, or what follows the loop, may read what an earlier pass left in `name`.

        Where each loop has a pass at least, nothing is raised, and no `break` leaves this loop.
        """
        todo, seen = [self._body.start], set[int]()
        while todo:
            index = todo.pop()
            if index in seen:
                continue
            seen.add(index)
            kind = next((kind for kind, found in self._accesses(index) if found == name), None)
            if kind == "LOAD":
                return True
            if kind is None:
                todo += self._next(index)
        return False

    @property
    def enumerates(self) -> bool:
        """Whether it counts what it is given: ``for step, batch in enumerate(...)``."""
        for step in reversed(self._steps[: self._header]):
            if _ENDS_A_STATEMENT.match(step.opname):
                return False
            if step.argval == "enumerate":
                return True
        return False

    def _accesses(self, index: int) -> list[tuple[str, str]]:
        step = self._steps[index]
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        found = list(zip(_ACCESS.findall(step.opname), names, strict=False))
        # What makes a closure of a variable does not read it, nor what sets it aside for a
        # comprehension.
        is_aside = step.opname == "LOAD_FAST_AND_CLEAR"
        return [
            (kind, name)
            for (kind, place), name in found
            if not is_aside and (place == "DEREF" or name not in self._cells)
        ]

    def _next(self, index: int) -> list[int]:
        name = self._steps[index].opname
        if name == "FOR_ITER":  # come to from above
            return [index + 1]
        found = [] if _GO_NOWHERE_ELSE.match(name) else [index + 1]
        if (target := self._target(index)) is None:
            pass
        elif self._steps[target].opname == "FOR_ITER":  # after a pass
            found += [target + 1, self._end(target)]
            if target == self._header:
                return found
        elif not found or self._target(target - 1) != index + 1:  # no first test of a `while`
            found.append(target)
        return [step for step in found if step in self._body] if index in self._body else found

    def _end(self, header: int) -> int:
        end = self._target(header)
        assert end is not None
        return end

    def _target(self, index: int) -> int | None:
        step = self._steps[index]
        if step.opcode not in _JUMPS or step.opname.startswith("SETUP_"):
            return None
        return bisect_left(self._offsets, step.argval)
