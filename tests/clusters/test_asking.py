"""The threads of engines: what they must not lose, and when they must not wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optuna_fleet import LocalCluster
from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster import asking, local
from optuna_fleet.executor.cluster.asking import AsksScheduler
from optuna_fleet.executor.cluster.engine import Engine
from optuna_fleet.executor.cluster.slurm import harvesting
from optuna_fleet.executor.cluster.slurm.cluster import SlurmEngine
from optuna_fleet.executor.cluster.slurm.commands import Job
from optuna_fleet.executor.cluster.slurm.harvesting import HarvestEngine, PilotJob
from optuna_fleet.executor.cluster.slurm.pilots import PilotLimits
from optuna_fleet.processes import ModuleProcess
from optuna_fleet.wire.invitation import Invitation

INVITATION = Invitation(addresses=(("127.0.0.1", 1),), credentials=b"")


class Noting(AsksScheduler):
    """Notes what it is to do."""

    def __init__(self, look: Callable[[], object] = lambda: None) -> None:
        super().__init__("Nobody", every_s=1e6)
        self.noted: list[str] = []
        self._when_it_looks = look

    def _prepare(self) -> None:
        self.noted.append("prepare")

    def _look(self) -> None:
        self.noted.append("look")
        self._when_it_looks()

    def _leave(self) -> None:
        self.noted.append("leave")

    def _is_stuck(self) -> None:
        self.noted.append("stuck")


def test_nobody_waits_for_the_next_look_of_one_that_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Closing(threading.Event):
        """That of waking up: it is closed just before it is cleared for the next look."""

        def clear(self) -> None:
            engine._closed.set()
            super().clear()

        def wait(self, timeout: float | None = None) -> bool:
            engine.noted.append("wait")
            return True

    engine = Noting()
    monkeypatch.setattr(engine, "_prepare", lambda: setattr(engine, "_woken", Closing()))
    engine.open(INVITATION, queue.SimpleQueue())
    assert engine._thread is not None
    engine._thread.join()
    engine.close()
    assert engine.noted == ["look", "leave"]


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
    engine.open(INVITATION, queue.SimpleQueue())
    looks.wait()
    monkeypatch.setattr(asking, "_END_LIMIT_S", 0.0)
    engine.close()
    monkeypatch.undo()
    try:
        engine.open(INVITATION, queue.SimpleQueue())
        assert engine.noted[:5] == ["prepare", "look", "stuck", "leave", "prepare"]
    finally:
        answers.set()
        engine.close()


# -- no thread dies unheard ----------------------------------------------------------------------


def told_by(engine: Engine) -> str:
    """What the driver is told of an engine that can't go on."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine.open(INVITATION, inbox)
    while not isinstance(told := inbox.get(), LaunchError):
        pass
    engine.close()
    return str(told)


def test_what_goes_wrong_as_a_scheduler_is_asked_is_told() -> None:
    engine = Noting(lambda: {}["nothing"])
    assert told_by(engine) == "Nobody can't place agents any more: KeyError: 'nothing'"
    assert engine.noted == ["prepare", "look", "leave"]


def test_an_srun_that_can_not_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    engine = SlurmEngine("1", ("agent",), notice_s=1.0)
    for _ in range(2):
        assert "`srun` can't be started" in told_by(engine)
        assert engine.expected() == []


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
    job = PilotJob(agent=("agent",), options=(), logs=tmp_path)
    engine: Any = HarvestEngine(PilotLimits(most=1, renewal_s=0.0), job)
    engine.open(INVITATION, queue.SimpleQueue())
    engine._look()
    yield engine
    engine.close()


PILOT = Job(number="7", state="RUNNING", nodes=("node1",))


def test_a_node_that_is_lost_while_slurm_does_not_answer_is_given_back_later(
    slurm: Slurm, harvest: Any
) -> None:
    slurm.queues.append([PILOT])
    harvest._look()
    harvest.end("node1")
    harvest._look()
    assert ("scancel", "7") not in slurm.commands
    for _ in range(2):  # the first of them is in case that it ends by itself
        slurm.queues.append([PILOT])
        harvest._look()
    assert ("scancel", "7") in slurm.commands


def test_a_pilot_that_slurm_did_not_cancel_is_cancelled_later_and_once(
    slurm: Slurm, harvest: Any
) -> None:
    slurm.queues += [[PILOT]] * 5
    harvest._look()
    harvest.end("node1")
    for refuses in ("", "scancel", "", ""):
        slurm.refuses = refuses
        harvest._look()
    assert [command for command in slurm.commands if command[0] == "scancel"] == [("scancel", "7")]


def test_a_pilot_that_has_taken_the_node_of_a_lost_one_is_not_cancelled(
    slurm: Slurm, harvest: Any
) -> None:
    slurm.queues.append([PILOT])
    harvest._look()
    harvest.end("node1")
    for _ in range(3):
        slurm.queues.append([Job(number="8", state="RUNNING", nodes=("node1",))])
        harvest._look()
    assert "scancel" not in [command[0] for command in slurm.commands]


def test_pilots_that_slurm_does_not_cancel_in_the_end_are_told_of(
    slurm: Slurm, harvest: Any, caplog: pytest.LogCaptureFixture
) -> None:
    slurm.refuses = "scancel"
    harvest._leave()
    assert f"`scancel --name={harvest._job_name}` removes them" in caplog.text
