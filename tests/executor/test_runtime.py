"""The runtime's books when agents, stores and trainers die at bad moments; no process here."""

from __future__ import annotations

import errno
import io
import itertools
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import optuna
import pytest

from optuna_fleet import Checkpoints, FleetConfigError, FleetExecutor, LaunchError, SharedPipeline
from optuna_fleet.alloc import GreedyAllocator, IsolatedAllocator
from optuna_fleet.events import DeviceJoined, Ending, EpochDecision, Launch
from optuna_fleet.exceptions import OutOfMemoryError
from optuna_fleet.executor import agents
from optuna_fleet.executor import runtime as runtimes
from optuna_fleet.executor.calls import RunCalls
from optuna_fleet.executor.cluster import shares
from optuna_fleet.executor.deadlines import Deadlines
from optuna_fleet.executor.driver import Driver
from optuna_fleet.executor.launcher import Launcher
from optuna_fleet.executor.rendezvous import Rendezvous
from optuna_fleet.executor.runs import RunRecord
from optuna_fleet.executor.runtime import Runtime
from optuna_fleet.executor.startup import Startup
from optuna_fleet.executor.trainers import Trainers
from optuna_fleet.executor.watchdog import Limits
from optuna_fleet.pipeline.limits import NICENESS
from optuna_fleet.pipeline.spec import PipelineSetup
from optuna_fleet.processes import ModuleProcess
from optuna_fleet.resources import Device, Fleet
from optuna_fleet.settings import Settings
from optuna_fleet.trainer.main import trainer_main
from optuna_fleet.wire.messages import (
    AgentLost,
    AgentReady,
    Ended,
    KillTrainer,
    OpenStore,
    StoreLost,
    StoreReady,
    TrainerExited,
    TrainerReady,
    TrainerStarted,
)
from tests.leftovers import children

KILLED = -9


class FakeAgent:
    _pids = itertools.count(100)

    def __init__(self, config: Any) -> None:
        self.pid = next(self._pids)
        self.exit_code: int | None = None

    def is_alive(self) -> bool:
        return self.exit_code is None

    def close(self) -> None:
        pass

    def kill(self) -> None:
        pass


class FakeHub:
    """Says what it is told to say."""

    host, port, secret = "127.0.0.1", 1, b"secret"

    def __init__(self) -> None:
        self.agents: dict[int, Any] = {}
        self.trainers: dict[int, Any] = {}
        self.news: list[Any] = []
        self.sent: list[Any] = []

    def messages(self, *_: Any) -> Iterator[Any]:
        news, self.news = self.news, []
        yield from news

    def last_words(self, pid: int) -> Iterator[Any]:
        yield from ()

    def send(self, channel: Any, message: Any) -> None:
        if channel is not None:
            self.sent.append((channel, message))

    def close(self) -> None:
        pass


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Runtime]:
    monkeypatch.setattr(runtimes, "Connections", FakeHub)
    devices = tuple(Device(index=index, node=0, kind="cpu") for index in range(2))
    allocator = IsolatedAllocator(GreedyAllocator(), GreedyAllocator())
    made = Runtime(Fleet(devices=devices), None, allocator, tmp_path, FakeAgent, preload=False)
    yield made
    made.close()


def hear(runtime: Runtime, *news: Any) -> list[Any]:
    """What the runtime hands on."""
    connections: Any = runtime.connections
    connections.news = list(news)
    return list(runtime.messages(0.0))


def agent(runtime: Runtime) -> Any:
    return runtime._agent.process


def die(runtime: Runtime, exit_code: int) -> list[Any]:
    agent(runtime).exit_code = exit_code
    return hear(runtime)


def trainer_ready(runtime: Runtime, pid: int = 7) -> list[Any]:
    return runtime.device_events(TrainerReady(device=0, pid=pid, agent=agent(runtime).pid))


def trainer_exited(runtime: Runtime, pid: int = 7) -> list[Any]:
    return runtime.device_events(TrainerExited(device=0, pid=pid, cause="exit code 0"))


# -- agents --------------------------------------------------------------------------------------


def test_an_agent_that_is_killed_before_a_trainer_was_ready_is_replaced(runtime: Runtime) -> None:
    first = agent(runtime)
    assert [type(message) for message in die(runtime, KILLED)] == [AgentLost]
    assert agent(runtime) is not first
    die(runtime, KILLED)
    with pytest.raises(LaunchError, match=r"SIGKILL .* before any trainer was ready, 3 times in"):
        die(runtime, KILLED)


def test_agents_that_have_worked_may_be_killed_as_often_as_they_like(runtime: Runtime) -> None:
    for _ in range(5):
        trainer_ready(runtime)
        die(runtime, KILLED)
        die(runtime, KILLED)


def test_an_agent_that_ends_by_itself_is_not_tried_again(runtime: Runtime) -> None:
    with pytest.raises(LaunchError, match="exit code 1 before any trainer was ready"):
        die(runtime, 1)


@pytest.fixture
def clock(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time at which processes are found late, after 8 s; agents that are killed die."""
    now = [0.0]
    monkeypatch.setattr(agents, "Startup", lambda limit_s: Startup(8.0, lambda: now[0]))

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (agent(runtime).pid, -KILLED)
        agent(runtime).exit_code = KILLED

    monkeypatch.setattr(os, "kill", kill)
    runtime._agent.start()
    yield now
    monkeypatch.undo()


def wait(runtime: Runtime, now: list[float], seconds: float) -> list[Any]:
    """What the runtime hands on while time passes in steps, as where it waits for messages."""
    heard = []
    for _ in range(int(seconds)):
        now[0] += 1.0
        heard += hear(runtime)
    return heard


def test_an_agent_that_is_not_ready_in_time_is_replaced_and_then_given_up(
    runtime: Runtime, clock: list[float], log: io.StringIO
) -> None:
    hear(runtime, AgentReady(node=0, pid=agent(runtime).pid))  # and is stopped at its next step
    for _ in range(2):
        assert [type(message) for message in wait(runtime, clock, 9)] == [AgentLost]
    assert "agent process was not ready within 8 s" in log.getvalue()
    with pytest.raises(LaunchError, match=r"3 times in a row; .*not ready within 8 s"):
        wait(runtime, clock, 9)


def test_a_trainer_that_is_not_ready_in_time_is_killed(
    runtime: Runtime, clock: list[float], log: io.StringIO
) -> None:
    connections: Any = runtime.connections
    connections.agents[0] = "agent"
    trainer_ready(runtime, pid=7)
    for device, pid in enumerate((7, 8)):
        hear(runtime, TrainerStarted(device=device, pid=pid))
    assert wait(runtime, clock, 9) == []
    assert connections.sent == [("agent", KillTrainer(pid=8))]
    assert "The trainer of device 1 was not ready within 8 s" in log.getvalue()


def test_what_was_said_while_the_driver_was_away_counts(
    runtime: Runtime, clock: list[float]
) -> None:
    clock[0] += 1000.0
    assert hear(runtime) == []
    assert agent(runtime).is_alive()


def test_a_stopped_process_ends_with_the_one_that_started_it() -> None:
    script = (
        "import os, signal\n"
        "from optuna_fleet.processes import ModuleProcess\n"
        "started = ModuleProcess('tests.executor.stops_itself', None, environment={})\n"
        "os.waitid(os.P_PID, started.pid, os.WSTOPPED | os.WNOWAIT)\n"
        "print(started.pid, flush=True)\n"
        "os.read(0, 1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    stopped = os.pidfd_open(int(parent.stdout.readline()))
    with parent:
        parent.stdin.close()
    assert select.select([stopped], [], [])[0] == [stopped]  # it has ended
    os.close(stopped)


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


def test_a_process_may_be_closed_again() -> None:
    """As it is where an agent's end is an error: the executor is closed on the way."""
    process = ModuleProcess("json.tool", None, environment={})  # anything that ends by itself
    for end in (process.close, process.close, process.kill):
        end()
    assert process.exit_code == 1


# -- trainers that leave ------------------------------------------------------------------------


def last_of(device: int) -> Ended:
    return Ended(run_id=0, rank=0, device=device, time_s=0.0, ending=Ending.RETURNED, is_last=True)


@pytest.mark.parametrize("is_overtaken", [False, True])
def test_a_trainer_that_said_it_ends_has_a_successor(runtime: Runtime, is_overtaken: bool) -> None:
    trainer_ready(runtime, pid=7)
    assert runtime.rank_ended(last_of(0)) == []
    assert runtime.trainers.live == {}
    events = [trainer_exited, trainer_ready][:: -1 if is_overtaken else 1]
    pids = {trainer_exited: 7, trainer_ready: 8}
    seen = [event for act in events for event in act(runtime, pid=pids[act])]
    assert seen == [DeviceJoined(device=0)]
    assert runtime.trainers.live == {0: 8}


def test_a_successor_may_be_heard_of_before_the_last_word_of_the_one_before(
    runtime: Runtime,
) -> None:
    trainer_ready(runtime, pid=7)
    assert trainer_ready(runtime, pid=8) == []
    assert runtime.rank_ended(last_of(0)) == [DeviceJoined(device=0)]
    assert trainer_exited(runtime, pid=7) == []
    assert runtime.trainers.live == {0: 8}


# -- stores --------------------------------------------------------------------------------------


def store_of(owner: Any) -> StoreReady:
    return StoreReady(host="127.0.0.1", port=owner.pid, pid=1, agent=owner.pid)


def test_the_store_of_a_dead_agent_is_not_used(runtime: Runtime) -> None:
    trainer_ready(runtime)
    dead = agent(runtime)
    die(runtime, KILLED)
    hear(runtime, store_of(dead))  # it had said so before it died
    assert runtime.rendezvous.store is None
    hear(runtime, store_of(agent(runtime)), StoreLost(cause="signal SIGKILL", agent=dead.pid))
    assert runtime.rendezvous.store == store_of(agent(runtime))


def test_only_stores_that_never_were_ready_are_an_error(runtime: Runtime) -> None:
    lost = StoreLost(cause="signal SIGKILL", agent=agent(runtime).pid)
    for _ in range(4):
        hear(runtime, store_of(agent(runtime)), lost)
    hear(runtime, lost)
    with pytest.raises(LaunchError, match="3 times in a row before it was ready"):
        hear(runtime, lost)


def test_a_new_agent_is_asked_for_a_store_though_the_dead_one_was(runtime: Runtime) -> None:
    trainer_ready(runtime)
    connections: Any = runtime.connections
    connections.agents[0] = "dead"
    die(runtime, KILLED)
    runtime.rendezvous.open()  # the end of its channel was not heard of yet
    connections.agents[0] = "new"
    hear(runtime, AgentReady(node=0, pid=agent(runtime).pid))
    runtime.rendezvous.open()
    assert connections.sent == [("dead", OpenStore()), ("new", OpenStore())]


# -- clocks --------------------------------------------------------------------------------------


def test_checkpoints_are_due_though_the_clock_was_set_back(monkeypatch: Any) -> None:
    run = RunRecord(launch=launch(1, 0), start=0.0, calls=RunCalls(world_size=1))
    monkeypatch.setattr("time.time", lambda: -36_000.0)
    answers: list[EpochDecision] = []
    driver: Any = SimpleNamespace(
        _job=SimpleNamespace(options=SimpleNamespace(checkpoints=Checkpoints(interval_s=0))),
        _proposals=SimpleNamespace(keep_record=lambda: None),
        _calls=SimpleNamespace(answer_epoch=lambda run, decision: answers.append(decision)),
    )
    Driver._answer_epoch(driver, run, EpochDecision.GO)
    assert answers == [EpochDecision.CHECKPOINT]


# -- runs that lose ranks ------------------------------------------------------------------------


def died(device: int, *, out_of_memory: bool = False) -> TrainerExited:
    return TrainerExited(
        device=device, pid=device, cause="signal SIGKILL", out_of_memory=out_of_memory
    )


def run_on(*devices: int) -> RunRecord:
    calls = RunCalls(world_size=len(devices))
    return RunRecord(launch=launch(1, *devices), start=0.0, calls=calls)


def test_the_first_death_is_the_cause_of_the_others() -> None:
    run = run_on(0, 1)
    assert run.lose_rank(died(0), is_killed=False) is None
    assert run.lose_rank(died(1), is_killed=True) is None
    assert run.cause == "the trainer of device 0 died: signal SIGKILL"
    assert run.remaining() == []


@pytest.mark.parametrize(("is_killed", "kind"), [(False, OutOfMemoryError), (True, type(None))])
def test_a_trial_fails_that_runs_out_of_memory_but_not_one_that_we_kill(
    is_killed: bool, kind: type
) -> None:
    run = run_on(0)
    assert type(run.lose_rank(died(0, out_of_memory=True), is_killed=is_killed)) is kind


def test_the_death_of_a_devices_next_trainer_is_no_news_to_the_run_before() -> None:
    """That may still be ending on its other devices, while this one is free."""
    before = run_on(0, 1)
    before.lose_rank(died(0), is_killed=False)
    driver: Any = SimpleNamespace(
        _runtime=SimpleNamespace(trainers=Trainers(), device_events=lambda message: []),
        _launcher=SimpleNamespace(trainer_died=lambda device: None),
        _deadlines=Deadlines(),
        _runs={1: before},
        _fail_run=pytest.fail,
    )
    driver._runtime.trainers.ready(0, 0)
    Driver._trainer_changed(driver, died(0, out_of_memory=True))
    assert before.remaining() == [1]


# -- runs that wait for a store ------------------------------------------------------------------


class FakeRuntime:
    """Has a store when it is told to; notes who is sent to which device."""

    widest = 1
    fleet = Fleet(devices=tuple(Device(index=i, node=0, kind="cpu") for i in range(4)))

    def __init__(self) -> None:
        self.rendezvous = Rendezvous(lambda: None)
        self.sent: list[tuple[int, int]] = []
        self.orders: list[Any] = []

    def group_name(self, run_id: int) -> str:
        return str(run_id)

    def send(self, device: int, order: Any) -> None:
        self.sent.append((device, order.number))
        self.orders.append(order)


def launch(number: int, *devices: int) -> Launch:
    return Launch(
        run_id=number, number=number, devices=devices, probe=False, measure=False, round=1
    )


def launcher_of(runtime: Any, folder: Any) -> Launcher:
    job: Any = SimpleNamespace(
        options=SimpleNamespace(seed=0, limits=Limits()),
        objective_id=0,
        objective=b"",
        settings=Settings(),
        gc_after_trial=False,
        maximize=False,
    )
    retention: Any = SimpleNamespace(folder=folder, keeps_any=False)
    return Launcher(runtime, job, retention, adopted=())


def test_where_a_trial_goes_on_is_said_by_its_launch_not_by_the_disk(tmp_path: Path) -> None:
    runtime, folder = FakeRuntime(), runtimes.StudyFolder(tmp_path, "study")
    launcher = launcher_of(runtime, folder)
    launcher.launch(launch(1, 0), trial_id=1, parameters={})
    folder.path.mkdir()
    folder.checkpoint(1).touch()
    for checkpoint in (None, "there"):
        begun = replace(launch(1, 0), checkpoint=checkpoint)
        launcher.launch(begun, trial_id=1, parameters={})
        assert runtime.orders[-1].checkpoint == checkpoint


def test_a_run_whose_trainer_died_before_there_was_a_store_never_begins(tmp_path: Path) -> None:
    """Its successor would be busy with a run that nobody knows any more."""
    runtime: Any = FakeRuntime()
    launcher = launcher_of(runtime, runtimes.StudyFolder(tmp_path, "study"))
    launcher.launch(launch(1, 0, 1), trial_id=1, parameters={})
    launcher.launch(launch(2, 2, 3), trial_id=2, parameters={})
    launcher.trainer_died(1)
    runtime.rendezvous.ready(StoreReady(host="127.0.0.1", port=1, pid=1, agent=1))
    launcher.send_waiting()
    assert runtime.sent == [(2, 2), (3, 2)]


def test_an_agent_that_is_still_starting_is_not_waited_for(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []
    monkeypatch.setattr(FakeAgent, "kill", lambda agent: ends.append("killed"))
    monkeypatch.setattr(FakeAgent, "close", lambda agent: ends.append("waited for"))
    runtime.close()
    runtime.connections.agents[0] = runtime.connections  # type: ignore[assignment]
    runtime.close()
    assert ends == ["killed", "waited for"]


def test_a_trainer_that_comes_too_late_ends_without_a_word() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    mine, theirs = socket.socketpair()
    with mine, theirs:
        device = Device(index=0, node=0, kind="cpu")
        trainer_main(
            device,
            host="127.0.0.1",
            port=port,
            secret=b"",
            data=theirs,
            spec=None,
            num_threads=1,
        )


# -- the pipeline ---------------------------------------------------------------------------------


def halve(sample: Any) -> Any:
    return sample / 2


def pipeline_of(runtime: Runtime, **more: Any) -> PipelineSetup:
    pipeline = SharedPipeline(train=[1.0], finish=halve, **more)
    return shares.pipeline_setup(pipeline, runtime.fleet)


def test_beside_trials_on_cpus_preprocessors_come_last_and_do_everything(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "cpu_count", lambda: 12)
    setup = pipeline_of(runtime)
    assert (setup.is_adaptive, setup.niceness, setup.num_preprocessors) == (True, NICENESS, 6)
    assert setup.spec.dataset("train").finish is None


def test_beside_gpus_preprocessors_have_all_other_cores_and_trainers_finish(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "cpu_count", lambda: 12)
    gpus = [Device(index=i, node=0, kind="H100", visible=str(i)) for i in range(2)]
    runtime.fleet = Fleet(devices=tuple(gpus))
    setup = pipeline_of(runtime)
    assert (setup.is_adaptive, setup.niceness, setup.num_preprocessors) == (True, 0, 10)
    assert setup.spec.dataset("train").finish is not None


def test_a_number_of_preprocessors_that_was_given_is_kept(runtime: Runtime) -> None:
    setup = pipeline_of(runtime, num_preprocessors=3)
    assert (setup.is_adaptive, setup.num_preprocessors) == (False, 3)


def test_a_machine_without_a_temporary_folder_is_told_of(monkeypatch: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    with (
        FleetExecutor(devices=1, device_type="cpu") as fleet,
        pytest.raises(FleetConfigError, match=r"set the environment variable TMPDIR.*checkpoint"),
    ):
        optuna.create_study().optimize(lambda trial: 0.0, n_trials=1, executor=fleet)
