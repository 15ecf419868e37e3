"""Where a driver waits: for sockets, for times, and for what its other threads have to say."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from optuna_fleet.exceptions import LaunchError

_LONGEST_S = 1e6  # that epoll can wait, about
_AWAY_S = 0.1
_LEISURE_S = 0.1


class Inbox:
    """Messages, ends of connections, departures, times: in the order in which they came.

    Whoever takes waits for the sockets itself, so that a message wakes one thread. While nobody
    takes, a thread looks at them ten times a second: signs of life are given, and nodes let in.

    Any thread may put or call, and any signal handler put; one thread takes. What is called must
    not block: it is called in a turn, and no two turns are taken at a time.

    Attributes:
        now: When the turn began.
        is_taken: Whether the turn is that of somebody who takes.
        is_at_work: Likewise, and it does not wait.
        has_due: Likewise, and an event is due: first all is to be read that was said by then.
    """

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.is_taken = self.is_at_work = self.has_due = False
        self._there: deque[Any] = deque()
        self._times: list[tuple[float, int, Callable[[], Any]]] = []
        self._events: list[tuple[float, int, Any]] = []  # until somebody takes, who reads all
        self._order = itertools.count()
        self._handlers: dict[int, Callable[[int], Any]] = {}
        self._copies: set[int] = set()  # of descriptors that are waited for
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_pressing = False  # something is to be taken at once
        self._is_waiting = False
        self._turn = threading.Lock()
        self._is_over = threading.Event()
        self.watch(self._wake, select.EPOLLIN, lambda events: os.eventfd_read(self._wake))
        self._thread = threading.Thread(
            target=self._stand_in, name="optuna-fleet-sockets", daemon=True
        )
        self._thread.start()

    def put(self, event: Any) -> None:
        """Tell whoever takes; an exception is raised there, now and ever after."""
        self._there.append(event)
        self._is_pressing = True
        self._rouse()

    def put_at_leisure(self, event: Any) -> None:
        """Likewise, in a turn: nobody is woken for it, until a while later."""
        self._there.append(event)
        if len(self._there) == 1:
            self.call_later(_LEISURE_S, self._press)

    def _press(self) -> None:
        if self._there:  # else it was taken with what came behind it
            self._is_pressing = True

    def _has_news(self) -> bool:
        return self._is_pressing and bool(self._there)

    def get(self, timeout_s: float | None = None) -> Any:
        """Take the next event, waiting for it; None if there is none within so many seconds."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._has_news():
            with self._turn:
                self.is_taken = True
                try:
                    self._take_turn(deadline)
                finally:
                    self.is_taken = self.is_at_work = self.has_due = False
            if not self._has_news() and time.monotonic() >= deadline:
                return None
        if isinstance(event := self._there[0], BaseException):
            raise event
        event = self._there.popleft()
        if not self._there:
            self._is_pressing = False
            if self._there:  # something was put just now, whose flag this may have been
                self._is_pressing = True
        return event

    def later(self, seconds: float, event: Any) -> None:
        """Put an event so many seconds from now, behind all that was said by then."""
        self._add(self._events, seconds, event)

    def call_later(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> None:
        """Call something so many seconds from now, when what was there is read.

        That is all that had come by then of whoever is read though nobody takes.
        """
        self._add(self._times, seconds, partial(function, *arguments))

    def _add(self, heap: list[tuple[float, int, Any]], seconds: float, what: Any) -> None:
        # At one go, for all threads.
        heapq.heappush(heap, (time.monotonic() + seconds, next(self._order), what))
        self._rouse()

    def call_when_readable(
        self, descriptor: int, function: Callable[..., Any], *arguments: Any
    ) -> None:
        """Call something once this is readable, or its other end is gone."""
        number = os.dup(descriptor)  # which stays valid, whatever becomes of it
        self._copies.add(number)

        def told(events: int) -> None:
            self.unwatch(number)
            self._copies.discard(number)
            os.close(number)
            function(*arguments)

        self.call_later(0.0, self.watch, number, select.EPOLLIN, told)

    def close(self) -> None:
        """Watch nothing any more."""
        self._is_over.set()
        self._thread.join()
        self._poll.close()
        for number in (self._wake, *self._copies):
            os.close(number)

    # -- in a turn --------------------------------------------------------------------------------

    def watch(self, number: int, events: int, handler: Callable[[int], Any]) -> None:
        """Call a handler, with the events, whenever a descriptor has one of these."""
        change = self._poll.modify if number in self._handlers else self._poll.register
        self._handlers[number] = handler
        change(number, events)

    def unwatch(self, number: int) -> None:
        """Watch it no more; to be called before it is closed."""
        if self._handlers.pop(number, None) is not None:
            self._poll.unregister(number)

    def _rouse(self) -> None:
        if self._is_waiting:
            os.eventfd_write(self._wake, 1)

    def _stand_in(self) -> None:
        while not self._is_over.wait(_AWAY_S):
            if self._turn.acquire(blocking=False):
                try:
                    self._take_turn(0.0)
                finally:
                    self._turn.release()

    def _take_turn(self, deadline: float) -> None:
        # What is due now is done after all was read that is there now: so those who were not
        # heard of in time did say nothing, however long this process was stopped.
        self.now = now = time.monotonic()
        self._is_waiting = True  # first: who puts from now on rouses us
        # What is really there, not the flag alone: whoever put may set it after all was taken.
        firsts = (*self._times[:1], *self._events[:1])
        until = now if self._has_news() else min([deadline, *(due for due, *_ in firsts)])
        self.has_due = self.is_taken and bool(self._events) and self._events[0][0] <= now
        try:
            wait_s = max(0.0, min(until - now, _LONGEST_S))
            ready = self._poll.poll(wait_s, len(self._handlers))
        finally:
            self._is_waiting = False
        self.is_at_work = self.is_taken
        try:
            for number, events in ready:
                if (handler := self._handlers.get(number)) is not None:
                    handler(events)
            while self._times and self._times[0][0] <= now:
                heapq.heappop(self._times)[2]()
            while self.has_due and self._events and self._events[0][0] <= now:
                self.put(heapq.heappop(self._events)[2])
        except Exception as error:
            self._is_over.set()
            text = f"The driver can't hear of its nodes any more: {type(error).__name__}: {error}"
            self.put(LaunchError(text))
