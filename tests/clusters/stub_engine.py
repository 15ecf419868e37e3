"""An engine in little: agents as children of this process, on nodes that are only names."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterable, Sequence

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.asking import News
from optuna_fleet.executor.cluster.engine import Departure, Readable
from optuna_fleet.processes import cause_of_death
from optuna_fleet.wire.invitation import Invitation


class StubEngine:
    def __init__(self, agent: Sequence[str], nodes: Sequence[str]) -> None:
        self._agent = agent
        self._nodes = nodes
        self._wanted = len(nodes)
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._news = News()
        self._news.close()

    def open(self, invitation: Invitation) -> None:
        self._news = News()
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
                self._news.tell(Departure(node=node, cause=cause))

    def want(self, nodes: int | None) -> None:
        self._wanted = len(self._nodes) if nodes is None else nodes
        self._place()

    def expected(self) -> Iterable[str]:
        return tuple(self._agents)

    def gone(self) -> Sequence[Departure]:
        return self._news.fetch()

    def readables(self) -> Iterable[Readable]:
        return [self._news]

    def end(self, node: str, *, for_good: bool = False) -> None:
        if node in self._agents:
            self._agents[node].kill()

    def close(self) -> None:
        with self._lock:
            agents, self._agents = self._agents, {}
        for process in agents.values():
            process.kill()
            process.wait()
        self._news.close()
