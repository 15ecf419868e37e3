"""An engine in little: agents as children of this process, on nodes that are only names."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.engine import Departure, Engine, Inbox
from optuna_fleet.processes import cause_of_death
from optuna_fleet.wire.invitation import Invitation


class StubEngine(Engine):
    def __init__(self, agent: Sequence[str], nodes: Sequence[str]) -> None:
        self._agent = agent
        self._nodes = nodes
        self._wanted = len(nodes)
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()

    def open(self, invitation: Invitation, inbox: Inbox) -> None:
        self._inbox = inbox
        self._environment = {**os.environ, **invitation.environment()}
        try:
            self._place()
        except BaseException:
            self.close()
            raise

    def _place(self) -> None:
        with self._lock:
            for node in self._nodes:
                if node not in self._agents and len(self._agents) < self._wanted:
                    self._start(node)

    def _start(self, node: str) -> None:
        command = [*self._agent, "--name", node]
        try:
            process = self._agents[node] = subprocess.Popen(command, env=self._environment)
        except OSError as error:
            raise LaunchError(
                f"`{self._agent[0]}` can't be started: {error}. Install it."
            ) from error
        threading.Thread(target=self._watch, args=(node, process), daemon=True).start()

    def _watch(self, node: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._lock:
            if self._agents.get(node) is process:
                del self._agents[node]
                cause = f"its agent ended with {cause_of_death(code)}"
                self._inbox.put(Departure(node=node, cause=cause))

    def want(self, nodes: int | None) -> None:
        self._wanted = len(self._nodes) if nodes is None else nodes
        self._place()

    def expected(self) -> Sequence[str]:
        return tuple(self._agents)

    def end(self, node: str, *, for_good: bool = False) -> None:
        if node in self._agents:
            self._agents[node].kill()

    def close(self) -> None:
        with self._lock:
            agents, self._agents = self._agents, {}
        for process in agents.values():
            process.kill()
            process.wait()
