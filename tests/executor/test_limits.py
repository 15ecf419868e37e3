"""Runs that hang are run again; trials that break a limit fail, with a reason."""

from __future__ import annotations

import datetime
import functools
import io
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import torch.distributed as dist
from optuna.trial import TrialState
from torch.distributed import distributed_c10d

from optuna_fleet import (
    FleetExecutor,
    Limits,
    OutOfMemoryError,
    TrialError,
    TrialTimeoutError,
)
from optuna_fleet.events import Launch
from optuna_fleet.executor.call import driver
from optuna_fleet.executor.call.ranks import RunCalls
from optuna_fleet.executor.call.runs import RunRecord, TrialRecord
from optuna_fleet.executor.call.watchdog import Hung, Watchdog
from optuna_fleet.executor.cluster.agent.children import LOOK_EVERY_S, MemoryKills
from optuna_fleet.executor.fleet.runtime import Runtime
from optuna_fleet.sampler_bridge.records import flights_of
from optuna_fleet.trainer.heartbeat import phase_of
from optuna_fleet.wire.messages import (
    Heartbeat,
    Phase,
    Progress,
)
from optuna_fleet.wire.node_messages import StoreReady
from tests.fleets import fleet_of, small_model

COMPLETE, FAIL = TrialState.COMPLETE, TrialState.FAIL


def states(study: optuna.Study) -> list[TrialState]:
    return [trial.state for trial in study.trials]


def reason(trial: optuna.trial.FrozenTrial) -> str:
    return str(trial.system_attrs["optuna_fleet:reason"])


# -- judging, without processes -------------------------------------------------------------------


class World:
    """A watchdog with a clock that is turned by hand, and one run on two devices."""

    def __init__(self, **limits: Any) -> None:
        self.now = 0.0
        self.watchdog = Watchdog(Limits(**{"hang_s": None} | limits), clock=lambda: self.now)
        self.error: TrialError | None = None
        self.trial = TrialRecord()
        self.launch()

    def launch(self) -> None:
        launch = Launch(run_id=0, number=7, devices=(3, 5), probe=False, measure=False, round=1)
        calls = RunCalls(world_size=2, send=lambda *_: None)
        self.run = RunRecord(launch=launch, start=0.0, calls=calls, trial=self.trial)
        self.watchdog.launched(self.run)

    def heartbeat(self, rank: int, batches: int, *, calls: int = 0, **more: Any) -> None:
        told = {"is_waiting": False, "where": "in objective", "memory_bytes": 10} | more
        progress = Progress(num_batches=batches, num_calls=calls)
        sign = Heartbeat(run_id=0, rank=rank, progress=progress, **told)
        self.error = self.watchdog.hear(self.run, sign)

    def after(self, seconds: float) -> list[Hung]:
        """Lets time pass in steps, as the driver does; what is found ends it."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + self.watchdog.look_every_s)
            if found := self.watchdog.hung([self.run]):
                return found
        return []


def test_a_rank_without_a_sign_of_life_hangs() -> None:
    world = World(hang_s=8.0)
    for step in range(3):
        world.heartbeat(0, step)
        world.heartbeat(1, step)
        assert world.after(2.0) == []
    for step in range(3, 6):
        world.heartbeat(0, step)
        assert world.after(1.9) == []
    world.heartbeat(0, 7)
    (hung,) = world.after(8.0)
    assert "(rank 0: in objective, after 7 batches" in hung.words
    assert "; rank 1: in objective, after 2 batches, no sign of life for" in hung.words
    assert world.after(100.0) == []  # told once


def test_ranks_that_make_no_progress_hang() -> None:
    world = World(hang_s=8.0)
    world.heartbeat(0, 5)
    world.heartbeat(1, 5)
    for _ in range(3):
        assert world.after(2.0) == []
        world.heartbeat(0, 5)
        world.heartbeat(1, 5)
    world.heartbeat(1, 5, calls=1)  # a call is progress
    for _ in range(3):
        assert world.after(2.0) == []
        world.heartbeat(0, 5)
        world.heartbeat(1, 5, calls=1)
    assert world.after(2.0)


@pytest.mark.parametrize(
    ("phases", "is_rendezvous"),
    [
        ((Phase.JOINING, Phase.JOINING), True),
        ((Phase.COLLECTIVE, Phase.JOINING), False),
        ((Phase.COLLECTIVE, Phase.COLLECTIVE), False),
    ],
)
def test_ranks_that_wait_for_each_other_hang_before_their_first_batch_too(
    phases: tuple[Phase, Phase], is_rendezvous: bool
) -> None:
    world = World(hang_s=8.0)
    found = []
    for _ in range(10):
        for rank, phase in enumerate(phases):
            world.heartbeat(rank, 0, phase=phase)
        found += world.after(1.9)
    (hung,) = found
    assert hung.is_rendezvous == is_rendezvous


GROUPS = "/lib/optuna_fleet/trainer/groups.py"
C10D = "/lib/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("called", "phase"),
    [
        ([], Phase.OBJECTIVE),
        ([("/lib/torch/nn/modules/linear.py", "forward")], Phase.OBJECTIVE),
        (
            [(C10D, "barrier"), ("/lib/torch/distributed/c10d_logger.py", "wrapper")],
            Phase.COLLECTIVE,
        ),
        ([(C10D, "init_process_group"), (GROUPS, "join_group")], Phase.JOINING),
        ([(GROUPS, "_open_store"), (GROUPS, "join_group")], Phase.JOINING),
        ([(C10D, "<module>"), ("<frozen importlib._bootstrap>", "_load")], Phase.OBJECTIVE),
    ],
)
def test_what_a_rank_is_at_is_told_by_what_it_has_called(
    called: list[tuple[str, str]], phase: Phase
) -> None:
    assert phase_of(called) is phase


@pytest.mark.parametrize(
    "heartbeat",
    [
        pytest.param({"batches": 0}, id="no batch was asked for yet: imports, downloads"),
        pytest.param({"batches": 5, "is_waiting": True}, id="the driver owes an answer"),
        pytest.param({"batches": 0, "phase": Phase.JOINING}, id="it waits for the one at work"),
    ],
)
def test_what_is_no_hang(heartbeat: dict[str, Any]) -> None:
    world = World(hang_s=8.0)
    for _ in range(20):
        world.heartbeat(0, **heartbeat)
        world.heartbeat(1, 0)
        assert world.after(1.9) == []


def test_the_drivers_own_absence_is_no_hang() -> None:
    world = World(hang_s=8.0)
    world.heartbeat(0, 1)
    world.heartbeat(1, 1)
    world.now += 1000.0  # a sampler thought for long; signs of life wait in the sockets
    assert world.watchdog.hung([world.run]) == []
    assert world.after(8.0)


def test_time_on_devices_is_summed_over_the_runs_of_a_trial() -> None:
    world = World(trial_s=10.0)
    world.now += 6.0
    assert world.watchdog.error(world.run) is None
    world.watchdog.ended(world.run)
    world.now += 100.0  # it waits for devices
    world.launch()
    assert world.watchdog.left_s(world.run) == 4.0
    world.now += 3.9
    assert world.watchdog.error(world.run) is None
    world.now += 0.2
    error = world.watchdog.error(world.run)
    assert isinstance(error, TrialTimeoutError)
    assert "Trial 7 took more than trial_s=10 seconds" in str(error)


# -- with processes -------------------------------------------------------------------------------


def hang_once(trial: Any, *, folder: Path) -> float:
    """Train on two devices, of which one hangs the first time over."""
    model = trial.prepare(small_model(), min_devices=2)
    done = trial.state.setdefault("done", [])
    for epoch in trial.epochs(3):
        for images, labels in trial.batches("train", batch_size=4):
            torch.nn.functional.cross_entropy(model(images), labels).backward()
        if epoch == 1 and trial.rank == 1 and not (folder / "hung").exists():
            (folder / "hung").touch()
            threading.Event().wait()
        done.append(epoch)
    assert done == [0, 1, 2]
    return 1.0


def test_a_hung_rank_is_noticed_and_its_trial_run_again(tmp_path: Path, log: io.StringIO) -> None:
    study = optuna.create_study()
    with fleet_of(devices=2, limits=Limits(hang_s=3.0)) as executor:
        study.optimize(functools.partial(hang_once, folder=tmp_path), 1, executor=executor)
    assert states(study) == [COMPLETE]
    assert "it made no progress for 3 s (rank 0: in " in log.getvalue()
    assert "in hang_once" in log.getvalue()
    assert "lost" in [flight["ending"] for flight in flights_of(study)[0]]


def train_until_moved(trial: Any, *, folder: Path) -> float:
    if (folder / "begun").exists():
        return 1.0
    (folder / "begun").touch()
    model = trial.prepare(small_model())
    for _ in trial.epochs(10**6):
        for images, labels in trial.batches("train", batch_size=4):
            torch.nn.functional.cross_entropy(model(images), labels).backward()
    return 0.0


def test_a_stopped_store_is_noticed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: io.StringIO
) -> None:
    heard, stopped = Runtime.heard, []

    def stop_the_first(runtime: Runtime, event: Any) -> Any:
        if isinstance(event, StoreReady) and not stopped:
            stopped.append(event.process.pid)
            os.kill(event.process.pid, signal.SIGSTOP)
        return heard(runtime, event)

    monkeypatch.setattr(Runtime, "heard", stop_the_first)
    study = optuna.create_study()
    with fleet_of(devices=2, policy="equal-split", limits=Limits(hang_s=3.0)) as executor:
        objective = functools.partial(train_until_moved, folder=tmp_path)
        study.optimize(objective, n_trials=1, executor=executor)
    assert states(study) == [COMPLETE]
    assert stopped
    assert "rank 0: looks for the other ranks" in log.getvalue()
    words = "the store where ranks find each other is replaced (stopped by a signal)"
    assert words in log.getvalue()


def wait_for_a_silent_peer(trial: Any, *, folder: Path) -> float:
    model = trial.prepare(small_model(), min_devices=2)
    if (folder / "waited-0").exists():
        return 1.0
    for _ in trial.epochs(1):
        for images, labels in trial.batches("train", batch_size=4):
            torch.nn.functional.cross_entropy(model(images), labels).backward()
        (folder / f"waited-{trial.rank}").touch()
        group = dist.new_group()  # for which both are needed: only the barrier is in vain
        set_timeout: Any = getattr(
            distributed_c10d, "set_timeout", distributed_c10d._set_pg_timeout
        )
        set_timeout(datetime.timedelta(seconds=1), group)
        if trial.rank == 1:
            threading.Event().wait()
        dist.barrier(group)
    return 0.0


def test_a_trial_whose_collective_fails_for_want_of_a_peer_has_lost_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: io.StringIO
) -> None:
    monkeypatch.setattr(driver, "_ABORT_GRACE_S", 0.0)
    study = optuna.create_study()
    with fleet_of(devices=2) as executor:
        objective = functools.partial(wait_for_a_silent_peer, folder=tmp_path)
        study.optimize(objective, n_trials=1, executor=executor)
    assert states(study) == [COMPLETE]
    assert "lost its peers (RuntimeError: " in log.getvalue()
    assert "It is run again" in log.getvalue()


def forever(trial: Any) -> float:
    if trial.number == 0:
        threading.Event().wait()
    return 1.0


def test_a_trial_that_takes_too_long_fails_and_its_device_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "_ABORT_GRACE_S", 0.0)
    study = optuna.create_study()
    with FleetExecutor(devices=1, device_type="cpu", limits=Limits(trial_s=2.0)) as executor:
        study.optimize(forever, n_trials=2, catch=TimeoutError, executor=executor)
    assert states(study) == [FAIL, COMPLETE]
    assert reason(study.trials[0]).startswith(
        "TrialTimeoutError: Trial 0 took more than trial_s=2"
    )


def grow(trial: Any) -> float:
    if trial.number == 0:
        block = bytearray(700 << 20)
        block[::4096] = bytes(len(block[::4096])).replace(b"\0", b"\1")
        threading.Event().wait()
    return 1.0


def test_a_trial_that_takes_too_much_memory_fails() -> None:
    study = optuna.create_study()
    with FleetExecutor(
        devices=1, device_type="cpu", limits=Limits(trial_memory_bytes=500 << 20)
    ) as executor:
        study.optimize(grow, n_trials=2, catch=MemoryError, executor=executor)
    assert states(study) == [FAIL, COMPLETE]
    assert reason(study.trials[0]).startswith("OutOfMemoryError: Trial 0, rank 0, took ")


def out_of_memory(trial: Any) -> float:
    trial.set_user_attr("pid", os.getpid())
    if trial.number == 0:
        raise MemoryError("no room")
    if trial.number == 1:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return 1.0


def test_a_process_that_ran_out_of_memory_is_not_used_again() -> None:
    """Nor is it sent another trial meanwhile, which would lose its devices with it."""
    study = optuna.create_study()
    catch = (MemoryError, torch.OutOfMemoryError)
    with FleetExecutor(devices=1, device_type="cpu", limits=Limits(max_restarts=0)) as executor:
        study.optimize(out_of_memory, n_trials=4, catch=catch, executor=executor)
    assert states(study) == [FAIL, FAIL, COMPLETE, COMPLETE]
    pids = [trial.user_attrs["pid"] for trial in study.trials]
    assert len(set(pids)) == 3
    assert pids[2] == pids[3]
    assert reason(study.trials[0]) == "MemoryError: no room"
    told = reason(study.trials[1])
    assert told.startswith("OutOfMemoryError: CUDA out of memory. If the model is too large for a")
    assert "trial.pipeline() trains it in stages on several" in told


def test_a_memory_kill_explains_deaths_of_that_moment_only() -> None:
    """The kernel counts those of the whole machine, by whomever."""
    count, now = 7, 0.0
    kills = MemoryKills(lambda: count, lambda: now)
    assert not kills.take()
    count = 8
    now += LOOK_EVERY_S
    kills.look()
    assert kills.take()  # it died a little later
    assert not kills.take()
    count = 9
    for _ in range(2):
        now += LOOK_EVERY_S
        kills.look()
    assert not kills.take()  # that was somebody else


@pytest.fixture
def small_group(tmp_path: Path) -> Iterator[Path]:
    """A memory control group of 64 MiB, where this machine lets us make one."""
    kinds = {"memory": "memory.limit_in_bytes", ".": "memory.max"}  # versions 1 and 2
    for folder, limit in kinds.items():
        group = Path("/sys/fs/cgroup") / folder / f"fleet-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            (group / limit).write_text(str(64 << 20))
            yield group
            group.rmdir()
            return
        group.rmdir()
    pytest.skip("memory control groups can't be made here")


def eat(trial: Any, *, group: Path) -> float:
    if trial.number == 0:
        for pid in (os.getppid(), os.getpid()):  # the agent counts the kills of its own group
            (group / "cgroup.procs").write_text(str(pid))
        block = bytearray(200 << 20)
        block[::4096] = b"\1" * len(block[::4096])
    return 1.0


def test_a_trial_that_the_kernel_kills_for_want_of_memory_is_not_tried_again(
    small_group: Path,
) -> None:
    study = optuna.create_study()
    with FleetExecutor(devices=1, device_type="cpu") as executor:
        objective = functools.partial(eat, group=small_group)
        study.optimize(objective, n_trials=2, catch=OutOfMemoryError, executor=executor)
    assert states(study) == [FAIL, COMPLETE]
    assert "Trial 0 ran out of memory: the trainer of device 0" in reason(study.trials[0])
