"""What moves cost."""

from __future__ import annotations

from optuna_fleet.events import (
    AnswerEpoch,
    EpochDecision,
    FinishTrial,
    GiveUp,
    MoveRefused,
    Requeue,
)
from optuna_fleet.executor.call.journal import Entry, Stay
from optuna_fleet.wire.messages import Leaving, Trained


class Moves:
    """Measures for how long a trial that moves is on devices without training.

    That is from the order to leave until its last rank has left, and from its launch until its
    first batch there is done: checkpoint, set-up, compilation. How long it had to wait for its new
    devices is no cost of the move. A reader of the journal.
    """

    def __init__(self) -> None:
        self._leaving: dict[int, float] = {}  # by trial, as all of these: since when
        self._spent_s: dict[int, float] = {}
        self._cost_s: dict[int, float] = {}

    def take(self, entry: Entry, stay: Stay | None, now: float) -> None:
        """See `Reader`."""
        if stay is None:
            return
        number = stay.launch.number
        match entry:
            case Leaving() | AnswerEpoch(decision=EpochDecision.YIELD):
                self._leaving.setdefault(number, now)
            case MoveRefused() | FinishTrial() | GiveUp():
                self._leaving.pop(number, None)
            case Requeue():
                if (since := self._leaving.pop(number, None)) is not None:
                    self._spent_s[number] = now - since
            case Trained():
                if (spent_s := self._spent_s.pop(number, None)) is not None:
                    self._cost_s[number] = spent_s + now - stay.start

    def take_cost_s(self, number: int) -> float | None:
        """The seconds that a move has cost, once: if its trial has moved and trains again."""
        return self._cost_s.pop(number, None)
