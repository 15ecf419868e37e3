"""Few processes, threads and open files: tried again later, or a clear error."""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from optuna_fleet import LaunchError
from optuna_fleet.checkpoints.store import mark
from optuna_fleet.events import Ending
from optuna_fleet.executor.cluster.agent import agent
from optuna_fleet.executor.cluster.agent.children import Kept
from optuna_fleet.processes import Forks
from optuna_fleet.resources import Device
from optuna_fleet.trainer import checkpoint
from optuna_fleet.trainer.checkpoint import Captured
from optuna_fleet.trainer.main import Trainer
from optuna_fleet.trainer.saving import Saver
from optuna_fleet.trainer.session import Session
from optuna_fleet.wire.messages import RunTrial
from optuna_fleet.wire.node_messages import OpenStore, Quit
from tests.executor.orders import run_trial
from tests.leftovers import children


class Clock:
    """Turned by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(clock: Clock, monkeypatch: pytest.MonkeyPatch, *fails: Exception | None) -> Kept:
    """What can't be started so often, then can."""
    monkeypatch.setattr(time, "monotonic", clock)
    spawn = mock.Mock(side_effect=[error or (7, mock.Mock()) for error in [*fails, *[None] * 20]])
    return Kept(spawn, started=lambda sock: None)


def test_a_process_that_keeps_ending_is_not_started_again_and_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    process = kept(clock, monkeypatch)
    process.start()
    for lives_s, pause_s in ((10.0, 0.0), (0.25, 0.75)):
        clock.now += lives_s
        process.pid = None
        process.start_again()
        assert (process.pid is None) == bool(pause_s)
        clock.now += pause_s
        process.start_due()
        assert process.pid == 7
    process.pid = None
    process.start_again(was_meant=True)
    assert process.pid == 7


def test_a_store_that_can_not_be_started_is_started_later_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = mock.Mock()
    ours, theirs = socket.socketpair()
    no_more = OSError(errno.EAGAIN, "no more")
    spawn = mock.Mock(side_effect=[no_more, no_more, (7, ours)])
    monkeypatch.setattr(Forks, "spawn", lambda self, main: spawn())
    setup = mock.Mock(stuck_s=None, silence_s=None)
    node = agent.Agent(channel, mock.Mock(), "agent", "127.0.0.1", setup)
    monkeypatch.setattr(time, "monotonic", clock := Clock())
    for _ in range(2):  # the driver insists
        node._act(OpenStore())
    node._look_after()
    assert spawn.call_count == 2
    for _ in range(2):
        clock.now += 1.0 + node._patience_s()
        node._look_after()
    assert spawn.call_count == 3
    assert "can't be started, and is tried again" in channel.send.call_args.args[0]
    for sock in (ours, theirs):
        sock.close()
    node._selector.close()


def test_an_agent_counts_no_silence_while_it_is_suspended_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(agent.time, "monotonic", clock)
    setup = mock.Mock(stuck_s=None, silence_s=6.0)
    node = agent.Agent(mock.Mock(), mock.Mock(), "agent", "127.0.0.1", setup)
    clock.now = 1000.0  # its job was, and the driver with it
    for _ in range(5):
        node._look_after()
        clock.now += 1.0
    with pytest.raises(TimeoutError):
        node._look_after()
    node._selector.close()


@pytest.mark.parametrize("name", ["fork", "pidfd_open"])
def test_what_can_not_be_forked_leaves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    selector = selectors.DefaultSelector()
    forks = Forks(selector, on_exit=lambda pid, code: None, in_child=lambda: None)
    before = set(os.listdir("/proc/self/fd")), children()
    with monkeypatch.context() as patch:
        patch.setattr(os, name, mock.Mock(side_effect=OSError(errno.EAGAIN, "no more")))
        with pytest.raises(OSError, match="no more"):
            forks.spawn(lambda sock: signal.pause())
    assert (set(os.listdir("/proc/self/fd")), children()) == before
    selector.close()


# -- threads -------------------------------------------------------------------------------------


def run_of(folder: Path, **more: Any) -> RunTrial:
    return run_trial(folder / "study", folder_token=mark(folder), **more)


def captured(*, epoch: int) -> Captured:
    return checkpoint.captured(
        checkpoint.Checkpoint(loop=1, epoch=epoch, objects=[], state={}, rng=[], history={})
    )


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("can't start new thread")
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=error))


def test_a_checkpoint_is_written_though_there_can_be_no_thread(
    tmp_path: Path, no_threads: None
) -> None:
    run = run_of(tmp_path)
    saver = Saver(Session(None, run))
    saver.save(captured(epoch=1))
    assert saver.finish()
    assert (tmp_path / "study" / "trial-0.1-1.0123abcd-0.pt").exists()


def fails() -> Captured:
    raise MemoryError


@pytest.mark.parametrize("other", [Saver.keep_best, Saver.captured])
def test_a_checkpoint_is_as_good_whatever_else_could_not_be_copied(
    tmp_path: Path, other: Callable[..., object]
) -> None:
    saver = Saver(Session(None, run_of(tmp_path)))
    other(saver, fails)
    assert saver.finish()  # as on a rank that writes no checkpoints itself
    saver.save(captured(epoch=1))
    other(saver, fails)
    assert saver.finish()


def test_a_trainer_without_a_thread_for_its_heartbeats_gives_its_trial_back(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    channel: Any = mock.Mock()
    channel.receive.side_effect = [run_of(tmp_path, heartbeat_s=1.0), Quit()]
    trainer = Trainer(Device(index=0, node=0, kind="cpu"), channel, None, 1)
    request.getfixturevalue("no_threads")
    trainer.serve()
    (sent,) = channel.send.call_args_list
    assert sent.args[0].ending is Ending.ABORTED
    assert LaunchError.__name__ in sent.args[0].error.description
    assert "can't start new thread" in sent.args[0].error.description
