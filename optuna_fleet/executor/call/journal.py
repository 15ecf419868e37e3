"""What happened in one call, in order: the one record, of which all that is told of it is made."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Protocol, TypeAlias

from optuna_fleet.events import Event, FinishTrial, GiveUp, Instruction, Launch, Requeue
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.wire.messages import Ended, Leaving, Trained

Entry: TypeAlias = Event | Instruction | Ended | Leaving | Trained
"""What the controller hears and wants, and what runs say that is of no concern to it."""

_STORY = 40
_PLAIN = (bool, int, float, str, tuple, Enum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """A run that has not ended: its launch, and when that was, in seconds since the epoch."""

    launch: Launch
    start: float


class Reader(Protocol):
    """Makes something of what happens."""

    def take(self, entry: Entry, stay: Stay | None, now: float) -> None:
        """Take the next entry; `stay` is the run that it is about, `now` as `Journal.now`."""


class Journal:
    """Notes what happens, and tells each reader of it.

    Args:
        readers: They are told in this order.
    """

    def __init__(self, *readers: Reader) -> None:
        self._readers = readers
        self._zero = time.time() - time.monotonic()
        self._stays: dict[int, Stay] = {}
        self._last: deque[tuple[float, Entry]] = deque(maxlen=_STORY)

    def now(self) -> float:
        """Seconds since the epoch, by a clock that nobody sets meanwhile."""
        return self._zero + time.monotonic()

    def note(self, entry: Entry) -> None:
        """This happens now."""
        now = self.now()
        self._last.append((now, entry))
        if fleet_logger.isEnabledFor(logging.DEBUG):
            fleet_logger.debug(_in_words(entry))
        if isinstance(entry, Launch):
            self._stays[entry.run_id] = Stay(launch=entry, start=now)
        stay = self._stays.get(getattr(entry, "run_id", -1))
        for reader in self._readers:
            reader.take(entry, stay, now)
        if isinstance(entry, FinishTrial | Requeue | GiveUp):
            self._stays.pop(entry.run_id, None)

    def attach_to(self, error: BaseException) -> None:
        """What happened last is shown below this error, a line each."""
        end = self.now()
        story = [f"{at - end:9.3f} s  {_in_words(entry)}" for at, entry in self._last]
        note = "\n".join(["What happened last in the fleet:", *story])
        vars(error).setdefault("__notes__", []).append(note)  # as `add_note` of Python 3.11


def _in_words(entry: Entry) -> str:
    """As "RankEnded(run_id=3, device=1, ending=RETURNED)": what is long is left out."""
    said = ", ".join(f"{name}={value}" for name, value in _short(entry))
    return f"{type(entry).__name__}({said})"


def _short(entry: Any) -> Iterator[tuple[str, object]]:
    for field in fields(entry):
        value = getattr(entry, field.name)
        if isinstance(value, Enum):
            yield field.name, value.name
        elif isinstance(value, _PLAIN):
            yield field.name, value
