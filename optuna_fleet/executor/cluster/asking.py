"""The thread of an engine that asks a scheduler."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque

from optuna_fleet.executor.cluster.engine import Engine, Inbox, begin
from optuna_fleet.wire.invitation import Invitation

_END_LIMIT_S = 5.0


class AsksScheduler(Engine):
    """An engine that looks at its scheduler now and then, and when woken.

    What begins with an underscore is for the engine that is made of it. `_look` and `_leave` are
    called on the thread.

    Args:
        name: Of the scheduler, to begin a sentence with.
        every_s: Seconds between two looks.
        gap_s: Likewise, at least.

    Attributes:
        _inbox: What is told of departures.
        _environment: What an agent has to be started with.
        _wanted: So many nodes would be used; None: as many as there are.
        _left_out: Nodes on which no agent is to be started any more.
        _closed: Set in the end, which `_look` may heed.
    """

    def __init__(self, name: str, *, every_s: float, gap_s: float = 0.0) -> None:
        self._name, self._every_s, self._gap_s = name, every_s, gap_s
        self._thread: threading.Thread | None = None
        self._stuck: threading.Thread | None = None

    def _prepare(self) -> None:
        """Begin anew, before there is a thread."""

    @abstractmethod
    def _look(self) -> None:
        """Tell the inbox what is new, place what is missing, end the agents of `_ends`.

        An exception is the end of placing agents.
        """

    def _ends(self) -> list[str]:
        """Nodes whose agents are to be ended; each is told once, so ask when it can be done."""
        return [self._to_end.popleft() for _ in range(len(self._to_end))]

    def _leave(self) -> None:
        """End all agents; also after a `_prepare` that failed."""

    def open(self, invitation: Invitation, inbox: Inbox) -> None:
        """See `Engine`."""
        if self._stuck is not None:
            self._stuck.join()  # what it still does is not to be mixed with what comes now
        self._inbox, self._environment = inbox, invitation.environment()
        self._wanted: int | None = None
        self._left_out: set[str] = set()
        self._to_end: deque[str] = deque()
        self._woken, self._closed = threading.Event(), threading.Event()
        try:
            self._prepare()
        except BaseException:
            self._leave()
            raise
        self._thread = begin(self._name, inbox, self._run)

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._woken.clear()
                self._look()
                if not self._closed.wait(self._gap_s):
                    self._woken.wait(self._every_s)
        finally:
            self._leave()

    def want(self, nodes: int | None) -> None:
        """See `Engine`: agents that are there stay."""
        if self._thread is not None and self._wanted != nodes:
            self._wanted = nodes
            self._woken.set()

    def end(self, node: str, *, for_good: bool = False) -> None:
        """See `Engine`."""
        if self._thread is not None:
            self._left_out.update([node] * for_good)
            self._to_end.append(node)
            self._woken.set()

    def close(self) -> None:
        """See `Engine`."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            self._closed.set()
            self._woken.set()
            thread.join(_END_LIMIT_S)
            if thread.is_alive():
                self._stuck = thread
                self._is_stuck()

    def _is_stuck(self) -> None:
        """The scheduler does not answer: what it runs may be left."""
