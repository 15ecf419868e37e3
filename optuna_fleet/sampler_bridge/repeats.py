"""What trials that are run again had reported before, and what the pruner had said of that.

The study then knows reports that the trial has yet to come to again. Nothing may be decided by
these, or it would end where it had gone on.
"""

from __future__ import annotations

from collections.abc import Iterable


class Repeats:
    """Of one call's trials, by number; `last_step` is the last that led to where a trial is."""

    def __init__(self) -> None:
        self._reported: dict[int, frozenset[int]] = {}
        self._condemned: dict[int, set[int]] = {}

    def begin(self, number: int, steps: Iterable[int]) -> None:
        """A trial is run again that has reported these steps."""
        self._reported[number] = frozenset(steps)

    def forget(self, number: int) -> None:
        """The trial is done."""
        self._reported.pop(number, None)
        self._condemned.pop(number, None)

    def has_reported(self, number: int, step: int) -> bool:
        """Whether that is a report made again."""
        return step in self._reported.get(number, ())

    def ahead(self, number: int, last_step: int | None) -> set[int]:
        """The steps that the trial had reported and has not come to again."""
        reported = self._reported.get(number, ())
        return {step for step in reported if last_step is None or step > last_step}

    def judged(self, number: int, last_step: int | None, *, is_pruned: bool) -> None:
        """The pruner has judged the trial there; it may go on all the same."""
        if is_pruned and last_step is not None:
            self._condemned.setdefault(number, set()).add(last_step)

    def verdict(self, number: int, last_step: int | None) -> bool | None:
        """What the pruner said when the trial was there before; None if it is to be asked.

        `SuccessiveHalvingPruner` says only once that a trial is to end. What it said to a driver
        that is dead is not known.
        """
        reported = self._reported.get(number, frozenset())
        if last_step in self._condemned.get(number, set()) & reported:
            return True
        return False if self.ahead(number, last_step) else None
