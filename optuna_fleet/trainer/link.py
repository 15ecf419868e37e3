"""What arrives from the driver: a thread reads it at once, whatever the objective is doing."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from optuna_fleet.exceptions import TrialError
from optuna_fleet.trainer.moves.stop_line import StopLine
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
