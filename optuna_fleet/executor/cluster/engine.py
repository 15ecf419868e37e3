"""What places agents: Slurm, Ray, this machine. All else is on the agents' own channels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from optuna_fleet.executor.given import Options
from optuna_fleet.processes import cause_of_death
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.invitation import Invitation


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


@runtime_checkable
class Engine(Protocol):
    """Places agents on nodes. An agent joins by itself, and ends when its channel closes.

    Nothing here blocks for longer than it takes to start or signal a process. An engine of your
    own is derived from this one, and given to one executor as ``cluster=``.

    Attributes:
        host: Address that the driver listens on; "" for all.
        port: Port that it listens on; 0 for any that is free.
        has_leases: Silence means that a node, or the driver, is gone: where nothing else tells.
        more_may_join: Nodes come as they like: a trial waits for devices that are not there.
    """

    host: str = ""
    port: int = 0
    has_leases: bool = True
    more_may_join: bool = True

    def open(self, invitation: Invitation, inbox: Inbox) -> None:
        """Begin to place agents that join this driver, on as many nodes as there are.

        What is put into the inbox, from any thread or signal handler: a `Departure` of each node
        that leaves or will, once; a `LaunchError` if no agent can be placed, now or later.

        Raises:
            LaunchError: That is not possible.
        """
        ...

    def want(self, nodes: int | None) -> None:
        """So many nodes would be used now; None: as many as there are. May be called often."""
        return

    def expected(self) -> Sequence[str]:
        """Names of the nodes whose agents were started, and have joined or should soon."""
        return ()

    def end(self, node: str, *, for_good: bool = False) -> None:
        """End the agent of a node that was lost, if it is in reach; the inbox tells when it has.

        No other is started there, if it is `for_good`: none would work.
        """
        return

    def close(self) -> None:
        """End all agents that were placed, and forget them. May be called again."""
        ...


class Cluster(ABC):
    """The nodes that an engine is to be made for, described: several executors may use it."""

    @abstractmethod
    def engine(self, options: Options) -> Engine:
        """Make what places agents there; it starts nothing before it is opened.

        Raises:
            FleetConfigError: The devices asked for do not exist.
        """
