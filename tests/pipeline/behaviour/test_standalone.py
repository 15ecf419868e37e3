"""A SharedPipeline by itself: readers in processes and threads that no executor started."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_harness import Forked, PipelineHandle
from standalone_harness import (
    SIZE,
    children_of,
    held,
    holds_no_more_than,
    indices,
    new_pipeline,
    read,
    server_of,
    watched,
)
from torch.utils.data import Dataset

from optuna_fleet import SharedPipeline
from optuna_fleet.exceptions import FleetConfigError, FleetError
from tests.nursery import Nursery


class Telling(Dataset[Any]):
    """Says what is set where its samples are made."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        warnings.warn("never mind", stacklevel=1)  # an error, were it not ignored
        return torch.tensor(1 / 3), torch.empty(0).device.type


@pytest.fixture(scope="module", autouse=True)
def _nursery_is_there(nursery: Nursery) -> None:
    """Or its descriptor would be among what a test has left."""
    nursery.begin()


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
    expected = [batch.data for batch in running.inline().read(**arguments)]
    with running.handle().connect() as reader:
        batches = reader.batches(**arguments)
        assert len(batches) == len(expected)
        for _ in range(2):
            for ours, theirs in zip(batches, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


RANK = """
import pickle, sys
with pickle.load(sys.stdin.buffer).connect() as reader:
    batches = reader.batches("train", batch_size=30, epoch=0, rank=1, world_size=2)
    print([index for batch in batches for index in batch[0].tolist()])
"""


def test_ranks_of_which_one_is_as_in_another_container(running: SharedPipeline) -> None:
    handle = pickle.dumps(running.handle())
    assert len(handle) < 1000
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        apart = []  # this user may make no namespaces of processes
    other = subprocess.run(
        [*apart, sys.executable, "-c", RANK], input=handle, capture_output=True, check=True
    )
    ours = indices(read(running, batch_size=30, rank=0, world_size=2))
    theirs = list(map(int, other.stdout.decode().strip("[]\n").split(", ")))
    whole = indices(read(running))
    assert ours[:15] + theirs[:15] == whole[:30]
    assert sorted(ours + theirs) == list(range(SIZE))


def test_threads_read_at_once(running: SharedPipeline) -> None:
    seen: dict[int, list[int]] = {}

    def see(epoch: int) -> None:
        seen[epoch] = indices(read(running, epoch=epoch))

    threads = [threading.Thread(target=see, args=(epoch,)) for epoch in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sorted(seen[epoch]) for epoch in range(3)] == [list(range(SIZE))] * 3
    assert seen[0] != seen[1]


def test_samples_are_made_under_the_settings_of_the_script() -> None:
    warnings.filterwarnings("ignore", "never mind")
    torch.set_default_dtype(torch.float64)
    try:
        pipeline = SharedPipeline(train=Telling(), num_preprocessors=1).__enter__()
    finally:
        torch.set_default_dtype(torch.float32)
    with contextlib.ExitStack() as stack:
        stack.push(pipeline.__exit__)
        ((thirds, devices),) = read(pipeline)
    assert thirds.tolist() == [1 / 3, 1 / 3]
    assert list(devices) == ["cpu"] * 2


# -- begin and end ----------------------------------------------------------------------------


def test_use_outside_of_with_says_what_to_do(running: SharedPipeline) -> None:
    copy = pickle.loads(pickle.dumps(running))  # which does not run
    for use in (copy.stats, copy.handle):
        with pytest.raises(FleetConfigError, match=r"inside `with pipeline:`"):
            use()


def test_nothing_is_left_and_it_can_be_entered_again() -> None:
    with new_pipeline():
        pass  # what the tests and Python start once, and keep, is there from now on
    pipeline, before = new_pipeline(), held()
    for _ in range(2):
        with pipeline:
            handle, server = pipeline.handle(), server_of(pipeline)
            read(pipeline, "val")
            preprocessors = children_of(server)
            assert preprocessors
            handle.connect().close()
            with pytest.raises(FleetConfigError, match="runs already"):
                pipeline.__enter__()
        for pid in (server, *preprocessors):
            assert not Path(f"/proc/{pid}").exists()
        assert holds_no_more_than(before)
    with pytest.raises(FleetError, match="runs no more"):
        handle.connect()
    with pytest.raises(FleetError, match="runs no more"):
        handle.stats()


def test_an_exception_in_the_block_ends_it_and_one_at_its_start_leaves_nothing() -> None:
    pipeline, before = new_pipeline(), held()

    def use() -> None:
        with pipeline, pipeline.handle().connect() as reader:
            for _ in reader.batches("train", batch_size=8, epoch=0):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    with pytest.raises(FleetConfigError, match="can't be pickled"):
        SharedPipeline(train=[threading.Lock()]).__enter__()
    assert holds_no_more_than(before)


def test_a_fork_that_leaves_the_block_ends_nothing() -> None:
    with contextlib.ExitStack() as stack:
        pipeline = stack.enter_context(new_pipeline())
        read(pipeline, "val")
        Forked(stack.close).result()
        assert len(indices(read(pipeline))) == SIZE


SCRIPT = """
import os, signal
from pathlib import Path
from optuna_fleet import SharedPipeline

class Squares:  # of __main__
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return index * index

pipeline = SharedPipeline(train=Squares(), num_preprocessors=2)
with pipeline, pipeline.handle().connect() as reader:
    for epoch in range(10**9):
        for batch in reader.batches("train", batch_size=10, epoch=epoch):
            assert all(int(x) ** 0.5 % 1 == 0 for x in batch)
        if epoch == 2:
            server = pipeline._session.server_pid
            children = Path(f"/proc/{server}/task/{server}/children").read_text()
            heir = os.fork()  # it has copies of all that the owner has open
            if heir == 0:
                os.closerange(0, 3)
                signal.pause()
            print(heir, server, children, flush=True)
"""


def test_the_owners_end_is_the_end_of_all() -> None:
    root = Path(__file__).parents[3]
    owner = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, cwd=root)
    assert owner.stdout is not None
    heir, *others = map(int, owner.stdout.readline().split())
    with watched(*others) as wait:
        owner.kill()
        wait()
    os.kill(heir, signal.SIGKILL)
    owner.communicate(timeout=240)


def test_what_is_short_of_descriptors_says_so_and_reads_when_there_are_some() -> None:
    def see(handle: PipelineHandle) -> list[int]:
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
        seen = Forked(lambda: see(pipeline.handle())).result()
    assert sorted(seen) == list(range(20))


def test_a_killed_server_is_reported_to_all_readers() -> None:
    pipeline, before = new_pipeline(), held()
    with pipeline:
        reader = pipeline.handle().connect()
        batches = iter(reader.batches("train", batch_size=8, epoch=0))
        kept = next(batches)[0]
        with watched(server_of(pipeline), *children_of(server_of(pipeline))) as wait:
            os.kill(server_of(pipeline), signal.SIGKILL)
            wait()
        assert len(kept.unique()) == 8  # what was read stays
        with pytest.raises(FleetError, match="gone"):
            indices(reader.batches("train", batch_size=8, epoch=7))
        with pytest.raises(FleetError, match="runs no more"):
            pipeline.stats()
        reader.close()
        del kept
        batches.close()
    assert holds_no_more_than(before)
    with pipeline:
        assert len(indices(read(pipeline))) == SIZE


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
        read(running, **arguments)


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
    for late in (left, reader.batches("train", batch_size=8, epoch=0)):
        with pytest.raises(FleetError, match="reader was closed"):
            indices(late)
    with pytest.raises(FleetError):
        indices(reader.batches("train", batch_size=8, epoch=0))
