"""Tells what began anew when a trial moved: what its objective had changed, and no state has.

A move begins the objective anew. What its variables held where it was left is compared with what
they hold where its loop goes on. There all that is restored has been, and what the loop itself
sets does not exist yet. Nothing is looked at while the trial trains.
"""

from __future__ import annotations

import contextlib
import inspect
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from optuna_fleet.trainer.frames import is_users, users_frames, variables_of
from optuna_fleet.trainer.marks import Marks, has, is_scalar
from optuna_fleet.trainer.session import Session, Yielded

Place = tuple[str, str, int]
"""A function of the user's: its file, its name, its first line."""
Seen = dict[Place, dict[str, tuple[str, str]]]
"""Place by place, by name: the type of a variable, and a mark that tells its value."""

_IN_MODULES: Place = ("", "", 0)  # of numbers in prepared modules
_PLAIN = ("int", "float", "bool", "str", "NoneType")
_AFTER_EPOCHS = (
    "Local variables of {function} began anew when the trial moved: {names}. If what follows "
    "depends on them, keep them in trial.state, or use trial.best_value and "
    "trial.should_stop(patience=...)."
)
_AFTER_BATCHES = (
    "Local variables of {function} began anew when the trial moved within an epoch: {names}. If "
    "what follows depends on them, keep them in trial.totals or trial.state, or read the batches "
    "without movable=True."
)
_OF_OBJECTS = (
    "Objects of {function} that were not given to trial.prepare() began anew when the trial "
    "moved: {names}. Prepare them together with the model, or keep what they hold in trial.state."
)
_OF_MODULES = (
    "Numbers in prepared modules began anew when the trial moved: {names}. Make them buffers "
    "(`register_buffer`), or keep them in trial.state."
)


@dataclass(frozen=True, slots=True)
class Left:
    """What the objective had changed where a run has left it, and no state has; plain data.

    Attributes:
        seen: Its variables.
        is_within: It was left between two batches of an epoch, not between two epochs.
    """

    seen: Seen
    is_within: bool


class BeganAnew:
    """Looks at the objective where a loop of it begins, or goes on, and where it is left.

    Whatever an objective's objects are like, nothing is raised. Rank 0 looks for all.

    Args:
        session: Of the run.
        objects: What was prepared so far; grows while the objective runs.
        modules: Those of them that are modules, and what trains in stages; grows likewise.
        state: ``trial.state``.
        left: What the run has `left` that this one goes on from, if it is known.
    """

    def __init__(
        self,
        session: Session,
        *,
        objects: Sequence[Any],
        modules: Sequence[torch.nn.Module],
        state: Mapping[str, Any],
        left: Left | None = None,
    ) -> None:
        self._session = session
        self._objects = objects
        self._modules = modules
        self._state = state
        self._left = left
        self._begun: Seen = {}
        self._has_looked_within = False

    def begin_loop(self) -> None:
        """A loop is about to hand out its first epoch of this run; all is restored."""
        self._begun, self._has_looked_within = {}, False
        self._look(is_within=False)

    def begin_batch(self) -> None:
        """A pass that may be left in its midst is about to hand out a batch."""
        if not self._has_looked_within:  # once in a loop
            self._has_looked_within = True
            self._look(is_within=True)

    def left(self, error: BaseException, *, is_within: bool) -> Left | None:
        """Return what is to be compared where the trial goes on; None if there is nothing.

        Not what is as it was when the loop began, such as readings of clocks, or what depends on
        the number of devices; but for modules, which may be copies of what was prepared. Nor the
        value that was reported last.

        Args:
            error: What has left the objective; its traceback leads there.
            is_within: See `Left`.
        """
        with contextlib.suppress(Exception, Yielded):
            seen = {} if self._session.run.rank else self._seen(_left_by(error))
            marks = self._marks()
            kept = set(marks.inside(self._state))
            reported = self._session.reports.values
            if reported:  # what was reported last is made anew in each epoch
                kept.add(marks.of(next(reversed(reported.values()))))
            left = {
                place: {
                    name: (kind, mark)
                    for name, (kind, mark) in variables.items()
                    if (kind, mark) != self._begun.get(place, {}).get(name)
                    or mark.startswith("module")
                    if not kept & {_state_in(mark), (name.rpartition(".")[2], mark)}
                }
                for place, variables in seen.items()
            }
            if any(left.values()):
                return Left(left, is_within)
        return None

    def _look(self, *, is_within: bool) -> None:
        with contextlib.suppress(Exception):
            stack = traceback.walk_stack(inspect.currentframe())
            now = {} if self._session.run.rank else self._seen(frame for frame, _ in stack)
            self._begun |= now
            if self._left is not None and self._left.is_within == is_within:
                for keys, text in told(self._left, now):
                    self._session.remark(keys, text)
                self._left = None

    def _seen(self, frames: Iterable[FrameType]) -> Seen:
        """Look at what the user's functions hold, from the innermost of the `frames` outwards."""
        marks, met = self._marks(), set[int]()
        seen: Seen = {_IN_MODULES: dict(_numbers_in(self._modules))}
        for frame in users_frames(frames):
            code = frame.f_code
            found = seen[Path(code.co_filename).name, code.co_name, code.co_firstlineno] = {}
            for name, value in _with_attributes(variables_of(frame)):
                kind = type(value)
                if id(value) not in met and (mark := marks.of(value)):
                    found[name] = kind.__name__, mark
                if not is_scalar(kind):
                    met.add(id(value))
        return seen

    def _marks(self) -> Marks:
        """Not of what was prepared, which is restored."""
        kept = [getattr(thing, "kept", None) for thing in self._objects]  # by integrations
        lists = [callbacks for callbacks in kept if type(callbacks) is list]
        known = {id(thing) for thing in chain(self._objects, self._modules, *lists)}
        return Marks(known, age_s=time.perf_counter() - self._session.began + 1.0)


def began_anew(left: Left, now: Seen) -> Seen:
    """Return what was left of the variables that exist `now`, and are not what they had been."""
    return {
        place: {
            name: (kind, mark)
            for name, (kind, mark) in variables.items()
            if mark != now.get(place, {}).get(name, (kind, mark))[1]
        }
        for place, variables in left.seen.items()
    }


def told(left: Left, now: Seen) -> Iterator[tuple[list[str], str]]:
    """Yield what the user is to be told of, with a sentence on it."""
    for place, variables in began_anew(left, now).items():
        file, function, line = place
        where = f"`{function}` ({file}:{line})"
        texts: dict[str, dict[str, str]] = {}
        for name, (kind, mark) in variables.items():
            shown = f"`{name.rpartition('/')[2]}`" + ("" if kind in _PLAIN else f" ({kind})")
            texts.setdefault(_text_for(place, mark, left), {})[f"{name} of {where}"] = shown
        for text, names in texts.items():
            yield [*names], text.format(function=where, names=", ".join(names.values()))


def _text_for(place: Place, mark: str, left: Left) -> str:
    if place == _IN_MODULES:
        return _OF_MODULES
    if mark.startswith(("module", "object")):
        return _OF_OBJECTS
    return _AFTER_BATCHES if left.is_within else _AFTER_EPOCHS


def _state_in(mark: str) -> str:
    return mark.removeprefix("module ").removeprefix("object ")


def _left_by(error: BaseException | None) -> Iterator[FrameType]:
    """Yield the frames that an exception has left, innermost first; it may be raised again."""
    while error is not None:
        yield from [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
        error = error.__context__


def _with_attributes(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield variables, and what instances of the user's own classes have; none is computed."""
    for name, value in variables.items():
        yield name, value
        kind = type(value)
        if is_users(kind) and not (has(kind, "state_dict") or has(kind, "reset")):
            with contextlib.suppress(AttributeError):
                own = object.__getattribute__(value, "__dict__")
                yield from ((f"{name}.{attribute}", part) for attribute, part in own.items())


def _numbers_in(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield those that the user's classes have in attributes, unless they save or reset these."""
    for position, module in enumerate(modules):
        for path, part in module.named_modules():
            kind = type(part)
            saves = kind.get_extra_state is not torch.nn.Module.get_extra_state
            if is_users(kind) and not saves and not has(kind, "reset"):
                for name, value in vars(part).items():
                    if type(value) in (int, float) and not name.startswith("_"):
                        yield f"{position}/{path}/{name}", (kind.__name__, f"{value}")
