"""A driver, as far as engines know one: stub agents join it, and it hears of departures."""

from __future__ import annotations

import contextlib
import functools
import json
import select
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna_fleet.executor.cluster.engine import Departure, Engine
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.invitation import Invitation, make_credentials

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


class Hub:
    """Opens an engine; waits for what it does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.agents: list[Joined] = []
        self.departures: list[Departure] = []
        self._inbox = Inbox()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._watch(self._server, self._accept)
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
        self._inbox.close()
        for agent in self.agents:
            agent.sock.close()
        self._server.close()
        self.engine.close()

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
            match self._inbox.get():
                case Departure() as departure:
                    self.departures.append(departure)

    def _watch(self, sock: socket.socket, heard: Callable[[], None]) -> None:
        def told(events: int) -> None:
            heard()
            self._inbox.put(None)  # it is looked again

        self._inbox.call_later(0.0, self._inbox.watch, sock.fileno(), select.EPOLLIN, told)

    def _accept(self) -> None:
        self.agents.append(agent := Joined(self._server.accept()[0]))
        self._watch(agent.sock, functools.partial(self._receive, agent))

    def _receive(self, agent: Joined) -> None:
        data = b""
        with contextlib.suppress(ConnectionError):
            data = agent.sock.recv(4096)
        if not data:
            self.agents.remove(agent)
            self._inbox.unwatch(agent.sock.fileno())
            agent.sock.close()
            return
        for line in data.splitlines():
            if line == b"notice":
                agent.noticed = True
            else:
                agent.told = json.loads(line)
