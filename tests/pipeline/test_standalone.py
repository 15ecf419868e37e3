"""A SharedPipeline by itself: readers in processes and threads that no executor started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from pathlib import Path

import pytest
import torch
from pipeline_datasets import Augmented
from pipeline_harness import Forked
from standalone_harness import SIZE, indices, new_pipeline, server_of
from torch.utils.data import Dataset, TensorDataset

from optuna_fleet.exceptions import FleetError, PreprocessingError, ProtocolError
from optuna_fleet.pipeline import SharedPipeline, limits, standalone
from tests.nursery import FIRST, Nursery
from tests.waiting import until


@pytest.fixture(scope="module", autouse=True)
def _nursery_is_there(nursery: Nursery) -> None:
    """Or its descriptor would be among what a test has left."""
    nursery.begin()


class Sticky(Dataset[int]):
    """Stops the process that asks for sample 17, the first time or always."""

    def __init__(self, folder: Path, *, always: bool = False) -> None:
        self.flag, self.always = folder / "stopped", always

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == 17 and (self.always or not self.flag.exists()):
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return index


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is in no file, nor in a memory file."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def test_what_one_thread_has_opened_others_may_read(running: SharedPipeline) -> None:
    """A thread that reads ahead is given its loader by the one that starts it."""
    mine, theirs = (running.batches("train", batch_size=8, epoch=0) for _ in range(2))
    begun = iter(mine)
    first, found = indices([next(begun)]), list[int]()
    thread = threading.Thread(target=lambda: found.extend(indices(theirs)))
    thread.start()
    key = os.getpid(), thread.ident
    thread.join()
    assert found == first + indices(begun)
    assert running._session is not None
    assert key in running._session._readers  # two threads at one socket take each other's news


# -- faults -----------------------------------------------------------------------------------


def test_a_server_that_ends_as_it_starts_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "_SERVER", "optuna_fleet.no_such_module")
    with new_pipeline() as pipeline, pytest.raises(FleetError, match="ended"):
        indices(pipeline.batches("train", batch_size=8, epoch=0))


def test_who_comes_when_many_others_wait_to_be_let_in_waits_too() -> None:
    with new_pipeline() as pipeline, contextlib.ExitStack() as crowd:
        handle = pipeline.handle()
        os.kill(server_of(pipeline), signal.SIGSTOP)
        with contextlib.suppress(BlockingIOError):
            while True:  # until the kernel lets nobody else wait
                sock = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                sock.setblocking(False)
                sock.connect(handle.address)
        fork = Forked(lambda: indices(handle.connect().batches("val", batch_size=8, epoch=0)))
        until(lambda: _state(fork.pid) in "SZ")  # it sleeps in its call to connect, or has failed
        os.kill(server_of(pipeline), signal.SIGCONT)
        assert sorted(fork.result()) == list(range(20))


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_preprocessor_that_is_stuck_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STUCK_S", 2.0)
    # As some supervisors leave it to all that they start.
    (tmp_path / "first.py").write_text(
        "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    )
    monkeypatch.setenv(FIRST, str(tmp_path / "first.py"))
    data = {"once": Sticky(tmp_path), "always": Sticky(tmp_path, always=True)}
    with SharedPipeline(num_preprocessors=1, shuffled=[], **data) as pipeline:
        once = pipeline.batches("once", batch_size=8, epoch=0)
        assert [int(i) for batch in once for i in batch] == list(range(40))
        assert (tmp_path / "stopped").exists()
        with pytest.raises(PreprocessingError, match=r"data set .always.: .*stuck"):
            list(pipeline.batches("always", batch_size=8, epoch=0))
        assert pipeline.stats().num_lost >= 4


@pytest.mark.parametrize(("gpus", "niceness"), [(0, limits.NICENESS), (2, 0)])
def test_preprocessors_are_chosen_as_in_a_fleet(
    monkeypatch: pytest.MonkeyPatch, gpus: int, niceness: int
) -> None:
    monkeypatch.setattr(standalone, "num_gpus", lambda environment: gpus)
    monkeypatch.setattr(standalone, "cpu_count", lambda: 12)
    setup = standalone._setup(SharedPipeline(train=Augmented(SIZE)))
    assert (setup.is_adaptive, setup.niceness) == (True, niceness)
    assert setup.num_preprocessors == (10 if gpus else 6)
    setup = standalone._setup(new_pipeline())  # the user's number
    assert (setup.is_adaptive, setup.num_preprocessors) == (False, 2)


def test_another_users_server_is_not_read(
    running: SharedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standalone.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ProtocolError, match="another user"):
        running.handle().connect()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
def test_other_users_are_given_nothing(running: SharedPipeline) -> None:
    address = running.handle().address

    def read_as_nobody() -> bytes:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(address)
            return sock.recv(1 << 16)

    assert Forked(read_as_nobody).result() == b""


def test_the_server_has_the_data_sets_in_their_file_only(running: SharedPipeline) -> None:
    nbytes = 128 << 20
    dataset = TensorDataset(torch.ones(16, nbytes // 16, dtype=torch.uint8))
    with SharedPipeline(val=dataset, num_preprocessors=1) as pipeline:
        assert next(iter(pipeline.batches("val", batch_size=1, epoch=0)))[0].all()
        more = anonymous_bytes(server_of(pipeline)) - anonymous_bytes(server_of(running))
    assert more < nbytes / 2
