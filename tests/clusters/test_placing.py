"""The threads of engines: what they must not lose, and when they must not wait."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optuna_fleet import LocalCluster, processes
from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster import local
from optuna_fleet.executor.cluster.engine import Engine, PlacingEngine
from optuna_fleet.executor.cluster.slurm import harvest as harvesting
from optuna_fleet.executor.cluster.slurm.cluster import SlurmEngine
from optuna_fleet.executor.cluster.slurm.commands import Job
from optuna_fleet.executor.cluster.slurm.harvest import HarvestCluster, HarvestEngine
from optuna_fleet.processes import ModuleProcess
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.invitation import Invitation

INVITATION = Invitation(addresses=(("127.0.0.1", 1),), credentials=b"")


class Noting(PlacingEngine):
    """Notes what it is to do."""

    def __init__(self, act: Callable[[], object] = lambda: None) -> None:
        super().__init__("Nobody")
        self.noted: list[str] = []
        self._when_it_acts = act

    def _prepare(self, invitation: Invitation) -> None:
        self.noted.append("prepare")

    def _act(self) -> float:
        self.noted.append("act")
        self._when_it_acts()
        return math.inf

    def _leave(self) -> None:
        self.noted.append("leave")

    def _is_stuck(self) -> None:
        self.noted.append("stuck")


def test_one_that_is_opened_again_waits_for_what_it_still_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, answers = threading.Event(), threading.Event()

    class Thread(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            if timeout is None:
                answers.set()
            super().join(timeout)

    def wait() -> None:
        looks.set()
        answers.wait()

    monkeypatch.setattr(threading, "Thread", Thread)
    engine = Noting(wait)
    engine.open(INVITATION, SimpleNamespace(put=lambda event: None))
    looks.wait()
    engine._end_limit_s = 0.0
    engine.close()
    monkeypatch.undo()
    try:
        engine.open(INVITATION, SimpleNamespace(put=lambda event: None))
        assert engine.noted[:5] == ["prepare", "act", "stuck", "leave", "prepare"]
    finally:
        answers.set()
        engine.close()


# -- no thread dies unheard ----------------------------------------------------------------------


def told_by(engine: Engine) -> str:
    """What the driver is told of an engine that can't go on."""
    with contextlib.closing(Inbox()) as inbox:
        engine.open(INVITATION, inbox)
        with pytest.raises(LaunchError) as told:
            list(iter(inbox.get, "never"))
    engine.close()
    return str(told.value)


def test_what_goes_wrong_as_a_scheduler_is_asked_is_told() -> None:
    engine = Noting(lambda: {}["nothing"])
    assert told_by(engine) == "Nobody can't place agents any more: KeyError: 'nothing'"
    assert engine.noted == ["prepare", "act", "leave"]


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


def test_an_agent_that_is_to_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(options: Any, threads: int) -> ModuleProcess:
        return ModuleProcess("tests.executor.stops_itself", None, environment={})

    monkeypatch.setattr(processes, "_GRACE_S", None)  # or it would be for ever
    monkeypatch.setattr(local, "AgentProcess", process)
    options: Any = SimpleNamespace(devices=1, device_type="cpu")
    engine = local.LocalEngine(LocalCluster(), options, cores=1, threads=1)
    with contextlib.closing(Inbox()) as inbox:
        engine.open(INVITATION, inbox)
        engine.end("local-0", for_good=True)
    engine.close()
    assert engine.expected() == ()


# -- pilots --------------------------------------------------------------------------------------


class Slurm:
    """Its commands, by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queues: list[list[Job]] = []
        self.commands: list[tuple[str, ...]] = []
        self.refuses = ""
        monkeypatch.setattr(harvesting, "ask_jobs", self._queue)
        monkeypatch.setattr(harvesting, "ask", self._ask)
        monkeypatch.setattr(HarvestEngine, "_run", lambda engine: None)  # the test is the thread

    def _queue(self, *options: str) -> list[Job]:
        if not self.queues:
            raise LaunchError("`squeue` failed: Unable to contact slurm controller")
        return self.queues.pop(0)

    def _ask(self, *command: str, **_: Any) -> None:
        if command[0] == self.refuses:
            raise LaunchError(f"`{command[0]}` failed: Unable to contact slurm controller")
        self.commands.append(command)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(monkeypatch)


@pytest.fixture
def harvest(slurm: Slurm, tmp_path: Path) -> Iterator[Any]:
    """It has submitted one pilot."""
    engine: Any = HarvestEngine(HarvestCluster(max_nodes=1, logs=tmp_path), ("agent",))
    engine.open(INVITATION, SimpleNamespace(put=lambda event: None))
    engine._act()
    yield engine
    engine.close()


PILOT = Job(number="7", state="RUNNING", nodes=("node1",))


def test_a_lost_node_is_given_back_once_as_soon_as_slurm_does_it(
    slurm: Slurm, harvest: Any
) -> None:
    slurm.queues.append([PILOT])
    harvest._act()
    harvest.end("node1")
    harvest._act()  # Slurm does not answer
    slurm.queues += [[PILOT]] * 3
    for refuses in ("scancel", "", ""):
        slurm.refuses = refuses
        harvest._act()
    assert [command for command in slurm.commands if command[0] == "scancel"] == [("scancel", "7")]


def test_pilots_that_slurm_does_not_cancel_in_the_end_are_told_of(
    slurm: Slurm, harvest: Any, caplog: pytest.LogCaptureFixture
) -> None:
    slurm.refuses = "scancel"
    harvest._leave()
    assert f"`scancel --name={harvest._job_name}` removes them" in caplog.text
