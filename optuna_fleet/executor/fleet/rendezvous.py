"""The store where the ranks of a trial find each other: asked for once, replaced when lost."""

from __future__ import annotations

from collections.abc import Callable

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.wire.node_messages import StoreLost, StoreReady

_MAX_IN_A_ROW = 3


class Rendezvous:
    """What is known of it.

    Args:
        ask: Asks an agent for another one, and returns which; None if there is none.

    Attributes:
        store: Its address, once it is open.
    """

    def __init__(self, ask: Callable[[], str | None]) -> None:
        self.store: StoreReady | None = None
        self._ask = ask
        self._asked: str | None = None
        self._num_lost = 0  # in a row, without one that was ready

    def open(self) -> None:
        """Have it started, once."""
        if self._asked is None:
            self._asked = self._ask()

    def void(self) -> None:
        """It is no use: the next who wants one asks again."""
        self.store = self._asked = None

    def node_lost(self, agent: str) -> bool:
        """An agent is gone, and what it has kept; return whether that was the store."""
        if self._asked != agent:
            return False
        self.void()
        return True

    def ready(self, store: StoreReady) -> None:
        """It is open."""
        if store.process.agent == self._asked:
            self.store, self._num_lost = store, 0

    def lost(self, message: StoreLost) -> None:
        """Its process has ended.

        Raises:
            LaunchError: As others did before they were ready.
        """
        if message.agent != self._asked:
            return
        self._num_lost += 1
        if self._num_lost >= _MAX_IN_A_ROW:
            raise LaunchError(
                "The store where the ranks of a trial find each other ended "
                f"{self._num_lost} times in a row before it was ready, the last time with "
                f"{message.cause}; what it printed says why."
            )
        self.void()
