"""What every engine does, whatever it places agents with; that of Ray is in `test_ray`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optuna_fleet import FleetConfigError, LaunchError, LocalCluster, processes
from optuna_fleet.executor.cluster import local
from optuna_fleet.executor.cluster.config import AgentOptions
from optuna_fleet.executor.cluster.engine import Engine, PlacingEngine
from optuna_fleet.executor.cluster.join import JoinEngine
from optuna_fleet.executor.cluster.slurm import harvest
from optuna_fleet.executor.cluster.slurm.cluster import SlurmEngine
from optuna_fleet.executor.cluster.slurm.harvest import HarvestCluster, HarvestEngine
from optuna_fleet.processes import ModuleProcess
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.invitation import Invitation
from tests.clusters.hub import AGENT, Hub
from tests.clusters.slurm_lab import SlurmLab, on_path

NODES = ("one", "two", "three")


@dataclass(frozen=True, kw_only=True)
class Case:
    """An engine that reaches three nodes, and one that can't place anything, if there is one.

    What it does not do: know its agents at all, end a lost one, place another only where one is
    wanted, know why one has ended.
    """

    engine: Callable[[], Engine]
    hopeless: Callable[[], Engine] | None
    watches_agents: bool = True
    ends_agents: bool = True
    places_again: bool = True
    tells_causes: bool = True


class _StubProcess(ModuleProcess):
    """In the place of an `AgentProcess`."""

    def __init__(self, options: AgentOptions, threads: int) -> None:
        variables = {**options.invitation.environment(), "STUB_NAME": options.node}
        super().__init__("tests.clusters.stub_agent", None, environment=variables)


@contextlib.contextmanager
def _local(request: pytest.FixtureRequest) -> Iterator[Case]:
    options: Any = SimpleNamespace(devices=1, device_type="cpu")
    cluster = LocalCluster(nodes=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "AgentProcess", _StubProcess)
        patch.setattr(processes, "_GRACE_S", 0.0)  # a driver closes their channels before
        yield Case(
            engine=lambda: local.LocalEngine(cluster, options, cores=1, threads=1),
            hopeless=None,  # a process that can't be started is `ModuleProcess`' matter
            places_again=False,  # whoever ends is replaced, wanted or not
        )


class _JoinEngine(JoinEngine):
    """Beside which somebody starts agents; they end as the driver's end would have them do."""

    agents: tuple[subprocess.Popen[bytes], ...] = ()

    def open(self, invitation: Invitation, inbox: Inbox) -> None:
        super().open(invitation, inbox)
        environment = {**os.environ, **Invitation.read(self._file).environment()}
        self.agents = tuple(
            subprocess.Popen([*AGENT, "--name", node], env=environment) for node in NODES
        )

    def close(self) -> None:
        super().close()
        for agent in self.agents:
            agent.kill()
            agent.wait()


@contextlib.contextmanager
def _join(request: pytest.FixtureRequest) -> Iterator[Case]:
    folder = request.getfixturevalue("tmp_path_factory").mktemp("join")
    (folder / "no folder").touch()
    yield Case(
        engine=lambda: _JoinEngine(folder / "file"),
        hopeless=lambda: JoinEngine(folder / "no folder" / "file"),
        watches_agents=False,
    )


@contextlib.contextmanager
def _slurm(request: pytest.FixtureRequest) -> Iterator[Case]:
    with _idle_lab(request) as lab, pytest.MonkeyPatch.context() as patch:
        lab.run("salloc", "--no-shell", "--no-kill", "--nodes=3")
        (job,) = lab.queue()
        patch.setenv("SLURM_JOB_NODELIST", lab.run("squeue", "-h", "-o", "%N"))
        yield Case(
            engine=lambda: SlurmEngine(job, AGENT, notice_s=10.0),
            hopeless=lambda: SlurmEngine("4711", AGENT, notice_s=10.0),
            ends_agents=False,
            places_again=False,  # whoever ends is replaced, wanted or not
        )


@contextlib.contextmanager
def _harvest(request: pytest.FixtureRequest) -> Iterator[Case]:
    def engine(partition: str) -> Engine:
        cluster = HarvestCluster(partition=partition, max_nodes=3, logs=lab.folder)
        return HarvestEngine(cluster, AGENT, check_s=0.2)

    with _idle_lab(request) as lab, pytest.MonkeyPatch.context() as patch:
        patch.setattr(harvest, "_FIRST_PAUSE_S", 0.0)
        yield Case(
            engine=lambda: engine("low"),
            hopeless=lambda: engine("nowhere"),
            tells_causes=False,  # Slurm's queue only shows that a pilot has failed
        )


@contextlib.contextmanager
def _idle_lab(request: pytest.FixtureRequest) -> Iterator[SlurmLab]:
    lab: SlurmLab = request.getfixturevalue("slurm_lab")
    with on_path(lab):
        yield lab
        lab.restore()


_CASES = {
    "local": _local,
    "join": _join,
    "slurm": _slurm,
    "harvest": _harvest,
}


@pytest.fixture(scope="module", params=_CASES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with _CASES[request.param](request) as case:
        yield case


def _wait_until_ended(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            select.select([pidfd], [], [])
            os.close(pidfd)


def test_agents_are_placed_and_watched_and_ended(case: Case) -> None:
    live(case)


def live(case: Case) -> None:
    """The life of an engine."""
    case.engine().close()  # though it was never opened
    with Hub(case.engine()) as hub:
        hub.wait_for(lambda: len(hub.nodes()) == 3)
        _nobody_sees_the_token(hub)
        hub.engine.want(3)
        hub.engine.want(1)
        if case.watches_agents:
            _ends_are_told_once_and_why(case, hub)
        hub.engine.want(None)
        hub.wait_for(lambda: len(hub.nodes()) == 3)
        if case.watches_agents:
            _who_is_lost_is_ended_and_who_is_left_out_comes_no_more(case, hub)
        pids = [agent.told["pid"] for agent in hub.agents]
        hub.engine.close()
        _wait_until_ended(pids)
        hub.engine.close()
        with Hub(hub.engine) as again:
            again.wait_for(lambda: len(again.nodes()) == 3)


def _nobody_sees_the_token(hub: Hub) -> None:
    assert len(set(hub.nodes())) == 3
    token = hub.invitation.token.encode()
    assert all(agent.told["OPTUNA_FLEET_TOKEN"] == token.decode() for agent in hub.agents)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert token not in path.read_bytes()


def _await_expected(hub: Hub) -> None:
    while sorted(hub.engine.expected()) != hub.nodes():
        time.sleep(0.05)  # Slurm's queue shows it later


def _ends_are_told_once_and_why(case: Case, hub: Hub) -> None:
    """One is wanted, and two end: others are placed where that is not to be, or when it is."""
    _await_expected(hub)
    killed, failed, _ = hub.agents
    os.kill(killed.told["pid"], signal.SIGKILL)
    failed.end(3)
    hub.wait_for(lambda: {killed.node, failed.node} <= set(hub.gone()))
    assert sorted(hub.gone()) == sorted([killed.node, failed.node])
    causes = {departure.node: departure.cause for departure in hub.departures}
    assert not any(cause.endswith(".") for cause in causes.values())
    if case.tells_causes:
        assert "KILL" in causes[killed.node].upper()
        assert "exit code 3" in causes[failed.node]
    if case.places_again:
        hub.wait_for(lambda: len(hub.nodes()) == 1)
        hub.engine.want(2)
        hub.wait_for(lambda: len(hub.nodes()) == 2)


def _who_is_lost_is_ended_and_who_is_left_out_comes_no_more(case: Case, hub: Hub) -> None:
    _await_expected(hub)
    hub.departures.clear()
    lost, out, _ = hub.agents
    hub.engine.end("no such node")
    if case.ends_agents:
        hub.engine.end(lost.node)
        hub.wait_for(lambda: lost.node in hub.gone())
        _wait_until_ended([lost.told["pid"]])
    hub.engine.end(out.node, for_good=True)
    if case.ends_agents:
        hub.wait_for(lambda: out not in hub.agents)
    while out.node in hub.engine.expected():
        time.sleep(0.05)  # a thread sees to it


def test_one_that_can_place_nothing_says_what_to_do(case: Case) -> None:
    if case.hopeless is None:
        pytest.skip("it can always place something")
    with pytest.raises((LaunchError, FleetConfigError)) as error, Hub(case.hopeless()) as hub:
        hub.wait_for(lambda: False)
    assert len(str(error.value)) > 30


# -- no thread of theirs dies unheard -------------------------------------------------------------

INVITATION = Invitation(addresses=(("127.0.0.1", 1),), credentials=b"")


class Failing(PlacingEngine):
    """Whose scheduler answers what nobody has foreseen; notes that it ends its agents."""

    has_left = False

    def _act(self) -> float:
        raise KeyError("nothing")

    def _leave(self) -> None:
        self.has_left = True


def told_by(engine: Engine) -> str:
    """What the driver is told of an engine that can't go on."""
    with contextlib.closing(Inbox()) as inbox:
        engine.open(INVITATION, inbox)
        with pytest.raises(LaunchError) as told:
            list(iter(inbox.get, "never"))
    engine.close()
    return str(told.value)


def test_what_goes_wrong_as_a_scheduler_is_asked_is_told() -> None:
    engine = Failing("Nobody")
    assert told_by(engine) == "Nobody can't place agents any more: KeyError: 'nothing'"
    assert engine.has_left


def test_an_srun_that_can_not_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    engine = SlurmEngine("1", ("agent",), notice_s=1.0)
    for _ in range(2):
        assert "`srun` can't be started" in told_by(engine)
        assert not engine.expected()


def test_an_agent_that_can_not_be_started_again_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(options: Any, threads: int) -> ModuleProcess:
        if started:
            raise LaunchError("too many processes")
        started.append(ModuleProcess("tests.clusters.stub_agent", None, environment={}))
        return started[0]

    started: list[ModuleProcess] = []
    monkeypatch.setattr(local, "AgentProcess", process)
    options: Any = SimpleNamespace(devices=1, device_type="cpu")
    engine = local.LocalEngine(LocalCluster(), options, cores=1, threads=1)
    assert "too many processes" in told_by(engine)
