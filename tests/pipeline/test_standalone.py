"""A SharedPipeline by itself: readers in processes and threads that no executor started."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from pipeline_datasets import Augmented
from pipeline_harness import Forked
from standalone_harness import SIZE, held, holds_no_more_than, indices, new_pipeline, watched
from torch.utils.data import Dataset, TensorDataset

from optuna_fleet.exceptions import FleetConfigError, FleetError, PreprocessingError, ProtocolError
from optuna_fleet.pipeline import SharedPipeline, limits
from optuna_fleet.pipeline.standalone import admission, handle
from optuna_fleet.pipeline.standalone.admission import Address
from optuna_fleet.pipeline.standalone.handle import PipelineHandle
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


def server_of(pipeline: SharedPipeline) -> int:
    assert pipeline._session is not None
    return pipeline._session.server_pid


def is_listening(handle: PipelineHandle) -> bool:
    return Path(handle.address.folder).exists()


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is in no file, nor in a memory file."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def children_of(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


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


def test_nothing_is_left_and_it_can_be_entered_again() -> None:
    with new_pipeline():
        pass  # what the tests and Python start once, and keep, is there from now on
    pipeline, before = new_pipeline(), held()
    for _ in range(2):
        with pipeline:
            handle, server = pipeline.handle(), server_of(pipeline)
            indices(pipeline.batches("val", batch_size=8, epoch=0))
            preprocessors = children_of(server)
            assert preprocessors
            assert is_listening(handle)
            with pytest.raises(FleetConfigError, match="runs already"):
                pipeline.__enter__()
        for pid in (server, *preprocessors):
            assert not Path(f"/proc/{pid}").exists()
        assert not is_listening(handle)
        assert holds_no_more_than(before)
    with pytest.raises(FleetError, match="runs no more"):
        handle.connect()
    with pytest.raises(FleetError, match="runs no more"):
        handle.stats()


def test_a_fork_that_outlives_the_owner_keeps_nothing_alive() -> None:
    ours, theirs = multiprocessing.Pipe()

    def own() -> None:
        with new_pipeline() as pipeline:
            indices(pipeline.batches("val", batch_size=8, epoch=0))
            server = server_of(pipeline)
            heir = os.fork()
            if heir == 0:
                signal.pause()
            theirs.send((heir, server, *children_of(server)))
            theirs.recv()  # they are watched
            os._exit(0)  # as if it were killed

    owner = multiprocessing.get_context("fork").Process(target=own)
    owner.start()
    heir, *pids = ours.recv()
    try:
        with watched(*pids) as wait:
            ours.send(None)
            wait()
    finally:
        for pid in (heir, *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        owner.join()
        ours.close()
        theirs.close()


# -- faults -----------------------------------------------------------------------------------


def test_a_killed_server_is_reported_to_all_readers() -> None:
    pipeline, before = new_pipeline(), held()
    with pipeline:
        batches = iter(pipeline.batches("train", batch_size=8, epoch=0))
        kept = next(batches)[0]
        reader = pipeline.handle().connect()
        with watched(server_of(pipeline), *children_of(server_of(pipeline))) as wait:
            os.kill(server_of(pipeline), signal.SIGKILL)
            wait()
        assert len(kept.unique()) == 8  # what was read stays
        with pytest.raises(FleetError, match=r"ended with signal SIGKILL.*again"):
            indices(pipeline.batches("train", batch_size=8, epoch=7))
        with pytest.raises(FleetError, match="gone"):
            indices(reader.batches("train", batch_size=8, epoch=7))
        with pytest.raises(FleetError, match="runs no more"):
            pipeline.stats()
        reader.close()
        del kept
        batches.close()
    assert holds_no_more_than(before)
    with pipeline:
        assert len(indices(pipeline.batches("train", batch_size=8, epoch=0))) == SIZE


def test_a_server_that_ends_as_it_starts_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "_SERVER", "optuna_fleet.no_such_module")
    with new_pipeline() as pipeline:
        folder = Path(pipeline.handle().address.folder)
        with pytest.raises(FleetError, match="ended"):
            indices(pipeline.batches("train", batch_size=8, epoch=0))
    assert not folder.exists()


def test_who_comes_when_many_others_wait_to_be_let_in_waits_too() -> None:
    with new_pipeline() as pipeline, contextlib.ExitStack() as crowd:
        handle = pipeline.handle()
        os.kill(server_of(pipeline), signal.SIGSTOP)
        with contextlib.suppress(BlockingIOError):
            while True:  # until the kernel lets nobody else wait
                sock = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                sock.setblocking(False)
                sock.connect(f"{handle.address.folder}/socket")
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


def niceness_of(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def test_where_there_are_no_gpus_preprocessors_let_others_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with SharedPipeline(train=Augmented(SIZE)) as pipeline:
        indices(pipeline.batches("train", batch_size=8, epoch=0))
        found = {niceness_of(pid) for pid in children_of(server_of(pipeline))}
        assert found == {min(19, niceness_of(0) + limits.NICENESS)}


@pytest.mark.parametrize(("gpus", "niceness"), [(0, limits.NICENESS), (2, 0)])
def test_preprocessors_are_chosen_as_in_a_fleet(
    monkeypatch: pytest.MonkeyPatch, gpus: int, niceness: int
) -> None:
    monkeypatch.setattr(handle, "num_gpus", lambda environment: gpus)
    monkeypatch.setattr(handle, "cpu_count", lambda: 12)
    setup = handle._setup(SharedPipeline(train=Augmented(SIZE)))
    assert (setup.is_adaptive, setup.niceness) == (True, niceness)
    assert setup.num_preprocessors == (10 if gpus else 6)
    setup = handle._setup(new_pipeline())  # the user's number
    assert (setup.is_adaptive, setup.num_preprocessors) == (False, 2)


def test_another_users_server_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    address = Address.new()
    monkeypatch.setattr(admission.os, "geteuid", lambda: os.getuid() + 1)
    with address.listen(), pytest.raises(ProtocolError, match="another user"):
        address.connect()
    address.forget()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
def test_the_kernel_lets_no_other_user_in(running: SharedPipeline) -> None:
    handle = running.handle()

    def connect_as_nobody() -> bool:
        os.setuid(65534)
        with pytest.raises(PermissionError):
            handle.connect()
        return True

    assert Forked(connect_as_nobody).result()


def test_the_folder_for_temporary_files_may_have_a_long_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ("long" * 40)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 40)))
    with new_pipeline() as pipeline:
        assert len(indices(pipeline.batches("val", batch_size=8, epoch=0))) == 20
    assert not os.listdir(tempfile.gettempdir())


def test_the_server_has_the_data_sets_in_their_file_only(running: SharedPipeline) -> None:
    nbytes = 128 << 20
    dataset = TensorDataset(torch.ones(16, nbytes // 16, dtype=torch.uint8))
    with SharedPipeline(val=dataset, num_preprocessors=1) as pipeline:
        assert next(iter(pipeline.batches("val", batch_size=1, epoch=0)))[0].all()
        more = anonymous_bytes(server_of(pipeline)) - anonymous_bytes(server_of(running))
    assert more < nbytes / 2
