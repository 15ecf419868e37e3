"""The life of the trainer processes, by what is heard of them. Pure.

A trainer and its agent say what they say on channels of their own. What a trainer has said comes
before the news of its death, but it may have said it before it is known to be started; and where
it connects as it dies, after that news.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from optuna_fleet.events import DeviceJoined, DeviceLost, Event
from optuna_fleet.exceptions import LaunchError
from optuna_fleet.resources import Device
from optuna_fleet.wire.node_messages import ProcessId

MAX_FAILED_STARTS = 3
_KILL_LIMIT_S = 10.0


class TrainerStatus(Enum):
    """Where a trainer process is in its life; of those that have joined the controller knows."""

    STARTING = "was started"
    OVERDUE = "is killed because it was not ready in time"
    SUCCESSOR = "is ready, and the one before it is not known to have left"
    SERVING = "has joined: it gets the runs of its device"
    KILLED = "has joined, and is killed"
    RETIRED = "has said that it ends"
    UNHEARD = "has ended, and what it had said may still come"
    GONE = "has ended"


_S = TrainerStatus
TRANSITIONS = {
    _S.STARTING: {_S.OVERDUE, _S.SUCCESSOR, _S.SERVING, _S.RETIRED, _S.UNHEARD},
    _S.OVERDUE: {_S.RETIRED, _S.UNHEARD},
    _S.SUCCESSOR: {_S.SERVING, _S.RETIRED, _S.GONE},
    _S.SERVING: {_S.KILLED, _S.RETIRED, _S.GONE},
    _S.KILLED: {_S.RETIRED, _S.GONE},
    _S.RETIRED: {_S.GONE},
    _S.UNHEARD: {_S.GONE},
    _S.GONE: set(),
}
_JOINED = (_S.SERVING, _S.KILLED)


@dataclass(slots=True, kw_only=True)
class _Trainer:
    process: ProcessId
    device: int
    status: TrainerStatus = _S.STARTING

    def become(self, status: TrainerStatus) -> None:
        assert status in TRANSITIONS[self.status], f"{self.status} can't become {status}"
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class KillLate:
    """A trainer that is killed should be gone by now."""

    process: ProcessId


class Timers(Protocol):
    """What an `Inbox` does with time."""

    def later(self, seconds: float, event: Any) -> None:
        """See `Inbox`."""
        ...


class Trainers:
    """Those of all devices. Each device has at most one that has joined.

    Attributes:
        have_served: Devices on which one has joined since their node has.
    """

    def __init__(self, devices: Mapping[int, Device], inbox: Timers) -> None:
        self._devices = devices
        self._inbox = inbox
        self._on: dict[int, dict[ProcessId, _Trainer]] = {}
        self._failed_starts: dict[int, int] = {}
        self._dying: set[ProcessId] = set()
        self.have_served: set[int] = set()

    # -- what is so -------------------------------------------------------------------------------

    def _all(self) -> Iterator[_Trainer]:
        return (trainer for on_device in self._on.values() for trainer in on_device.values())

    def _get(self, device: int, process: ProcessId) -> _Trainer:
        """What is known of it; a process that nobody has named before was started."""
        new = _Trainer(process=process, device=device)
        return self._on.setdefault(device, {}).setdefault(process, new)

    def _joined(self, device: int) -> _Trainer | None:
        on_device = self._on.get(device, {}).values()
        return next((trainer for trainer in on_device if trainer.status in _JOINED), None)

    def process_on(self, device: int) -> ProcessId | None:
        """The one that has joined."""
        trainer = self._joined(device)
        return None if trainer is None else trainer.process

    def device_of(self, process: ProcessId) -> int:
        """The device of one that was started."""
        return next(trainer.device for trainer in self._all() if trainer.process == process)

    @property
    def live(self) -> dict[int, ProcessId]:
        """All that have joined, by device."""
        return {t.device: t.process for t in self._all() if t.status in _JOINED}

    def is_killed(self, device: int) -> bool:
        """Whether the one that has joined is killed by us: its death is no news."""
        trainer = self._joined(device)
        return trainer is not None and trainer.status is _S.KILLED

    def serves(self, device: int) -> bool:
        """Whether one has joined that is not killed."""
        return self._joined(device) is not None and not self.is_killed(device)

    def lingers(self, process: ProcessId) -> bool:
        """Whether one that is killed is not known to be gone."""
        return process in self._dying

    # -- what happens -----------------------------------------------------------------------------

    def started(self, device: int, process: ProcessId) -> bool:
        """Its agent has started one; say whether it is still to be waited for."""
        known = self._on.get(device, {}).get(process)
        if known is not None and known.status is _S.UNHEARD:
            self._end(known)  # the number is another process' now
        return self._get(device, process).status is _S.STARTING

    def ready(self, device: int, process: ProcessId) -> list[Event]:
        """One is ready; it joins when the one before it has left."""
        trainer = self._get(device, process)
        if trainer.status is _S.UNHEARD:
            self._end(trainer)
        elif trainer.status is _S.STARTING:
            self._failed_starts[device] = 0
            trainer.become(_S.SUCCESSOR)
        return self._succeed(device)

    def _succeed(self, device: int) -> list[Event]:
        ready = (t for t in self._on[device].values() if t.status is _S.SUCCESSOR)
        if self._joined(device) is not None or (successor := next(ready, None)) is None:
            return []
        successor.become(_S.SERVING)
        self.have_served.add(device)
        return [DeviceJoined(device=self._devices[device])]

    def kill(self, device: int, process: ProcessId) -> None:
        """One is killed, because it is not ready in time, or while it serves: `KillLate` comes."""
        trainer = self._get(device, process)
        if trainer.status in (_S.STARTING, _S.SERVING):
            trainer.become(_S.OVERDUE if trainer.status is _S.STARTING else _S.KILLED)
        self._dying.add(process)
        self._inbox.later(_KILL_LIMIT_S, KillLate(process=process))

    def retire(self, device: int, process: ProcessId) -> list[Event]:
        """One has said that it ends, which the controller knows; its successor may be there."""
        trainer = self._get(device, process)
        if trainer.status is _S.UNHEARD:
            self._end(trainer)
        elif trainer.status is not _S.RETIRED:
            trainer.become(_S.RETIRED)
        return self._succeed(device)

    def leave_out(self, device: int) -> None:
        """None joins a device any more."""
        for trainer in self._on.get(device, {}).values():
            if trainer.status is _S.SUCCESSOR:
                trainer.become(_S.RETIRED)

    def ended(self, device: int, process: ProcessId, cause: str) -> list[Event]:
        """One has ended.

        Raises:
            LaunchError: As others of its device did, before they were of use.
        """
        trainer = self._get(device, process)
        had_joined, is_killed = trainer.status in _JOINED, trainer.status is _S.KILLED
        if trainer.status in (_S.STARTING, _S.OVERDUE):
            trainer.become(_S.UNHEARD)
            self._dying.discard(process)
            self._count_failed_start(device, cause)
            return []
        was_ready = trainer.status is not _S.SUCCESSOR
        if trainer.status is not _S.UNHEARD:
            self._end(trainer)
        if not was_ready:
            self._count_failed_start(device, cause)
        lost: list[Event] = [DeviceLost(device=device, by_order=is_killed)] * had_joined
        return lost + self._succeed(device)

    def _end(self, trainer: _Trainer) -> None:
        trainer.become(_S.GONE)
        self._dying.discard(trainer.process)
        del self._on[trainer.device][trainer.process]

    def _count_failed_start(self, device: int, cause: str) -> None:
        number = self._failed_starts[device] = self._failed_starts.get(device, 0) + 1
        if number >= MAX_FAILED_STARTS:
            raise LaunchError(
                f"The trainer of device {device} ended {number} times in a row before it was "
                f"ready, the last time with {cause}; what it printed says why."
            )

    def node_lost(self, agent: str) -> dict[int, ProcessId]:
        """All of this agent are dead; return those whose ends are still to be told."""
        for trainer in [t for t in self._all() if t.process.agent == agent]:
            self._dying.discard(trainer.process)
            if trainer.status not in _JOINED:
                del self._on[trainer.device][trainer.process]
        return {device: process for device, process in self.live.items() if process.agent == agent}
