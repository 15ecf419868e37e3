"""A SharedPipeline by itself: readers in processes and threads that no executor started."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipeline_datasets import Augmented
from pipeline_harness import Forked
from torch.utils.data import Dataset, TensorDataset

from optuna_fleet.exceptions import FleetConfigError, FleetError, PreprocessingError, ProtocolError
from optuna_fleet.pipeline import SharedPipeline, limits
from optuna_fleet.pipeline.standalone import admission, standalone
from optuna_fleet.pipeline.standalone.admission import Address
from optuna_fleet.pipeline.standalone.standalone import PipelineHandle
from tests import leftovers
from tests.nursery import FIRST, Nursery
from tests.waiting import until

SIZE = 150
READ, COUNT = b"r", b"c"


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


class Telling(Dataset[Any]):
    """Says what is set where its samples are made."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        warnings.warn("never mind", stacklevel=1)  # an error, were it not ignored
        return torch.tensor(1 / 3), torch.empty(0).device.type, np.geterr()["over"]


def new_pipeline(**more: Any) -> SharedPipeline:
    datasets = {"train": Augmented(SIZE), "val": Augmented(20)}
    return SharedPipeline(num_preprocessors=2, seed=3, **datasets, **more)


@pytest.fixture(scope="module", autouse=True)
def _nursery_is_there(nursery: Nursery) -> None:
    """Or its descriptor would be among what a test has left."""
    nursery.begin()


@pytest.fixture(scope="module")
def running() -> Iterator[SharedPipeline]:
    with new_pipeline() as pipeline:
        yield pipeline


def held() -> tuple[int, set[str], set[str]]:
    """Descriptors, children and shared memory of this process."""
    gc.collect()  # tracebacks keep batches
    threads = Path("/proc/self/task").glob("*/children")
    children = " ".join(thread.read_text() for thread in threads)
    return (
        len(os.listdir("/proc/self/fd")),
        set(children.split()),
        leftovers.shared_memory(),
    )


def holds_no_more_than(before: tuple[int, set[str], set[str]]) -> bool:
    """What tests before this one have left may have gone meanwhile."""
    descriptors, children, segments = held()
    return descriptors <= before[0] and children <= before[1] and segments <= before[2]


def server_of(pipeline: SharedPipeline) -> int:
    assert pipeline._session is not None
    return pipeline._session.server_pid


def is_listening(handle: PipelineHandle) -> bool:
    return f"@{handle.address.name[1:]}" in Path("/proc/net/unix").read_text()


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is in no file, nor in a memory file."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def children_of(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@contextlib.contextmanager
def watched(*pids: int) -> Iterator[Callable[[], None]]:
    """Yields what waits for the end of processes that need not be our children."""
    fds = [os.pidfd_open(pid) for pid in pids]

    def wait() -> None:
        for fd in fds:
            assert select.select([fd], [], [], 240)[0], "a process was left behind"

    yield wait
    for fd in fds:
        os.close(fd)


def indices(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in batch[0]]


# -- what is read -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 32, "epoch": 0},
        {"batch_size": 7, "epoch": 1, "drop_last": True},
        {"batch_size": 32, "epoch": 1, "rank": 1, "world_size": 3, "first_step": 2},
        {"name": "val", "batch_size": 8, "epoch": 5},
    ],
)
def test_the_same_bits_as_by_any_other_way(
    running: SharedPipeline, arguments: dict[str, Any]
) -> None:
    arguments = {"name": "train", **arguments}
    batches = running.batches(**arguments)
    expected = [batch.data for batch in running.inline().read(**arguments)]
    assert len(batches) == len(expected)
    for _ in range(2):
        for ours, theirs in zip(batches, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_passes_may_be_interleaved_and_left_early(running: SharedPipeline) -> None:
    first = iter(running.batches("train", batch_size=10, epoch=0))
    second = iter(running.batches("train", batch_size=4, epoch=1))
    seen = [indices([next(first)]), indices([next(second)]), indices(first)]
    second.close()
    assert sorted(seen[0] + seen[2]) == list(range(SIZE))


def read_in_spawned(rank: int, handle: PipelineHandle, folder: Path) -> None:
    with handle.connect() as reader:
        batches = reader.batches("train", batch_size=30, epoch=0, rank=rank, world_size=2)
        (folder / str(rank)).write_bytes(pickle.dumps(indices(batches)))


def test_a_rank_that_torch_spawned_and_another(running: SharedPipeline, tmp_path: Path) -> None:
    handle = running.handle()
    assert len(pickle.dumps(handle)) < 1000
    torch.multiprocessing.spawn(read_in_spawned, args=(handle, tmp_path), nprocs=1)
    read_in_spawned(1, handle, tmp_path)
    shares = [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(2)]
    whole = indices(running.batches("train", batch_size=30, epoch=0))
    assert shares[0][:15] + shares[1][:15] == whole[:30]
    assert sorted(shares[0] + shares[1]) == list(range(SIZE))


def test_readers_of_own_batch_sizes_in_forks(running: SharedPipeline) -> None:
    def read(batch_size: int) -> list[int]:
        with running.handle().connect() as reader:
            return indices(reader.batches("train", batch_size=batch_size, epoch=3))

    forks = [Forked(lambda size=size: read(size)) for size in (3, 50, 128)]
    first, *others = [fork.result() for fork in forks]
    assert sorted(first) == list(range(SIZE))
    assert others == [first, first]


def test_a_fork_gets_a_reader_of_its_own(running: SharedPipeline) -> None:
    mine = iter(running.batches("train", batch_size=30, epoch=0))
    begun = indices([next(mine)])
    theirs = Forked(lambda: indices(running.batches("train", batch_size=30, epoch=0))).result()
    assert begun + indices(mine) == theirs


def test_threads_read_at_once(running: SharedPipeline) -> None:
    seen: dict[int, list[int]] = {}

    def read(epoch: int) -> None:
        seen[epoch] = indices(running.batches("train", batch_size=8, epoch=epoch))

    threads = [threading.Thread(target=read, args=(epoch,)) for epoch in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sorted(seen[epoch]) for epoch in range(3)] == [list(range(SIZE))] * 3
    assert seen[0] != seen[1]


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


def test_samples_are_made_under_the_settings_of_the_script() -> None:
    with np.errstate(over="raise"):
        warnings.filterwarnings("ignore", "never mind")
        torch.set_default_dtype(torch.float64)
        try:
            pipeline = SharedPipeline(train=Telling(), num_preprocessors=1).__enter__()
        finally:
            torch.set_default_dtype(torch.float32)
    with contextlib.ExitStack() as stack:
        stack.push(pipeline.__exit__)
        ((thirds, devices, errors),) = pipeline.batches("train", batch_size=2, epoch=0)
    assert thirds.tolist() == [1 / 3, 1 / 3]
    assert (list(devices), list(errors)) == (["cpu"] * 2, ["raise"] * 2)


def test_stats_tell_what_was_shared() -> None:
    with new_pipeline() as pipeline:
        for _ in range(4):
            indices(pipeline.batches("train", batch_size=32, epoch=0, continues=False))
        stats = pipeline.stats()
        assert (stats.preprocessed, stats.consumed) == (SIZE, 4 * SIZE)
        assert stats.sharing_factor == 4
        assert Forked(pipeline.stats).result() == stats


# -- begin and end ----------------------------------------------------------------------------


def test_use_outside_of_with_says_what_to_do() -> None:
    pipeline = new_pipeline()
    for use in (lambda: pipeline.batches("train", batch_size=1, epoch=0), pipeline.stats):
        with pytest.raises(FleetConfigError, match=r"inside `with pipeline:`.*pipeline\.handle"):
            use()
    with pytest.raises(FleetConfigError, match=r"SharedPipeline\.handle\(\)"):
        pipeline.handle()


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


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_block_ends_it(error: type[BaseException]) -> None:
    pipeline, before = new_pipeline(), held()

    def use() -> None:
        with pipeline:
            for _ in pipeline.batches("train", batch_size=8, epoch=0):
                raise error

    with pytest.raises(error):
        use()
    assert holds_no_more_than(before)


def test_a_pipeline_that_can_not_start_leaves_nothing() -> None:
    pipeline, before = SharedPipeline(train=[threading.Lock()]), held()
    with pytest.raises(FleetConfigError, match="can't be pickled"):
        pipeline.__enter__()
    assert holds_no_more_than(before)


def test_two_pipelines_at_once(running: SharedPipeline) -> None:
    with SharedPipeline(train=range(10), shuffled=[]) as other:
        both = zip(
            running.batches("train", batch_size=15, epoch=0),
            other.batches("train", batch_size=1, epoch=0),
            strict=True,
        )
        assert [int(number) for _, number in both] == list(range(10))


def test_a_fork_that_leaves_the_block_ends_nothing() -> None:
    with contextlib.ExitStack() as stack:
        pipeline = stack.enter_context(new_pipeline())
        indices(pipeline.batches("val", batch_size=8, epoch=0))
        Forked(stack.close).result()
        assert len(indices(pipeline.batches("train", batch_size=8, epoch=0))) == SIZE


SCRIPT = """
import sys
from pathlib import Path
from optuna_fleet import SharedPipeline

class Squares:  # of __main__, which has no file
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return index * index

with SharedPipeline(train=Squares(), num_preprocessors=2) as pipeline:
    for epoch in range(10**9):
        for batch in pipeline.batches("train", batch_size=10, epoch=epoch):
            assert all(int(x) ** 0.5 % 1 == 0 for x in batch)
        if epoch == 2:
            server = pipeline._session.server_pid
            children = Path(f"/proc/{server}/task/{server}/children").read_text()
            print(server, children, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_owners_end_is_the_end_of_all(number: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    )
    assert owner.stdout is not None
    with watched(*map(int, owner.stdout.readline().split())) as wait:
        owner.send_signal(number)
        _, errors = owner.communicate(timeout=240)
        wait()
    assert owner.returncode == -number
    assert errors.rstrip().endswith("KeyboardInterrupt" if number == signal.SIGINT else "")


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


def test_who_comes_when_many_others_wait_to_be_let_in_waits_too() -> None:
    with new_pipeline() as pipeline, contextlib.ExitStack() as crowd:
        handle = pipeline.handle()
        os.kill(server_of(pipeline), signal.SIGSTOP)
        with contextlib.suppress(BlockingIOError):
            while True:  # until the kernel lets nobody else wait
                sock = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                sock.setblocking(False)
                sock.connect(handle.address.name)
        fork = Forked(lambda: indices(handle.connect().batches("val", batch_size=8, epoch=0)))
        until(lambda: _state(fork.pid) in "SZ")  # it sleeps in its call to connect, or has failed
        os.kill(server_of(pipeline), signal.SIGCONT)
        assert sorted(fork.result()) == list(range(20))


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_what_is_short_of_descriptors_says_so_and_reads_when_there_are_some() -> None:
    def read(handle: PipelineHandle) -> list[int]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        taken: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(OSError, match="Too many open files"):
            handle.connect()
        os.close(taken.pop())
        reader = handle.connect()
        with pytest.raises(FleetError, match="too many open files"):
            indices(reader.batches("val", batch_size=8, epoch=0))
        for descriptor in taken:
            os.close(descriptor)
        return indices(reader.batches("val", batch_size=8, epoch=0))

    with new_pipeline() as pipeline:
        seen = Forked(lambda: read(pipeline.handle())).result()
    assert sorted(seen) == list(range(20))


def test_readers_killed_in_mid_batch_cost_the_others_nothing() -> None:
    ours, theirs = multiprocessing.Pipe()

    def hang(handle: PipelineHandle) -> None:
        batches = iter(handle.connect().batches("train", batch_size=40, epoch=0))
        next(batches)
        theirs.send(None)
        signal.pause()

    # Room for a third of an epoch: what the dead hold must be dropped, or the living are stuck.
    with new_pipeline(memory_bytes=20_000) as pipeline:
        for _ in range(3):
            fork = Forked(lambda: hang(pipeline.handle()))
            ours.recv()
            fork.kill()
        for epoch in range(2):
            seen = indices(pipeline.batches("train", batch_size=8, epoch=epoch))
            assert sorted(seen) == list(range(SIZE))
        stats = pipeline.stats()
        assert stats.num_dropped > 0
        assert stats.resident_bytes <= 20_000
    ours.close()
    theirs.close()


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
    monkeypatch.setattr(standalone, "num_gpus", lambda environment: gpus)
    monkeypatch.setattr(standalone, "cpu_count", lambda: 12)
    setup = standalone._setup(SharedPipeline(train=Augmented(SIZE)))
    assert (setup.is_adaptive, setup.niceness) == (True, niceness)
    assert setup.num_preprocessors == (10 if gpus else 6)
    setup = standalone._setup(new_pipeline())  # the user's number
    assert (setup.is_adaptive, setup.num_preprocessors) == (False, 2)


# -- misuse -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "test"}, "no data set 'test'"),
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"batch_size": 3, "world_size": 4}, "`batch_size` is 3, but `world_size` is 4"),
        ({"batch_size": 74, "world_size": 4}, "last batch of the epoch has 2 of 150"),
    ],
)
def test_arguments_that_can_not_work(
    running: SharedPipeline, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(FleetConfigError, match=message):
        running.batches(**{"name": "train", "batch_size": 8, "epoch": 0, **arguments})


def test_readers_are_for_their_process_and_their_block(running: SharedPipeline) -> None:
    def refusal(reader: Any) -> str:
        with pytest.raises(FleetConfigError) as caught:
            reader.batches("train", batch_size=8, epoch=0)
        return str(caught.value)

    with running.handle().connect() as reader:
        left = iter(reader.batches("train", batch_size=8, epoch=0))
        next(left)
        assert "forked" in Forked(lambda: refusal(reader)).result()
        assert len(indices(reader.batches("train", batch_size=8, epoch=0))) == SIZE
    assert "closed" in refusal(reader)
    with pytest.raises(FleetConfigError, match="closed"):
        indices(left)


def test_a_copy_does_not_run(running: SharedPipeline) -> None:
    copy = pickle.loads(pickle.dumps(running))
    with pytest.raises(FleetConfigError, match="does not run here"):
        copy.batches("train", batch_size=8, epoch=0)


def test_who_does_not_know_the_secret_is_not_let_in(running: SharedPipeline) -> None:
    address = running.handle().address
    assert address.secret.hex() not in repr(address)
    impostor = Address(name=address.name)
    for wish in (READ, COUNT):
        with pytest.raises(EOFError):
            impostor.connect(wish)
    assert len(indices(running.batches("val", batch_size=8, epoch=0))) == 20


def test_a_proof_is_of_one_connection_and_one_wish(running: SharedPipeline) -> None:
    address = running.handle().address
    sock = admission.socket.socket(admission.socket.AF_UNIX, admission.socket.SOCK_SEQPACKET)
    sock.connect(address.name)
    theirs, mine = sock.recv(32), bytes(32)
    sock.send(mine + admission.derived(address.secret, b"reader" + COUNT, mine, theirs) + READ)
    assert sock.recv(32) == b""
    sock.close()


def test_a_server_that_does_not_know_the_secret_is_not_read() -> None:
    address = Address()
    with Address(name=address.name).listen() as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.send(bytes(32))
                sock.recv(100)
                sock.send(bytes(32))

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ProtocolError, match="secret"):
            address.connect(READ)
        thread.join()


def test_other_users_are_neither_read_nor_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    address = Address()
    monkeypatch.setattr(admission, "peer_uid", lambda sock: os.geteuid() + 1)
    with address.listen() as listener:
        with pytest.raises(ProtocolError, match="another user"):
            address.connect(READ)
        sock, _ = listener.accept()
        with sock, pytest.raises(ProtocolError, match="another user"):
            admission.Applicant(sock, address.secret)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
def test_the_kernel_says_who_asks() -> None:
    address = Address()

    def connect_as_nobody() -> str:
        os.setuid(65534)
        with pytest.raises(ProtocolError) as caught:
            address.connect(READ)
        return str(caught.value)

    with address.listen() as listener:
        fork = Forked(connect_as_nobody)
        sock, _ = listener.accept()
        with sock:
            assert admission.peer_uid(sock) == 65534
        assert "another user" in fork.result()


def test_the_server_has_the_data_sets_in_their_file_only(running: SharedPipeline) -> None:
    nbytes = 128 << 20
    dataset = TensorDataset(torch.ones(16, nbytes // 16, dtype=torch.uint8))
    with SharedPipeline(val=dataset, num_preprocessors=1) as pipeline:
        assert next(iter(pipeline.batches("val", batch_size=1, epoch=0)))[0].all()
        more = anonymous_bytes(server_of(pipeline)) - anonymous_bytes(server_of(running))
    assert more < nbytes / 2
