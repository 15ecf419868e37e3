"""Where a run stops within an epoch, or is saved: one step that all its ranks come to.

The driver asks each rank for the next step at which it could stop. A rank that has told begins no
such step before it knows where to stop: the furthest that any rank has told. So all stop at the
same one, and no rank needs another for that. A rank that is asked again before it has come there
tells when it has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from optuna_fleet.wire.messages import Place, StopAt


class StopLine:
    """Of one run on one rank: the training thread comes to it, the channel's reader moves it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: Place = (0, 0, 0)
        self._order: StopAt | None = None
        self._tell: Callable[[Place], object] | None = None  # of who asked for the next one
        self._is_asked = False
        self._is_cut = False

    # -- the training thread ----------------------------------------------------------------------

    def come_to(self, place: Place) -> None:
        """There is no step to stop at before `place`."""
        with self._changed:
            self._next = place

    def take(self, place: Place, following: Place) -> StopAt | None:
        """What is to be done before the step at `place`, if anything; that at `following` is next.

        Waits for the driver if that has asked.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_asked or self._order or self._is_cut)
            self._next = following
            if self._order is None or place < self._order.place:
                return None
            order, self._order, self._is_asked = self._order, None, False
            self._answer()
            return order

    # -- the channel's reader ---------------------------------------------------------------------

    def ask(self, tell: Callable[[Place], object]) -> None:
        """Tell the next step to stop at; it will not begin before `stop_at`."""
        with self._changed:
            self._tell = tell
            if self._order is None:
                self._answer()

    def _answer(self) -> None:
        if self._tell is not None:
            tell, self._tell, self._is_asked = self._tell, None, True
            tell(self._next)

    def stop_at(self, order: StopAt) -> None:
        """Do that before the first step that is not before its place."""
        with self._changed:
            self._order = order
            self._changed.notify_all()

    def cut(self) -> None:
        """The driver is gone and will not answer."""
        with self._changed:
            self._is_cut = True
            self._changed.notify_all()
