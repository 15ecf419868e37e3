"""Finds the step at which all ranks of a run can leave their devices within an epoch. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from optuna_fleet.wire.messages import Place


class StopLine:
    """Of one run: the furthest place that a rank has told, once all have.

    A rank waits where it has told that it is. One that leaves the objective is no longer waited
    for, and the others go on to see for themselves.
    """

    def __init__(self) -> None:
        self._awaited: set[int] = set()
        self._furthest: Place = (0, 0, 0)

    def ask(self, ranks: Iterable[int]) -> None:
        """These ranks are asked where they are."""
        self._awaited = set(ranks)
        self._furthest = (0, 0, 0)

    def take(self, rank: int, place: Place = (0, 0, 0)) -> Place | None:
        """A rank is at this place, or has left; return where to stop if it was the last."""
        if rank not in self._awaited:
            return None
        self._awaited.discard(rank)
        self._furthest = max(self._furthest, place)
        return None if self._awaited else self._furthest
