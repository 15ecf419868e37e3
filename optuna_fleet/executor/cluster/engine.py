"""What places agents: Slurm, Ray, this machine. All else is on the agents' own channels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from optuna_fleet.processes import cause_of_death
from optuna_fleet.wire.invitation import Invitation


class Readable(Protocol):
    """Something a selector can wait for."""

    def fileno(self) -> int:
        """Its file descriptor."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How agents reach the driver.

    Attributes:
        host: Address that it listens on; "" for all.
        port: Port that it listens on; 0 for any that is free.
        has_leases: Silence means that a node, or the driver, is gone: where nothing else tells.
        more_may_join: Nodes come as they like: a trial waits for devices that are not there.
    """

    host: str = "127.0.0.1"
    port: int = 0
    has_leases: bool = False
    more_may_join: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A node that has left, or will.

    Attributes:
        node: Its name, as its agent says it when it joins (``optuna-fleet agent --name``).
        cause: Why, in words that end a sentence: "its agent ended with exit code 1".
        by: When it will be gone, in seconds since the epoch; None if it is.
        exit_code: Of its agent, where that is known; a signal's number negated.
        is_replaced: Another agent was started there.
    """

    node: str
    cause: str
    by: float | None = None
    exit_code: int | None = None
    is_replaced: bool = False


def agent_ended(node: str, exit_code: int, *, is_replaced: bool) -> Departure:
    """That of a node whose agent has ended with this exit code, or by a signal, negated."""
    cause = f"its agent ended with {cause_of_death(exit_code)}"
    return Departure(node=node, cause=cause, exit_code=exit_code, is_replaced=is_replaced)


class Engine(Protocol):
    """Places agents on nodes. An agent joins by itself, and ends when its channel closes.

    Unless it says otherwise, an engine starts no agents that it knows of. Nothing here blocks for
    longer than it takes to start or signal a process.
    """

    def open(self, invitation: Invitation) -> None:
        """Begin to place agents that join this driver, on as many nodes as there are.

        Raises:
            LaunchError: That is not possible.
        """
        ...

    def want(self, nodes: int | None) -> None:
        """So many nodes would be used now; None: as many as there are. May be called often."""
        return

    def expected(self) -> Iterable[str]:
        """Names of the nodes whose agents were started, and have joined or should soon."""
        return ()

    def gone(self) -> Sequence[Departure]:
        """What is known of nodes that have left or will, each told once.

        Raises:
            LaunchError: No agent can be placed, now or later.
        """
        return ()

    def readables(self) -> Iterable[Readable]:
        """What becomes readable when `gone` has news."""
        return ()

    def end(self, node: str, *, for_good: bool = False) -> None:
        """End the agent of a node that was lost, if it is in reach; `gone` tells when it has.

        No other is started there, if it is `for_good`: none would work.
        """
        ...

    def close(self) -> None:
        """End all agents that were placed, and forget them. May be called again."""
        ...
