"""What places agents: Slurm, Ray, this machine. All else is on the agents' own channels."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from optuna_fleet.exceptions import LaunchError
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


class PlacingEngine(Engine):
    """An engine whose scheduler is to be asked again and again, on a thread, for it may be slow.

    What begins with an underscore is for the engine that is made of it. `_act` and `_leave` are
    called on the thread.

    Args:
        name: What places agents, to begin a sentence with.
        gap_s: Seconds at least between two calls of `_act`.
        end_limit_s: What `_leave` may take.

    Attributes:
        _inbox: What is told of departures.
        _wanted: So many nodes would be used; None: as many as there are.
        _left_out: Nodes on which no agent is to be started any more.
        _closed: Set in the end, which `_act` may heed.
        _roused: To be set where there is something to do sooner than `_act` has said.
    """

    def __init__(self, name: str, *, gap_s: float = 0.0, end_limit_s: float = 5.0) -> None:
        self._name, self._gap_s, self._end_limit_s = name, gap_s, end_limit_s
        self._thread: threading.Thread | None = None
        self._roused, self._closed = threading.Event(), threading.Event()
        self._closed.set()

    def _prepare(self, invitation: Invitation) -> None:
        """Begin anew, before there is a thread."""

    @abstractmethod
    def _act(self) -> float:
        """Do what is due, and end the agents of `_ends`; return in how many seconds more is."""

    def _leave(self) -> None:
        """End all agents; also after a `_prepare` that failed."""

    def _is_stuck(self) -> None:
        """`_leave` takes too long: what it is to end may be left."""

    def _ends(self) -> list[str]:
        """Nodes whose agents are to be ended; each is told once."""
        return [self._to_end.get() for _ in range(self._to_end.qsize())]

    def open(self, invitation: Invitation, inbox: Inbox) -> None:
        """See `Engine`."""
        if self._thread is not None:
            self._thread.join()  # what it still does is not to be mixed with what comes now
        self._inbox = inbox
        self._wanted: int | None = None
        self._left_out: set[str] = set()
        self._to_end: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closed = threading.Event()
        try:
            self._prepare(invitation)
            self._thread = threading.Thread(
                target=self._run, name="optuna-fleet-placing", daemon=True
            )
            self._thread.start()
        except BaseException:
            self._closed.set()
            self._leave()
            raise

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                due_s = self._act()
                self._closed.wait(self._gap_s)
                self._roused.wait(due_s)
                self._roused.clear()
        except Exception as error:
            kind = "" if isinstance(error, LaunchError) else f"{type(error).__name__}: "
            text = f"{self._name} can't place agents any more: {kind}{error}"
            self._inbox.put(LaunchError(text))
        finally:
            self._leave()

    def want(self, nodes: int | None) -> None:
        """See `Engine`: agents that are there stay."""
        if not self._closed.is_set() and self._wanted != nodes:
            self._wanted = nodes
            self._roused.set()

    def end(self, node: str, *, for_good: bool = False) -> None:
        """See `Engine`."""
        if not self._closed.is_set():
            self._left_out.update([node] * for_good)
            self._to_end.put(node)
            self._roused.set()

    def close(self) -> None:
        """See `Engine`."""
        if not self._closed.is_set():
            self._closed.set()
            self._roused.set()
            assert self._thread is not None
            self._thread.join(self._end_limit_s)
            if self._thread.is_alive():
                self._is_stuck()


class Cluster(ABC):
    """The nodes that an engine is to be made for, described: several executors may use it."""

    @abstractmethod
    def engine(self, options: Options) -> Engine:
        """Make what places agents there; it starts nothing before it is opened.

        Raises:
            FleetConfigError: The devices asked for do not exist.
        """
