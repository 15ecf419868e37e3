"""Where a run leaves its devices within an epoch: one step that all its ranks come to.

The driver asks each rank for the next step at which it could stop. A rank that has told begins no
such step before it knows where to stop: the furthest that any rank has told. So all stop at the
same one, and no rank needs another for that.
"""

from __future__ import annotations

import threading

from optuna_fleet.wire.messages import Place


class StopLine:
    """Of one run on one rank: the training thread comes to it, the channel's reader moves it.

    Attributes:
        stays: The ranks that wait where they stop.
    """

    def __init__(self) -> None:
        self.stays: tuple[int, ...] = ()
        self._changed = threading.Condition()
        self._next: Place = (0, 0, 0)
        self._line: Place | None = None
        self._is_asked = False
        self._is_cut = False

    # -- the training thread ----------------------------------------------------------------------

    def come_to(self, place: Place) -> None:
        """There is no step to stop at before `place`."""
        with self._changed:
            self._next = place

    def is_reached(self, place: Place, following: Place) -> bool:
        """Whether to stop before the step at `place`; else that at `following` is next.

        Waits for the driver if that has asked.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_asked or self._line or self._is_cut)
            if self._line is not None and place >= self._line:
                return True
            self._next = following
            return False

    def withdraw(self, following: Place) -> None:
        """The run can't leave, and goes on to the step at `following`."""
        with self._changed:
            self._is_asked, self._line, self._next = False, None, following

    # -- the channel's reader ---------------------------------------------------------------------

    def ask(self) -> Place:
        """Return the next step to stop at; it will not begin before `stop_at`."""
        with self._changed:
            self._is_asked = True
            return self._next

    def stop_at(self, place: Place, stays: tuple[int, ...] = ()) -> None:
        """Stop at the first step that is not before `place`."""
        with self._changed:
            self._line, self.stays = place, stays
            self._changed.notify_all()

    def cut(self) -> None:
        """The driver is gone and will not answer."""
        with self._changed:
            self._is_cut = True
            self._changed.notify_all()
