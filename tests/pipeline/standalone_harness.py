"""A pipeline that runs alone, and what its processes hold."""

from __future__ import annotations

import contextlib
import gc
import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline_datasets import Augmented

from optuna_fleet import SharedPipeline
from tests import leftovers

SIZE = 150


def new_pipeline(**more: Any) -> SharedPipeline:
    datasets = {"train": Augmented(SIZE), "val": Augmented(20)}
    return SharedPipeline(num_preprocessors=2, seed=3, **datasets, **more)


def server_of(pipeline: SharedPipeline) -> int:
    assert pipeline._session is not None
    return pipeline._session.server_pid


def children_of(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


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


def read(pipeline: SharedPipeline, name: str = "train", **how: Any) -> list[Any]:
    """The batches of an epoch, by a reader of their own."""
    with pipeline.handle().connect() as reader:
        return list(reader.batches(name, **{"batch_size": 8, "epoch": 0, **how}))


def indices(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in batch[0]]
