"""A driver, as far as engines know one: stub agents join it, and it hears of departures."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import selectors
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.engine import Departure, Engine
from optuna_fleet.wire.credentials import make_credentials
from optuna_fleet.wire.invitation import Invitation

AGENT = (sys.executable, str(Path(__file__).with_name("stub_agent.py")))


@dataclass(eq=False)
class Joined:
    """A stub agent; `told` is what it said of itself."""

    sock: socket.socket
    told: dict[str, Any] = field(default_factory=dict)
    noticed: bool = False

    @property
    def node(self) -> str:
        return str(self.told.get("node", ""))

    def end(self, exit_code: int) -> None:
        """Have it end so."""
        self.sock.sendall(str(exit_code).encode())


class Inbox:
    """Where an engine puts departures: what can be waited for here."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Departure | LaunchError] = queue.SimpleQueue()
        self.wake = os.eventfd(0)

    def put(self, event: Departure | LaunchError) -> None:
        """See `Inbox` of engines."""
        self.events.put(event)
        os.eventfd_write(self.wake, 1)


class Hub:
    """Opens an engine; waits for what it does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.agents: list[Joined] = []
        self.departures: list[Departure] = []
        self._inbox = Inbox()
        self._server = socket.create_server(("127.0.0.1", 0))
        address = ("127.0.0.1", int(self._server.getsockname()[1]))
        self.invitation = Invitation(addresses=(address,), credentials=make_credentials())

    def __enter__(self) -> Hub:
        try:
            self.engine.open(self.invitation, self._inbox)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for agent in self.agents:
            agent.sock.close()
        self._server.close()
        self.engine.close()
        os.close(self._inbox.wake)

    def nodes(self) -> list[str]:
        """Of the agents that are there, in order."""
        return sorted(agent.node for agent in self.agents if agent.told)

    def agent_of(self, node: str) -> Joined:
        """The agent of a node."""
        return next(agent for agent in self.agents if agent.node == node)

    def gone(self) -> list[str]:
        """Nodes that the engine has said to be gone."""
        return [departure.node for departure in self.departures if departure.by is None]

    def wait_for(self, holds: Callable[[], Any]) -> None:
        """Handle what comes until something holds; the test's own timeout is the limit."""
        while not holds():
            with selectors.DefaultSelector() as selector:
                selector.register(self._server, selectors.EVENT_READ, self._accept)
                selector.register(self._inbox.wake, selectors.EVENT_READ, self._hear)
                for agent in self.agents:
                    hear = functools.partial(self._receive, agent)
                    selector.register(agent.sock, selectors.EVENT_READ, hear)
                for key, _ in selector.select():
                    key.data()

    def _hear(self) -> None:
        os.eventfd_read(self._inbox.wake)
        while not self._inbox.events.empty():
            event = self._inbox.events.get()
            if isinstance(event, LaunchError):
                raise event
            self.departures.append(event)

    def _accept(self) -> None:
        self.agents.append(Joined(self._server.accept()[0]))

    def _receive(self, agent: Joined) -> None:
        data = b""
        with contextlib.suppress(ConnectionError):
            data = agent.sock.recv(4096)
        if not data:
            self.agents.remove(agent)
            agent.sock.close()
            return
        for line in data.splitlines():
            if line == b"notice":
                agent.noticed = True
            else:
                agent.told = json.loads(line)
