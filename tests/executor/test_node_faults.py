"""Faults of nodes, drawn at random, at any message that the driver hears: nothing is lost or left.

Real agents and trainers, all on this machine.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import select
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from numpy.testing import assert_allclose

from optuna_fleet import JoinCluster, Limits, LocalCluster
from optuna_fleet.executor import fleet_runner
from optuna_fleet.executor.cluster.config import AgentOptions
from optuna_fleet.executor.cluster.join import JoinEngine
from optuna_fleet.executor.cluster.local import AgentProcess
from optuna_fleet.executor.fleet import agents
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.invitation import Invitation
from tests import leftovers
from tests.executor.test_nodes import _tree, runtime_of
from tests.fleets import fleet_of, train

NUM_TRIALS = 4
MOST_FAULTS = 4
MOST_MESSAGES_BETWEEN = 60
SEEDS = [("local", 1254), ("join", 18077)]  # four faults each, of all kinds


def records(fleet: Any) -> list[Any]:
    study = optuna.create_study()
    objective = functools.partial(train, epochs=10)
    study.optimize(objective, n_trials=NUM_TRIALS, executor=fleet)
    assert all(trial.state.name == "COMPLETE" for trial in study.trials)
    return [
        [*t.user_attrs["losses"], *t.user_attrs["noise"], *t.intermediate_values.values()]
        for t in study.trials
    ]


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    with fleet_of(devices=2, device_type="cpu") as fleet:
        return records(fleet)


class Demon:
    """Strikes at some of the messages that the driver hears."""

    def __init__(self, fleet: Any, seed: int, file: Path | None) -> None:
        self.log: list[str] = []
        self.frozen: list[int] = []
        self.started: list[Any] = []
        self._fleet = fleet
        self._file = file
        self._chance = random.Random(seed)
        self._left = self._chance.randint(1, MOST_FAULTS)
        self._due = self._draw_due()
        self._numbers: dict[str, list[int]] = {}

    def _draw_due(self) -> int:
        return self._chance.randint(1, MOST_MESSAGES_BETWEEN)

    def hear(self) -> None:
        if (runtime := runtime_of(self._fleet)) is None:
            return
        for node in runtime.nodes:
            numbers = [device.index for device in node.devices]
            assert self._numbers.setdefault(node.name, numbers) == numbers
        self._due -= 1
        if self._due <= 0 and self._left and len(runtime.nodes):
            self._left -= 1
            self._due = self._draw_due()
            self._strike(runtime)

    def _strike(self, runtime: Any) -> None:
        node = self._chance.choice([*runtime.nodes])
        faults = [
            self._kill,
            self._kill_trainer,
            self._freeze,
            self._freeze_all,
            self._cut,
            *[self._add, self._add_namesake, self._replace] * (self._file is not None),
        ]
        fault = self._chance.choice(faults)
        self.log.append(f"{fault.__name__} {node.name}")
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            fault(runtime, node)
        if self._chance.random() < 0.5:
            self.thaw()

    def _kill(self, runtime: Any, node: Any) -> None:
        os.kill(node.pid, signal.SIGKILL)

    def _kill_trainer(self, runtime: Any, node: Any) -> None:
        for process in runtime.trainers.live.values():
            if process.agent == node.agent:
                os.kill(process.pid, signal.SIGKILL)
                return

    def _freeze(self, runtime: Any, node: Any) -> None:
        self._stop(node.pid)

    def _freeze_all(self, runtime: Any, node: Any) -> None:
        for pid in _tree(node.pid):
            self._stop(pid)

    def _stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        self.frozen.append(os.pidfd_open(pid))

    def _cut(self, runtime: Any, node: Any) -> None:
        runtime.connections.agents[node.agent].cut()

    def _add(self, runtime: Any, node: Any) -> None:
        self.join(f"added-{len(self.started)}")

    def _add_namesake(self, runtime: Any, node: Any) -> None:
        self.join(node.name)

    def _replace(self, runtime: Any, node: Any) -> None:
        os.kill(node.pid, signal.SIGKILL)
        self.join(node.name)

    def join(self, name: str) -> None:
        assert self._file is not None
        invitation = Invitation.read(self._file)
        options = AgentOptions(invitation=invitation, node=name, devices=2, device_type="cpu")
        self.started.append(AgentProcess(options, 1))

    def thaw(self) -> None:
        while self.frozen:
            process = self.frozen.pop()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGCONT)
            os.close(process)


@contextlib.contextmanager
def nothing_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither processes nor threads, files, shared memory, descriptors."""
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    threads, segments = set(threading.enumerate()), leftovers.shared_memory()
    processes, descriptors = _pids(), _descriptors()
    yield
    for pid in _pids() - processes:
        with contextlib.suppress(ProcessLookupError):
            ending = os.pidfd_open(pid)
            select.select([ending], [], [])
            os.close(ending)
    assert set(threading.enumerate()) <= threads
    assert os.listdir(folder) == []
    assert leftovers.shared_memory() <= segments
    assert _descriptors() <= descriptors


def _pids() -> set[int]:
    return {int(line.partition(":")[0]) for line in leftovers.processes()}


def _descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("kind", "seed"), SEEDS)
def test_faults_of_nodes_change_no_result_and_leave_nothing(
    kind: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    undisturbed: list[Any],
) -> None:
    monkeypatch.setattr(agents, "LEASE_S", 6.0)
    monkeypatch.setattr(fleet_runner, "DRIVER_LEASE_S", 4.0)
    file = tmp_path / "join"
    join = kind == "join"
    cluster = JoinCluster(file=file, host="127.0.0.1") if join else LocalCluster(nodes=3)
    options: dict[str, Any] = {"limits": Limits(max_restarts=100), "cluster": cluster}
    if not join:
        options["device_type"] = "cpu"
    with nothing_is_left(tmp_path / "files", monkeypatch):
        fleet = fleet_of(devices=None if join else 2, **options)
        demon = Demon(fleet, seed, file if join else None)
        take, opened = Inbox.get, JoinEngine.open

        def heard(self: Inbox, *arguments: Any) -> Any:
            if (event := take(self, *arguments)) is not None:
                demon.hear()
            return event

        def open_(self: JoinEngine, invitation: Invitation, inbox: Any) -> None:
            opened(self, invitation, inbox)
            for name in "abc":
                demon.join(name)

        with monkeypatch.context() as patch:
            patch.setattr(Inbox, "get", heard)
            patch.setattr(JoinEngine, "open", open_)
            try:
                assert_allclose(records(fleet), undisturbed, rtol=1e-10)
            finally:
                print(kind, seed, demon.log)
                if seed % 2:
                    demon.thaw()
                fleet.close()
                demon.thaw()
                for process in demon.started:
                    select.select([process], [], [])
                    process.close()
