"""The store where the ranks of a trial find each other: asked for once, replaced when lost."""

from __future__ import annotations

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.fleet.agents import Agents
from optuna_fleet.executor.fleet.faults import MOST_IN_A_ROW, Faults
from optuna_fleet.wire.node_messages import OpenStore, StoreLost, StoreReady


class Rendezvous:
    """What is known of it.

    Attributes:
        store: Its address, once it is open.
    """

    def __init__(self, agents: Agents, faults: Faults) -> None:
        self.store: StoreReady | None = None
        self._agents, self._faults = agents, faults
        self._asked: str | None = None

    def open(self) -> None:
        """Have it started, once."""
        node = next(iter(self._agents.nodes), None)
        if self._asked is None and node is not None:
            self._asked = node.agent
            self._agents.tell(node.agent, OpenStore())

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
            self.store = store
            self._faults.worked("the store")

    def lost(self, message: StoreLost) -> None:
        """Its process has ended.

        Raises:
            LaunchError: As others did before they were ready.
        """
        if message.agent != self._asked:
            return
        number = self._faults.failed("the store")
        if number >= MOST_IN_A_ROW:
            raise LaunchError(
                "The store where the ranks of a trial find each other ended "
                f"{number} times in a row before it was ready, the last time with "
                f"{message.cause}; what it printed says why."
            )
        self.void()
