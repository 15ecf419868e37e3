"""Nodes that join, vanish and freeze while a sweep runs: real agents, all on this machine."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from numpy.testing import assert_allclose

from optuna_fleet import FleetConfigError, FleetExecutor, JoinCluster, LocalCluster
from optuna_fleet.executor import fleet_runner
from optuna_fleet.executor.cluster.join import JoinEngine
from optuna_fleet.executor.fleet import agents
from optuna_fleet.wire.invitation import Invitation, make_credentials
from tests.fleets import Leg, fleet_of, train
from tests.nursery import Forked, Nursery

LEGS = {0: [Leg((0, 2), 3), Leg((1,), 5), Leg((1, 3))], 1: [Leg((1, 3), 2), Leg((2,))]}
"""Trials on several nodes, and moves between them, on nodes of two devices each."""


class AtReport(optuna.pruners.BasePruner):
    """Does something at the first report of each epoch, and never prunes."""

    def __init__(self, act: Callable[[int, int], None]) -> None:
        self._act = act

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        self._act(trial.number, trial.last_step or 0)
        return False


def sweep(
    fleet: Any,
    act: Callable[[int, int], None] = lambda number, epoch: None,
    num_trials: int = 2,
) -> list[Any]:
    """All losses of a sweep."""
    study = optuna.create_study(pruner=AtReport(act))
    study.optimize(train, n_trials=num_trials, executor=fleet)
    return [trial.user_attrs["losses"] for trial in study.trials]


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    with fleet_of(devices=4, device_type="cpu") as fleet:
        fleet.script = {0: [Leg((0,))], 1: [Leg((1,))]}
        return sweep(fleet)


@pytest.fixture
def nodes() -> Iterator[Any]:
    """Two nodes of two devices each."""
    with fleet_of(devices=2, device_type="cpu", cluster=LocalCluster(nodes=2)) as fleet:
        yield fleet


def runtime_of(fleet: Any) -> Any:
    return fleet._runner._runtime


def test_trials_that_span_nodes_and_move_between_them_have_the_same_results(
    nodes: Any, undisturbed: list[Any]
) -> None:
    nodes.script = LEGS
    assert_allclose(sweep(nodes), undisturbed, rtol=1e-10)
    devices = runtime_of(nodes).nodes.devices.values()
    assert sorted(device.node for device in devices) == [0, 0, 1, 1]
    assert {device.node_name for device in devices} == {"local-0", "local-1"}


def test_a_node_whose_agent_is_killed_costs_its_trials_a_restart_and_no_result(
    nodes: Any, undisturbed: list[Any], log: io.StringIO
) -> None:
    killed: list[int] = []

    def kill_one(number: int, epoch: int) -> None:
        if epoch == 2 and not killed:
            node = runtime_of(nodes).nodes.named("local-1")
            killed.append(node.pid)
            os.kill(node.pid, signal.SIGKILL)

    assert_allclose(sweep(nodes, kill_one), undisturbed, rtol=1e-10)
    assert killed
    assert "Node local-1 was lost: its agent ended with signal SIGKILL" in log.getvalue()
    assert_allclose(sweep(nodes), undisturbed, rtol=1e-10)
    assert sorted(runtime_of(nodes).nodes.devices) == [0, 1, 2, 3]


def test_a_node_that_freezes_is_lost_with_its_store_and_ends_when_it_thaws(
    monkeypatch: pytest.MonkeyPatch,
    nursery: Nursery,
    undisturbed: list[Any],
    log: io.StringIO,
    tmp_path: Path,
) -> None:
    """Ranks that look for each other there are told, and another node takes its place."""
    monkeypatch.setattr(agents, "LEASE_S", 6.0)
    monkeypatch.setattr(fleet_runner, "DRIVER_LEASE_S", 4.0)
    frozen: list[int] = []
    with joined(nursery, tmp_path / "join", "a") as here:
        first = here.agents["a"]

        def freeze_first(number: int, epoch: int) -> None:
            if epoch == 0:
                here.start("b")
            elif epoch == 2 and not frozen:
                frozen.extend(_tree(first.pid))
                for pid in frozen:
                    os.kill(pid, signal.SIGSTOP)

        here.fleet.script = {0: [Leg((0,), 1), Leg((2,), 3), Leg((2, 3)), Leg((2, 3))]}
        assert_allclose(sweep(here.fleet, freeze_first, 1), undisturbed[:1], rtol=1e-10)
        here.start("a")
        while runtime_of(here.fleet).nodes.named("a") is None:
            sweep(here.fleet, num_trials=1)
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        assert first.wait() == 1
        assert len(frozen) > 1
        assert not any(map(_runs, frozen))
    assert "Node a was lost: nothing was heard of it for 6 s" in log.getvalue()
    assert "the node where its ranks look for each other was lost. It is run again from" in (
        log.getvalue()
    )


def test_ctrl_c_at_an_agent_ends_it_and_fails_no_trial(
    nursery: Nursery, undisturbed: list[Any], tmp_path: Path
) -> None:
    with joined(nursery, tmp_path / "join", "b") as here:

        def interrupt(number: int, epoch: int) -> None:
            if epoch == 2 and "a" not in here.agents:
                here.start("a")  # where its trials go on
                agent = here.agents["b"].pid
                reached = [pid for pid in _tree(agent) if os.getpgid(pid) == os.getpgid(agent)]
                for pid in reversed(reached):
                    os.kill(pid, signal.SIGINT)

        assert_allclose(sweep(here.fleet, interrupt), undisturbed, rtol=1e-10)
        assert here.agents["b"].wait() == 1


def test_nodes_may_join_a_sweep_that_waits_and_one_that_runs(
    nursery: Nursery, undisturbed: list[Any], tmp_path: Path
) -> None:
    with joined(nursery, tmp_path / "join", "a") as here:

        def start_another(number: int, epoch: int) -> None:
            if "b" not in here.agents:
                here.start("b")

        assert_allclose(sweep(here.fleet, start_another), undisturbed, rtol=1e-10)
        while len(runtime_of(here.fleet).nodes) < 2:  # it may be faster than the agent is
            assert_allclose(sweep(here.fleet), undisturbed, rtol=1e-10)
    assert [agent.wait() for agent in here.agents.values()] == [0, 0]


def test_a_driver_that_dies_ends_the_agents_that_have_joined(
    nursery: Nursery, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(
        "import optuna, os, signal\n"
        "from optuna_fleet import FleetExecutor, JoinCluster\n"
        f"fleet = FleetExecutor(cluster=JoinCluster(file={str(tmp_path / 'join')!r}))\n"
        "end = lambda study, trial: os.kill(os.getpid(), signal.SIGKILL)\n"
        "optuna.create_study().optimize(lambda trial: 0.0, callbacks=[end], executor=fleet)\n"
    )
    agent = agent_by_hand(nursery, tmp_path / "join", "a")
    assert nursery.run(tmp_path / "script.py", folder=tmp_path).returncode == -signal.SIGKILL
    assert agent.wait() == 1


def test_what_can_not_join_says_why(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    token = Invitation(addresses=(), credentials=make_credentials()).token
    for given, variables, words in (
        (__file__, {}, "is no invitation"),
        ("nowhere", {}, "nowhere is no invitation of a driver: [Errno 2] No such"),
        ("127.0.0.1:1", {}, "The token of the driver is missing: set OPTUNA_FLEET_TOKEN"),
        ("127.0.0.1:1", {"OPTUNA_FLEET_TOKEN": token[:-50]}, "The token of the driver is damaged"),
        ("127.0.0.1:1", {"OPTUNA_FLEET_TOKEN": token}, "127.0.0.1:1"),
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            command = ("agent", "--join", given, "--devices", "1")
            agent = nursery.run("optuna_fleet", *command)
        assert agent.returncode != 0
        assert words in agent.stderr


def test_what_a_cluster_of_nodes_that_join_can_not_be_given(tmp_path: Path) -> None:
    with pytest.raises(FleetConfigError, match="give `--devices` and `--device-type` to"):
        FleetExecutor(devices=2, cluster=JoinCluster(file=tmp_path / "join"))
    with pytest.raises(FleetConfigError, match="`port` is"):
        JoinCluster(port=65536)


def test_a_driver_removes_its_own_invitation_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [JoinEngine(tmp_path / "join") for _ in range(2)]
    address = ("127.0.0.1", 7)
    credentials = [make_credentials() for _ in engines]
    for engine, one in zip(engines, credentials, strict=True):
        engine.open(Invitation(addresses=(address,), credentials=one), queue.SimpleQueue())
    assert caplog.text.count("was there already") == 1
    engines[0].close()
    assert Invitation.read(tmp_path / "join").credentials == credentials[1]
    engines[1].close()
    assert not (tmp_path / "join").exists()


# -- agents that join ----------------------------------------------------------------------------


class Joined:
    """A fleet of agents of two devices that were started by hand, and are ended with it."""

    def __init__(self, fleet: Any, file: Path, nursery: Nursery) -> None:
        self.fleet = fleet
        self.agents: dict[str, Forked] = {}
        self._file = file
        self._nursery = nursery

    def start(self, name: str) -> None:
        self.agents[name] = agent_by_hand(self._nursery, self._file, name)


@contextlib.contextmanager
def joined(nursery: Nursery, file: Path, *names: str) -> Iterator[Joined]:
    cluster = JoinCluster(file=file, host="127.0.0.1")
    with fleet_of(devices=None, cluster=cluster) as fleet:
        here = Joined(fleet, file, nursery)
        for name in names:
            here.start(name)
        try:
            yield here
        finally:
            fleet.close()
            for agent in here.agents.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(30)
                agent.kill()


def agent_by_hand(nursery: Nursery, file: Path, name: str) -> Forked:
    """An agent of two devices; it waits until it may join."""
    command = ["tests.joining", str(file), "--devices", "2", "--name", name]
    assert sys.__stderr__ is not None
    return nursery.start(command, os.environ, sys.__stderr__, sys.__stderr__)


def _tree(pid: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in _tree(int(child)))]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
