"""The runtime's books when agents, stores and trainers die at bad moments; no process here."""

from __future__ import annotations

import errno
import io
import itertools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
import pytest

from optuna_fleet import FleetConfigError, FleetExecutor, LaunchError, Limits, SharedPipeline
from optuna_fleet.alloc import GreedyAllocator, IsolatedAllocator
from optuna_fleet.executor.cluster.config import (
    NodeSetups,
    machine,
    pipeline_setup,
    versions,
)
from optuna_fleet.executor.cluster.engine import Departure
from optuna_fleet.executor.fleet import runtime as runtimes
from optuna_fleet.executor.fleet.connections import AgentUnheard
from optuna_fleet.executor.fleet.runtime import Runtime
from optuna_fleet.pipeline.limits import NICENESS
from optuna_fleet.pipeline.pipeline_messages import PipelineStats
from optuna_fleet.processes import ModuleProcess, cause_of_death
from optuna_fleet.resources import Device
from optuna_fleet.wire.messages import TrainerReady
from optuna_fleet.wire.node_messages import (
    AgentJoining,
    KillTrainer,
    NodeLost,
    PipelineReport,
    ProcessId,
    StoreLost,
    StoreReady,
    TrainerExited,
    TrainerStarted,
)
from tests.leftovers import children

KILLED = -9
numbers = itertools.count()


class FakeEngine:
    """Has one node, whose agent ends when it is told to; others may be expected."""

    host, port = "127.0.0.1", 0
    has_leases = more_may_join = False

    def __init__(self) -> None:
        self.nodes = ["here"]
        self.done: list[str] = []

    def open(self, invitation: Any, inbox: Any) -> None:
        self.done.append("open")
        self.inbox = inbox

    def expected(self) -> list[str]:
        return self.nodes

    def want(self, nodes: int | None) -> None:
        self.done.append(f"want {nodes}")

    def end(self, node: str, *, for_good: bool = False) -> None:
        self.done.append(f"end {node}" + " for good" * for_good)
        if for_good:
            self.nodes.remove(node)
        else:
            self.die(KILLED)

    def die(self, exit_code: int) -> None:
        cause = f"its agent ended with {cause_of_death(exit_code)}"
        gone = Departure(node="here", cause=cause, exit_code=exit_code, is_replaced=True)
        self.inbox.put(gone)

    def close(self) -> None:
        self.done.append("close")


class FakeInbox:
    """Has what was put, and a clock that the test sets."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.times: list[tuple[float, Any]] = []
        self.now = 0.0

    def put(self, event: Any) -> None:
        self.events.append(event)

    def later(self, seconds: float, event: Any) -> None:
        self.times.append((self.now + seconds, event))

    def call_later(self, seconds: float, function: Any, *arguments: Any) -> None:
        function(*arguments)

    def take_all(self) -> Iterator[Any]:
        due = sorted((one for one in self.times if one[0] <= self.now), key=lambda one: one[0])
        self.times = [one for one in self.times if one[0] > self.now]
        self.events += [event for _, event in due]
        while self.events:
            yield self.events.pop(0)


class FakeHub:
    """Says what it is told to say."""

    host, port, secret, invitation = "127.0.0.1", 1, b"secret", None

    def __init__(self, *_: Any) -> None:
        self.agents: dict[str, Any] = {}
        self.trainers: dict[ProcessId, Any] = {}
        self.sent: list[Any] = []
        self.inbox = FakeInbox()

    def send(self, channel: Any, message: Any) -> None:
        if channel is not None:
            self.sent.append((channel, message))

    def has_ended(self, agent: str) -> bool:
        return agent not in self.agents

    def cut(self, agent: str) -> None:
        self.inbox.later(0.5, AgentUnheard(agent=agent, cause="its connection ended"))

    def give_up(self, agent: str, *events: Any) -> None:
        self.agents.pop(agent, None)
        self.inbox.events += events

    def keep_leases(self, lease_s: float) -> None:
        self.lease_s = lease_s

    def close(self) -> None:
        pass


def new_runtime(engine: Any, folder: Path | None, *, has_leases: bool = False) -> Runtime:
    engine.has_leases = has_leases
    allocator = IsolatedAllocator(GreedyAllocator(), GreedyAllocator())
    return Runtime(engine, allocator, folder, Limits(), NodeSetups())


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def runtime(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: FakeEngine
) -> Iterator[Runtime]:
    monkeypatch.setattr(runtimes, "Connections", FakeHub)
    made = new_runtime(engine, tmp_path)
    join(made, "1st")
    yield made
    made.close()


def joining(agent: str, **more: Any) -> AgentJoining:
    known: dict[str, Any] = {
        "node": "here",
        "devices": tuple(Device(index=index, node=0, kind="cpu") for index in range(2)),
        "cores": 2,
        "machine": machine(),
        "pid": 100,
        "versions": versions(),
    }
    return AgentJoining(agent=agent, **(known | more))


def join(runtime: Runtime, agent: str, **more: Any) -> None:
    connections: Any = runtime.connections
    connections.agents[agent] = agent
    hear(runtime, joining(agent, **more))


def hear(runtime: Runtime, *news: Any) -> list[Any]:
    """What the runtime hands on."""
    inbox: Any = runtime.inbox
    inbox.events += news
    return [told for event in inbox.take_all() for told in runtime.heard(event)]


def agent(runtime: Runtime) -> str:
    return next(iter(runtime.nodes)).agent


def die(runtime: Runtime, exit_code: int) -> list[Any]:
    """The agent dies, another one is started and joins."""
    engine: Any = runtime.agents._engine
    engine.die(exit_code)
    heard = hear(runtime)
    join(runtime, f"agent {next(numbers)}")
    return heard


def process(runtime: Runtime, pid: int) -> ProcessId:
    return ProcessId(agent(runtime), pid)


def trainer_ready(runtime: Runtime, pid: int = 7) -> list[Any]:
    return runtime.device_events(TrainerReady(device=0, process=process(runtime, pid)))


# -- agents --------------------------------------------------------------------------------------


def test_an_agent_that_has_died_before_it_was_heard_does_not_join(
    runtime: Runtime, engine: FakeEngine
) -> None:
    """Its successor, which the engine may have started, would be taken for it, and be killed."""
    engine.die(KILLED)
    hear(runtime)
    hear(runtime, joining("2nd"))  # it is not connected any more
    assert list(runtime.nodes) == []
    join(runtime, "3rd")
    assert agent(runtime) == "3rd"
    assert "end here" not in engine.done


def test_a_node_where_no_agent_works_costs_that_node_only(
    runtime: Runtime, engine: FakeEngine, log: io.StringIO
) -> None:
    join(runtime, "other", node="there")
    engine.die(1)
    (lost,) = hear(runtime)
    assert not lost.is_replaced
    assert "Node here is left out from now on: its agent ended with exit code 1 before any" in (
        log.getvalue()
    )
    assert runtime.faults.reasons.keys() == {"node here"}
    join(runtime, "2nd")  # it was on its way
    hear(runtime)
    assert [node.name for node in runtime.nodes] == ["there"]

    def no_trainer_starts(device: int) -> None:
        for pid in range(3):
            gone = TrainerExited(device=device, process=process(runtime, pid), cause="so")
            runtime.device_events(gone)

    no_trainer_starts(2)
    with pytest.raises(LaunchError, match="device 3 ended 3 times"):
        no_trainer_starts(3)


def test_a_node_that_is_left_out_gets_no_other_agent(runtime: Runtime, engine: FakeEngine) -> None:
    trainer_ready(runtime)
    runtime.trainers.leave_out_node("here", "it loses all trials")
    engine.die(KILLED)
    (lost,) = hear(runtime)
    assert not lost.is_replaced
    assert engine.done[-1] == "end here for good"
    join(runtime, "2nd")  # it was on its way
    connections: Any = runtime.connections
    assert "left out: it loses all trials" in connections.sent[-1][1].problem
    assert list(runtime.nodes) == []


@pytest.fixture
def impatient(runtime: Runtime) -> Runtime:
    """One in which processes are late after 8 s."""
    runtime.agents.start_s = 8.0
    runtime.agents._await("here")
    return runtime


def wait(runtime: Runtime, seconds: int) -> list[Any]:
    """What the runtime hands on while time passes."""
    inbox, heard = runtime.inbox, []
    for _ in range(seconds):
        inbox.now += 1.0  # type: ignore[attr-defined]
        heard += hear(runtime)
    return heard


def test_an_agent_that_is_not_ready_in_time_is_replaced_and_then_given_up(
    impatient: Runtime, engine: FakeEngine, log: io.StringIO
) -> None:
    runtime = impatient
    heard = [type(message) for message in wait(runtime, 10)]
    assert heard == [NodeLost]
    assert "The agent of node here was not ready within 8 s" in log.getvalue()
    wait(runtime, 10)  # the next does not even join
    with pytest.raises(LaunchError, match=r"3 times in a row; .*not ready within 8 s"):
        wait(runtime, 10)
    assert engine.done.count("end here") == 3


def test_a_trainer_that_is_not_ready_in_time_is_killed(
    impatient: Runtime, log: io.StringIO
) -> None:
    runtime = impatient
    connections: Any = runtime.connections
    connections.sent.clear()
    trainer_ready(runtime, pid=7)
    for device, pid in enumerate((7, 8)):
        hear(runtime, TrainerStarted(device=device, process=process(runtime, pid)))
    assert wait(runtime, 9) == []
    assert connections.sent == [("1st", KillTrainer(device=1, pid=8))]
    assert "The trainer of device 1 was not ready within 8 s" in log.getvalue()


# -- nodes ---------------------------------------------------------------------------------------


def test_what_a_lost_node_has_preprocessed_counts_but_not_what_it_had_in_memory(
    runtime: Runtime,
) -> None:
    stats = PipelineStats(preprocessed=3, resident_bytes=5, peak_bytes=7)
    for name in ("1st", "2nd"):
        if name != "1st":
            die(runtime, KILLED)
            join(runtime, name)
        trainer_ready(runtime)
        hear(runtime, PipelineReport(stats=stats, agent=agent(runtime)))
    assert runtime.reports.total.preprocessed == 6
    assert runtime.reports.total.resident_bytes == 5
    assert runtime.reports.total.peak_bytes == 7  # of a node, not of what there was never at once
    assert len(runtime.reports.last) == 1


@pytest.mark.parametrize(
    ("unlike", "words"),
    [
        ({"versions": {**versions(), "torch": "1.0"}}, "torch 1.0 (here"),
        ({}, "Another node named here asks to join"),
    ],
)
def test_a_node_that_does_not_fit_is_told_why(
    runtime: Runtime, log: io.StringIO, unlike: Any, words: str
) -> None:
    join(runtime, "2nd", **unlike)
    connections: Any = runtime.connections
    (told,) = [message for to, message in connections.sent if to == "2nd"]
    assert words in told.problem
    assert words in log.getvalue()
    assert "2nd" not in connections.agents
    assert agent(runtime) == "1st"


@pytest.mark.parametrize("place", [(subprocess, "Popen"), (os, "pidfd_open")])
def test_a_process_that_can_not_be_started_says_what_to_do_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, place: Any
) -> None:
    refuse = mock.Mock(side_effect=BlockingIOError(errno.EAGAIN, "Resource unavailable"))
    before = children()
    with monkeypatch.context() as patch:
        patch.setattr(*place, refuse)
        with pytest.raises(LaunchError, match=r"Resource unavailable.*ulimit -n.*ulimit -u"):
            ModuleProcess("json.tool", None, environment={})
    assert children() == before


# -- stores --------------------------------------------------------------------------------------


def store_of(agent: str) -> StoreReady:
    return StoreReady(host="127.0.0.1", port=1, process=ProcessId(agent, 1))


def test_only_stores_that_never_were_ready_are_an_error(runtime: Runtime) -> None:
    lost = StoreLost(cause="signal SIGKILL", agent=agent(runtime))

    def try_again(*news: Any) -> None:
        runtime.rendezvous.open()
        hear(runtime, *news, lost)

    for _ in range(4):
        try_again(store_of(agent(runtime)))
    try_again()
    with pytest.raises(LaunchError, match="3 times in a row before it was ready"):
        try_again()


def test_no_temporary_folder_stays_if_no_agent_can_be_placed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: FakeEngine
) -> None:
    refuse = mock.Mock(side_effect=LaunchError("no more processes"))
    monkeypatch.setattr(engine, "open", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(LaunchError, match="no more processes"):
        new_runtime(engine, None)
    assert not list(tmp_path.iterdir())


# -- the pipeline ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "more", "is_adaptive", "niceness", "number", "trainers_finish"),
    [
        ("cpu", {}, True, NICENESS, 6, False),
        ("H100", {}, True, 0, 10, True),  # and preprocessors have all other cores
        ("cpu", {"num_preprocessors": 3}, False, NICENESS, 3, False),
    ],
)
def test_preprocessors_beside_two_devices_on_12_cores(
    kind: str, more: Any, is_adaptive: bool, niceness: int, number: int, trainers_finish: bool
) -> None:
    pipeline = SharedPipeline(train=[1.0], finish=abs, **more)
    visible = "" if kind == "cpu" else "0"
    devices = [Device(index=index, node=0, kind=kind, visible=visible) for index in range(2)]
    setup = pipeline_setup(pipeline.packed(), devices, cores=12)
    assert (setup.is_adaptive, setup.niceness) == (is_adaptive, niceness)
    assert setup.num_preprocessors == number
    assert (setup.spec.dataset("train").finish is not None) == trainers_finish


def test_a_machine_without_a_temporary_folder_is_told_of(monkeypatch: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    with (
        FleetExecutor(devices=1, device_type="cpu") as fleet,
        pytest.raises(FleetConfigError, match=r"set the environment variable TMPDIR.*checkpoint"),
    ):
        optuna.create_study().optimize(lambda trial: 0.0, n_trials=1, executor=fleet)
