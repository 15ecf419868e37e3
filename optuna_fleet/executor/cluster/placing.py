"""The thread of an engine, which alone starts and ends agents."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.engine import Engine
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.invitation import Invitation


class PlacingEngine(Engine):
    """An engine that does its work on a thread; all others only leave it word.

    What begins with an underscore is for the engine that is made of it. `_act`, `_take` and
    `_leave` are called on the thread.

    Args:
        name: What places agents, to begin a sentence with.
        gap_s: Seconds at least between two calls of `_act`.
        end_limit_s: What `_leave` may take; None for as long as it does.

    Attributes:
        _inbox: What is told of departures.
        _wanted: So many nodes would be used; None: as many as there are.
        _left_out: Nodes on which no agent is to be started any more.
        _closed: Set in the end, which `_act` may heed.
    """

    def __init__(self, name: str, *, gap_s: float = 0.0, end_limit_s: float | None = 5.0) -> None:
        self._name, self._gap_s, self._end_limit_s = name, gap_s, end_limit_s
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._closed.set()

    def _prepare(self, invitation: Invitation) -> None:
        """Begin anew, before there is a thread."""

    @abstractmethod
    def _act(self) -> float:
        """Do what is due, and end the agents of `_ends`; return in how many seconds more is."""

    def _take(self, word: Any) -> None:
        """Take in what was put into `_heard`."""

    def _leave(self) -> None:
        """End all agents; also after a `_prepare` that failed."""

    def _is_stuck(self) -> None:
        """`_leave` takes too long: what it is to end may be left."""

    def _ends(self) -> list[str]:
        """Nodes whose agents are to be ended; each is told once."""
        return [self._to_end.get() for _ in range(self._to_end.qsize())]

    def _begin(self, work: Callable[[], None]) -> threading.Thread:
        """Work on a thread of its own; what it raises is the end of placing agents, and told."""
        inbox = self._inbox

        def run() -> None:
            try:
                work()
            except Exception as error:
                kind = "" if isinstance(error, LaunchError) else f"{type(error).__name__}: "
                inbox.put(LaunchError(f"{self._name} can't place agents any more: {kind}{error}"))

        thread = threading.Thread(target=run, name="optuna-fleet-placing", daemon=True)
        thread.start()
        return thread

    def open(self, invitation: Invitation, inbox: Inbox) -> None:
        """See `Engine`."""
        if self._thread is not None:
            self._thread.join()  # what it still does is not to be mixed with what comes now
        self._inbox = inbox
        self._wanted: int | None = None
        self._left_out: set[str] = set()
        self._to_end: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = threading.Event()
        try:
            self._prepare(invitation)
            self._thread = self._begin(self._run)
        except BaseException:
            self._closed.set()
            self._leave()
            raise

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                due_s = self._act()
                if not self._closed.wait(self._gap_s):
                    self._hear(due_s)
        finally:
            self._leave()

    def _hear(self, timeout_s: float) -> None:
        """Wait for a word, and take in all that were left."""
        with contextlib.suppress(queue.Empty):
            word = self._heard.get(timeout=None if math.isinf(timeout_s) else timeout_s)
            while True:
                if word is not None:
                    self._take(word)
                word = self._heard.get_nowait()

    def want(self, nodes: int | None) -> None:
        """See `Engine`: agents that are there stay."""
        if not self._closed.is_set() and self._wanted != nodes:
            self._wanted = nodes
            self._heard.put(None)

    def end(self, node: str, *, for_good: bool = False) -> None:
        """See `Engine`."""
        if not self._closed.is_set():
            self._left_out.update([node] * for_good)
            self._to_end.put(node)
            self._heard.put(None)

    def close(self) -> None:
        """See `Engine`."""
        if not self._closed.is_set():
            self._closed.set()
            assert self._thread is not None
            self._heard.put(None)
            self._thread.join(self._end_limit_s)
            if self._thread.is_alive():
                self._is_stuck()
