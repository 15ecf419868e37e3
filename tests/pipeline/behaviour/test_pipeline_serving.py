"""Agent, preprocessors and readers as processes: what is shared, kept and made again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from pipeline_datasets import (
    COUNTS,
    SWITCH,
    Augmented,
    Counted,
    Deadly,
    Made,
    Raising,
    Unloadable,
    each_was_made,
)
from pipeline_harness import MAX_DEATHS, Agent, Forked, labels, permutation, serving
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from optuna_fleet import SharedPipeline
from optuna_fleet.exceptions import PreprocessingError
from tests.waiting import until

# -- what is shared -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 150])
def test_readers_of_unlike_batch_sizes_share_each_sample(n: int) -> None:
    epochs = range(2)

    def read(client: Any, batch_size: int) -> list[list[int]]:
        return [labels(client, epoch=e, batch_size=batch_size) for e in epochs]

    with serving(SharedPipeline(train=Counted(n), seed=3), chunk_bytes=1000) as agent:
        sizes = (3, 7, 128)
        readers = [Forked(partial(read, agent.client(), size)) for size in sizes]
        wanted = [permutation(3, "train", e, n).tolist() for e in epochs]
        assert [reader.result() for reader in readers] == [wanted] * len(sizes)
        stats = agent.stats()
    assert each_was_made(n, len(epochs))
    assert stats.preprocessed == n * len(epochs)
    assert stats.consumed == stats.preprocessed * len(sizes)
    assert stats.sharing_factor == len(sizes)


def test_an_empty_share_has_a_dummy_where_asked_for() -> None:
    with serving(SharedPipeline(val=Counted(7))) as agent:
        client = agent.client()
        arguments: Any = {"epoch": 0, "batch_size": 2, "rank": 2, "world_size": 3}
        for batch in client.read("val", **arguments):
            assert (batch.data, batch.local_size) == (None, 0)
        batches = list(client.read("val", **arguments, dummy=True))
        assert [batch.data[1].tolist() for batch in batches] == [[0], [2], [4], [6]]
        assert [(batch.local_size, batch.global_size) for batch in batches] == [(0, 2)] * 3 + [
            (0, 1)
        ]
        assert agent.stats().consumed == 0


def test_leaving_the_loop_gives_back_and_reports() -> None:
    with serving(SharedPipeline(val=Counted(64)), chunk_bytes=64) as agent:
        client = agent.client()
        for batch in client.read("val", epoch=0, batch_size=10):
            assert batch.local_size == 10
            break
        iterator = iter(client.read("val", epoch=0, batch_size=10))
        next(iterator)
        assert agent.stats().lent_bytes > 0
        iterator.close()
        with contextlib.suppress(ZeroDivisionError):
            for batch in client.read("val", epoch=0, batch_size=10):
                raise ZeroDivisionError(batch)
        stats = agent.stats()
        assert (stats.consumed, stats.lent_bytes) == (30, 0)


def test_a_stopped_reader_does_not_hold_up_the_others() -> None:
    with serving(SharedPipeline(train=Counted(150)), chunk_bytes=200) as agent:
        told, tell = os.pipe()
        client = agent.client()

        def stopped() -> list[int]:
            iterator = iter(client.read("train", epoch=0, batch_size=100))
            next(iterator)
            os.write(tell, b"x")
            os.kill(os.getpid(), signal.SIGSTOP)
            return [batch.local_size for batch in iterator]

        reader = Forked(stopped)
        os.read(told, 1)
        os.waitpid(reader.pid, os.WUNTRACED)
        second = agent.client()
        assert [sorted(labels(second, epoch=e)) for e in range(3)] == [list(range(150))] * 3
        os.kill(reader.pid, signal.SIGCONT)
        assert reader.result() == [50]
        os.close(told)
        os.close(tell)


# -- what is kept ---------------------------------------------------------------------------------


def test_augmentation_is_the_same_for_all_and_after_eviction() -> None:
    budget = 20_000  # an epoch takes about 100 kB

    def noise(client: Any, epoch: int, batch_size: int) -> torch.Tensor:
        batches = client.read("train", epoch=epoch, batch_size=batch_size)
        return torch.cat([batch.data[1] for batch in batches])

    pipeline = SharedPipeline(train=Augmented(100), seed=1)
    with serving(pipeline, memory_bytes=budget, chunk_bytes=8000) as agent:
        client, other = agent.client(), agent.client()
        first = noise(client, 0, 4)
        assert not torch.equal(first, noise(client, 1, 4))
        assert torch.equal(first, noise(other, 0, 9))
        stats = agent.stats()
        (notice,) = agent.notices()  # once
    assert "do not fit into" in notice
    assert stats.num_dropped > 0
    assert stats.repeated > 0
    assert stats.resident_bytes <= stats.peak_bytes <= budget


def test_early_epochs_are_kept_longest_and_fixed_data_longer() -> None:
    """New trials begin there."""
    pipeline = SharedPipeline(train=Counted(150), val=Counted(20), seed=3)
    with serving(pipeline, memory_bytes=52 * 4096, chunk_bytes=1000) as agent:
        client = agent.client()  # of an epoch's 19 chunks and the other three each takes a page
        for epoch in range(4):
            labels(client, epoch=epoch)
            labels(client, "val")
        made = agent.stats().preprocessed
        assert made == 4 * 150 + 20
        labels(client, epoch=0)
        labels(client, "val")
        assert agent.stats().preprocessed == made
        labels(client, epoch=3)
        assert agent.stats().repeated > 0


def test_what_memory_has_no_room_for_lies_in_a_folder(tmp_path: Path) -> None:
    pipeline = SharedPipeline(train=Counted(150), spill_dir=tmp_path)
    with serving(pipeline, memory_bytes=1 << 20, chunk_bytes=1000) as agent:
        for epoch in (0, 1, 2, 0, 1, 2):
            wanted = permutation(0, "train", epoch, 150).tolist()
            assert labels(agent.client(), epoch=epoch) == wanted
        stats = agent.stats()
        assert os.listdir(tmp_path) == []
    assert each_was_made(150, 3)
    assert 6000 < stats.resident_bytes <= stats.peak_bytes <= 1 << 20


def test_a_budget_below_one_chunk_is_a_clear_error() -> None:
    error = pytest.raises(PreprocessingError, match=r"'train' takes \d+ bytes.*larger memory_b")
    pipeline = SharedPipeline(train=Counted(150))
    with serving(pipeline, memory_bytes=1, chunk_bytes=1000) as agent, error:
        labels(agent.client())


@pytest.mark.parametrize("collate_fn", [None, list])
def test_a_small_budget_serves_texts_of_which_the_first_is_small(
    collate_fn: Any,
) -> None:
    pipeline = SharedPipeline(
        val=Made(lambda i: "x" * 4000 if i else "", 600), collate_fn=collate_fn
    )
    with serving(pipeline, memory_bytes=64 << 10) as agent:
        read = [batch.data for batch in agent.client().read("val", epoch=0, batch_size=20)]
        assert agent.stats().peak_bytes <= 64 << 10
    assert [len(text) for batch in read for text in batch] == [0] + 599 * [4000]


def picture(index: int) -> tuple[torch.Tensor, int]:
    return torch.full((150_000,), index, dtype=torch.uint8), index


def tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    with contextlib.suppress(OSError):  # it has just ended
        for thread in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in thread.read_text().split():
                yield from tree(int(child))


def memory_files() -> dict[int, int]:
    """Bytes that the kernel keeps of each arena, by the file's number."""
    found = {}
    for pid in tree(os.getpid()):
        for folder in ("fd", "map_files"):
            with contextlib.suppress(OSError):  # it has just ended
                for entry in Path(f"/proc/{pid}/{folder}").iterdir():
                    with contextlib.suppress(OSError):  # closed in the meantime
                        if "memfd:optuna-fleet-arena" in os.readlink(entry):
                            found[entry.stat().st_ino] = entry.stat().st_blocks * 512
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees what files others have mapped")
@pytest.mark.parametrize("is_kept", [False, True])
def test_the_budget_is_kept_in_real_memory(is_kept: bool) -> None:
    budget = 16 << 20
    stages = {"augment": lambda sample: sample} if is_kept else {}
    pipeline = SharedPipeline(train=Made(picture, 200), **stages)
    not_ours = memory_files().keys()
    taken: list[int] = []
    with serving(pipeline, memory_bytes=budget, num_preprocessors=2) as agent:
        readers = [agent.client().read("train", epoch=e, batch_size=16) for e in range(4)]
        held: list[Any] = [None] * len(readers)
        for held[:] in zip(*readers, strict=True):  # four batches, until the next are there
            files = memory_files()
            taken.append(sum(files[number] for number in files.keys() - not_ours))
        assert agent.stats().num_dropped > 0
        assert (agent.stats().decoded_bytes > 0) == is_kept
    assert 0.6 * budget < max(taken) <= budget


_IN_NAMESPACE = """
import contextlib, os, sys
sys.path[:0] = {path!r}
from pipeline_datasets import Counted
from pipeline_harness import labels, permutation, serving
from optuna_fleet import FleetConfigError, SharedPipeline

def fill():
    with contextlib.suppress(OSError), open({disk!r} + "/others", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass

for folder in (None, {disk!r}):
    pipeline = SharedPipeline(train=Counted(150), spill_dir=folder, memory_bytes=1 << 16)
    with serving(pipeline, memory_bytes=1 << 16, chunk_bytes=1000) as agent:
        labels(agent.client())
        fill()
        for epoch in (0, 1, 2, 0):
            wanted = permutation(0, "train", epoch, 150).tolist()
            assert labels(agent.client(), epoch=epoch) == wanted
    os.remove({disk!r} + "/others")
fill()
try:
    pipeline.packed()
except FleetConfigError as error:
    assert "only 0 bytes are free" in str(error), error
else:
    raise AssertionError
"""


def test_full_shared_memory_does_not_matter_nor_a_disk_that_others_fill_meanwhile(
    tmp_path: Path,
) -> None:
    (tmp_path / "disk").mkdir()
    mounts = (
        "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full && "
        f"mount -t tmpfs -o size=128k none {tmp_path / 'disk'}"
    )
    code = _IN_NAMESPACE.format(path=sys.path, disk=str(tmp_path / "disk"))
    (tmp_path / "script.py").write_text(code)
    command = f"{mounts} && exec {sys.executable} {tmp_path / 'script.py'}"
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")
    done = subprocess.run([*unshare, command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- what goes wrong ------------------------------------------------------------------------------


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def angry(error: BaseException, index: int) -> Any:
    raise error


ERRORS: dict[str, tuple[Callable[[int], Any], str]] = {
    "val_unpicklable": (lambda i: threading.Lock() if i else i, r"could not be stored.*pickle"),
    "val_mute": (partial(angry, Mute()), r"Sample 0 .* raised .*Mute"),
    "val_exit": (partial(angry, SystemExit(3)), "SystemExit: 3"),
    "val_cancelled": (partial(angry, CancelledError("too late")), "CancelledError: too late"),
}


def test_errors_of_samples_end_no_process() -> None:
    data = {name: Made(make, 20) for name, (make, _) in ERRORS.items()}
    with serving(SharedPipeline(**data, collate_fn=list)) as agent:
        client = agent.client()
        for name, (_, message) in ERRORS.items():
            with pytest.raises(PreprocessingError, match=message):
                list(client.read(name, epoch=0, batch_size=4))
        assert agent.stats().num_lost == 0


def test_an_error_names_the_sample_and_spares_the_others() -> None:
    pipeline = SharedPipeline(val=Raising(64), test=Counted(64))
    with serving(pipeline, chunk_bytes=64) as agent:
        client = agent.client()
        batches = iter(client.read("val", epoch=0, batch_size=4))
        assert torch.cat([next(batches).data for _ in range(4)]).tolist() == list(range(16))
        with pytest.raises(PreprocessingError) as caught:
            next(batches)
        text = str(caught.value)
        assert text.startswith("Sample 17 of data set 'val' raised ValueError: broken image")
        assert 'raise ValueError("broken image")' in text
        assert labels(client, "test") == list(range(64))
        COUNTS[SWITCH] = 1  # it works from now on
        assert [b.data.numel() for b in client.read("val", epoch=0, batch_size=64)] == [64]


def test_a_data_set_that_can_not_be_unpickled() -> None:
    with serving(SharedPipeline(val=Unloadable(8))) as agent:
        for client in (agent.client(), agent.client()):
            with pytest.raises(PreprocessingError, match=r"Unpickling.*OSError: no such disk"):
                labels(client, "val")


def test_a_chunk_that_kills_each_time_is_an_error_until_asked_for_again() -> None:
    COUNTS[SWITCH] = MAX_DEATHS + 1
    with serving(SharedPipeline(val=Deadly(64), test=Counted(64)), chunk_bytes=64) as agent:
        client = agent.client()
        with pytest.raises(PreprocessingError, match=r"Preprocessors died over a chunk.*'val'"):
            list(client.read("val", epoch=0, batch_size=64))
        assert labels(client, "test") == list(range(64))
        assert len(list(client.read("val", epoch=0, batch_size=64))) == 1


def broken(index: int) -> Any:
    """Raises for some."""
    if index in (7, 8, 49):
        raise ValueError(f"number {index} is broken")
    return index, torch.tensor(index)


def test_skipped_samples_are_replaced_by_the_next_and_counted() -> None:
    with serving(SharedPipeline(train=Made(broken, 50), on_error="skip")) as agent:
        for batch_size in (3, 16):
            order = permutation(0, "train", 0, 50).tolist()
            after = dict(zip(order, order[1:] + order[:1], strict=True))
            wanted = [after[index] if index in (7, 8, 49) else index for index in order]
            assert labels(agent.client(), batch_size=batch_size) == wanted
        assert agent.stats().num_skipped == 3
        (notice,) = agent.notices()
    assert notice.startswith("Skipped sample(s) ")
    assert "is broken" in notice


def test_a_photograph_that_is_cut_short(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for number in range(12):
        path = tmp_path / "images" / f"{number}.jpg"
        Image.effect_noise((24, 24), 50).convert("RGB").save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    images = ImageFolder(str(tmp_path), v2.Compose([v2.ToImage(), v2.RandomCrop(16)]))
    error = pytest.raises(PreprocessingError, match=r"Sample \d+ of .*[Tt]runcated")
    with serving(SharedPipeline(train=images)) as agent, error:
        labels(agent.client())


# -- how many preprocessors -----------------------------------------------------------------------


def slow(index: int) -> tuple[int, int]:
    """Takes a while, and says the niceness of who made it."""
    time.sleep(0.01)
    return os.nice(0), index


def agent_of(n: int, *, at_most: int = 4, idle_s: float = 1e6, **options: Any) -> Any:
    pipeline = SharedPipeline(train=Made(slow, n), **options)
    how = {"is_adaptive": True, "chunk_bytes": 700, "niceness": 7, "idle_s": idle_s}
    return serving(pipeline, num_preprocessors=at_most, **how)


def starve(agent: Agent, number: int) -> list[int]:
    """Read, always waiting for data, until there are so many; return how many there were."""
    client, seen = agent.client(), list[int]()
    for epoch in count():
        for batch in client.read("train", epoch=epoch, batch_size=7):
            assert batch.data[0].tolist() == [os.nice(0) + 7] * batch.local_size
            seen.append(len(agent.pids()))
        if seen[-1] >= number:
            return seen
    raise AssertionError


def test_preprocessors_grow_in_number_while_readers_wait() -> None:
    with agent_of(150) as agent:
        numbers = starve(agent, 4)
        use = agent.stats()
    assert numbers == sorted(numbers)
    assert numbers[0] < 4
    assert max(numbers) == 4
    assert use.stalled_share > 0
    assert 0 < use.busy_share <= 1
    assert 1.0 < use.num_preprocessors < 4.0


def test_a_number_that_the_user_gave_is_kept() -> None:
    with agent_of(150, at_most=8, num_preprocessors=3, idle_s=0.0) as agent:
        assert max(starve(agent, 3)) == 3
        assert len(agent.pids()) == 3


def test_idle_preprocessors_are_ended_and_come_back_with_the_work() -> None:
    with agent_of(20, idle_s=0.0) as agent:
        for epoch in range(2):
            read = agent.client().read("train", epoch=epoch, batch_size=7)
            assert sum(batch.local_size for batch in read) == 20
            until(lambda: agent.pids() == ())  # each question wakes the agent up
        assert agent.stats().num_lost == 0
