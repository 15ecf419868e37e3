"""What arrives from the driver: a thread reads it at once, whatever the objective is doing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from optuna_fleet.exceptions import TrialError
from optuna_fleet.wire.calls import Reply
from optuna_fleet.wire.channel import Channel
from optuna_fleet.wire.messages import AskStep, AtStep, Place, StopAt
from optuna_fleet.wire.node_messages import Quit


class Inbox:
    """The only reader of the driver's channel, for as long as the process lives.

    Attributes:
        is_over: The driver is gone, or wants this process to end.
    """

    def __init__(self, channel: Channel) -> None:
        self.is_over = False
        self._pid = os.getpid()
        self._send = channel.send
        self._receive = channel.receive
        self._orders = SimpleQueue[Any]()
        self._replies = SimpleQueue[Reply | None]()
        self._lines: dict[int, StopLine] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="optuna-fleet-inbox", daemon=True).start()

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy, in a process that the objective has forked."""
        return os.getpid() != self._pid

    def send(self, message: Any) -> None:
        """See `Channel.send`.

        Raises:
            TrialError: This is a copy: the channel has one sender, and here nobody reads it.
        """
        if self.is_forked:
            raise TrialError(
                "`trial` was used in a process that the objective has forked, which has no "
                "connection to the study: hand results back to the objective's own process."
            )
        self._send(message)

    def next_order(self) -> Any:
        """Wait for what this process is to do; `Quit` also when the driver is gone."""
        return self._orders.get()

    def next_reply(self) -> Reply | None:
        """Wait for an answer to a call, of whichever run; None when there will be no more."""
        reply = self._replies.get()
        if reply is None:
            self._replies.put(None)
        return reply

    def stop_line(self, run_id: int) -> StopLine:
        """Where a run is to stop; those of runs before it are forgotten."""
        with self._lock:
            self._lines = {known: line for known, line in self._lines.items() if known >= run_id}
            return self._lines.setdefault(run_id, StopLine())

    def _read(self) -> None:
        try:
            while not self.is_over:
                self._take(self._receive())
        except (EOFError, OSError):
            pass
        finally:
            self._end()

    def _take(self, message: Any) -> None:
        match message:
            case Reply():
                self._replies.put(message)
            case AskStep():  # it may come before the run that it is about
                self.stop_line(message.run_id).ask(partial(self._tell_step, message))
            case StopAt():
                self.stop_line(message.run_id).stop_at(message)
            case Quit():
                self.is_over = True
            case _:
                self._orders.put(message)

    def _tell_step(self, asked: AskStep, place: Place) -> None:
        with suppress(OSError):  # the driver is gone, as all else will notice
            self.send(AtStep(run_id=asked.run_id, rank=asked.rank, place=place))

    def _end(self) -> None:
        with self._lock:
            self.is_over = True
            for line in self._lines.values():
                line.cut()
        self._replies.put(None)
        self._orders.put(Quit())


class StopLine:
    """Where a run stops within an epoch, or is saved: one step that all its ranks come to.

    The driver asks each rank for the next step at which it could stop. A rank that has told begins
    no such step before it knows where to stop: the furthest that any rank has told. So all stop at
    the same one, and no rank needs another for that. A rank that is asked again before it has come
    there tells when it has. The training thread comes to the line, the inbox's moves it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: Place = (0, 0, 0)
        self._order: StopAt | None = None
        self._tell: Callable[[Place], object] | None = None  # of who asked for the next one
        self._is_asked = False
        self._is_cut = False

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
