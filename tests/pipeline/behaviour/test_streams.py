"""Streams (``IterableDataset``): one pass is an epoch, the same for all trials."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from exchange_harness import nodes
from pipeline_harness import everywhere, plain, samples, serving
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from optuna_fleet import PreprocessingError, SharedPipeline

N = 50


class Numbers(IterableDataset[Any]):
    """The numbers below n, of which each worker gets every so many."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        yield from range(info.id, self.n, info.num_workers)


class Sized(Numbers):
    def __len__(self) -> int:
        return self.n


class Parts(Sized):
    """Of unlike length, with all that a stream may depend on; some workers get nothing."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        self.number = 0  # a worker of a DataLoader has it for itself
        for index in range(self.n):
            if index % 7 % info.num_workers == info.id:
                self.number += 1
                noise = random.random(), np.random.rand(), torch.rand(3)
                yield index, self.epoch, self.number, info.seed, noise


def shared(**data: Any) -> SharedPipeline:
    return SharedPipeline(**data, collate_fn=list)


def interleaved(n: int, shards: int) -> list[int]:
    parts = [list(range(first, n, shards)) for first in range(shards)]
    return [part[turn] for turn in range(n) for part in parts if turn < len(part)]


@pytest.mark.parametrize("shards", [8, 1])
def test_shards_are_read_in_turn(shards: int) -> None:
    data = {"train": Numbers(), "train_sized": Sized(), "val": Numbers(3), "test": [5, 6]}
    found = everywhere(data, shards=shards)
    assert found.pop("test") == [[5, 6]] * 2
    assert found == {name: [interleaved(data[name].n, shards)] * 2 for name in found}  # type: ignore[attr-defined]


def test_samples_come_as_from_the_workers_of_a_loader() -> None:
    theirs = [*DataLoader(Parts(), batch_size=None, num_workers=2)]  # one of each in turn
    with serving(shared(train=Parts(), shards=2)) as agent:
        ours = samples(agent.client())
    assert [(row[0], row[2]) for row in ours] == [(row[0], row[2]) for row in theirs]


def test_every_reader_gets_the_same_whatever_its_batches_and_pace() -> None:
    wanted = everywhere({"train": Parts()}, seed=3)["train"]
    assert [row[0] for row in wanted[0]] == [row[0] for row in wanted[1]]
    assert [{row[1] for row in epoch} for epoch in wanted] == [{0}, {1}]
    assert all(a[4:] != b[4:] for a, b in zip(*wanted, strict=True))
    with serving(shared(train=Parts(), seed=3), chunk_bytes=1000) as agent:
        early = iter(agent.client().read("train", epoch=0, batch_size=16))
        first = next(early).data
        for epoch in (1, 0):
            assert samples(agent.client(), epoch=epoch, batch_size=9) == wanted[epoch]
        rest = [sample for batch in early for sample in batch.data]
        assert list(map(plain, first + rest)) == wanted[0]
        assert agent.stats().preprocessed == 2 * N


def test_little_memory_costs_time_only() -> None:
    pipeline = shared(train=Parts(400), seed=3)
    with serving(pipeline, chunk_bytes=700, memory_bytes=20_000) as agent:
        readers = [iter(agent.client().read("train", epoch=e, batch_size=9)) for e in (0, 1, 0)]
        found = [[*next(reader).data] for reader in readers]
        for at in (2, 0, 1):
            found[at] += [sample for batch in readers[at] for sample in batch.data]
        assert agent.stats().repeated > 0
    wanted = [samples(pipeline.inline(), epoch=epoch) for epoch in (0, 1, 0)]
    assert [list(map(plain, each)) for each in found] == wanted


def test_a_maker_that_is_killed_is_replaced_by_one_that_reads_on() -> None:
    pipeline = shared(train=Parts(400), seed=3)
    with serving(pipeline, chunk_bytes=1000, memory_bytes=40_000) as agent:
        found = []
        for step, batch in enumerate(agent.client().read("train", epoch=1, batch_size=16)):
            found += list(map(plain, batch.data))
            for pid in agent.pids() if step in (0, 5, 10) else ():
                os.kill(pid, 9)
        assert agent.stats().num_lost >= 1
    assert found == samples(pipeline.inline(), epoch=1)


def test_shards_of_ranks_and_a_beginning_in_the_midst_of_an_epoch() -> None:
    with serving(shared(train=Sized())) as agent:
        client = agent.client()
        ranks = [samples(client, batch_size=N, rank=rank, world_size=2) for rank in range(2)]
        assert ranks[0] + ranks[1] == interleaved(N, 8)
        assert samples(client, first_step=3) == interleaved(N, 8)[21:]


def test_stages_are_for_streams_too() -> None:
    options = {"prepare": lambda n: n * 2, "augment": lambda n: (n, torch.rand(()))}
    first, other = everywhere({"train": Sized()}, seed=1, **options)["train"]
    assert [number for number, _ in first] == [2 * n for n in interleaved(N, 8)]
    assert [noise for _, noise in first] != [noise for _, noise in other]


class Torn(Sized):
    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            if number == 20:
                raise OSError("the connection is lost")
            yield number


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_what_a_stream_raises_is_told_with_its_traceback(on_error: str) -> None:
    with serving(SharedPipeline(train=Torn(), on_error=on_error)) as agent:
        with pytest.raises(PreprocessingError, match="OSError: the connection is lost") as error:
            samples(agent.client())
        assert 'raise OSError("the connection is lost")' in str(error.value)
    with pytest.raises(OSError, match="the connection is lost"):
        samples(shared(train=Torn()).inline())


class Opened(Sized):
    def __iter__(self) -> Iterator[Any]:
        with open(os.devnull):
            yield from super().__iter__()


def test_what_passes_have_open_is_closed_when_they_are_given_up() -> None:
    client, num_open = SharedPipeline(train=Opened(), shards=1).inline(), list[int]()
    gc.disable()  # that would close it too, some day
    try:
        for epoch in range(40):
            next(iter(client.read("train", epoch=epoch, batch_size=2)))
            num_open.append(len(os.listdir("/proc/self/fd")))
    finally:
        gc.enable()
    assert num_open[-1] == num_open[20]


class All(Sized):
    """Does not ask who it is."""

    def __iter__(self) -> Iterator[Any]:
        yield from range(self.n)


class Short(Sized):
    def __iter__(self) -> Iterator[Any]:
        yield from [*super().__iter__()][:3]


@pytest.mark.parametrize(("kind", "number"), [(All, "more"), (Short, "only 24")])
def test_a_pass_that_is_of_another_length_is_told(kind: type[Sized], number: str) -> None:
    message = rf"gave {number} samples in one pass, but it is to have 50.*get_worker_info"
    error = pytest.raises(PreprocessingError, match=message)
    with serving(SharedPipeline(train=kind())) as agent, error:
        samples(agent.client())
    assert samples(shared(train=All(), shards=1).inline()) == [*range(N)]


def test_counting_leaves_the_users_process_as_it_was() -> None:
    class Drawing(Numbers):
        passes = 0

        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            yield random.random(), np.random.rand(), torch.rand(())

    dataset = Drawing()
    torch.manual_seed(1)
    random.seed(1)
    wanted = random.random(), torch.rand(()).item()
    torch.manual_seed(1)
    random.seed(1)
    assert SharedPipeline(train=dataset).spec().dataset("train").num_samples == 8
    assert (random.random(), torch.rand(()).item()) == wanted
    assert dataset.passes == 0
    assert get_worker_info() is None


def test_of_a_loader() -> None:
    loaders = {"train": DataLoader(Sized(), batch_size=4), "val": DataLoader(Numbers(3))}
    pipeline = SharedPipeline.from_dataloader(**loaders)
    assert [each.shuffled for each in pipeline.spec().datasets] == [True, False]
    assert samples(pipeline.inline()) == interleaved(N, 8)


def test_one_node_reads_a_stream_for_all() -> None:
    pipeline = shared(train=Parts(300), seed=3)
    wanted = [samples(pipeline.inline(), epoch=epoch) for epoch in range(2)]
    with nodes(pipeline, 3, patience_s=600.0) as found:
        for node in found:
            assert [samples(node.client(), epoch=epoch) for epoch in range(2)] == wanted
        stats = [node.stats() for node in found]
    assert sorted(each.preprocessed for each in stats) == [0, 0, 600]


def test_a_stream_of_hugging_face() -> None:
    rows = datasets.Dataset.from_dict({"x": [*range(30)]}).to_iterable_dataset(num_shards=3)
    stream = rows.shuffle(seed=1, buffer_size=5).map(lambda row: {"y": 2 * row["x"]})
    with serving(SharedPipeline(train=stream)) as agent:
        client = agent.client()
        epochs = [[b.data for b in client.read("train", epoch=e, batch_size=7)] for e in (0, 1, 0)]
    found = [[x for batch in epoch for x in batch["x"].tolist()] for epoch in epochs]
    assert found[0] == found[2] != found[1]
    assert sorted(found[0]) == sorted(found[1]) == [*range(30)]
    assert all((batch["y"] == 2 * batch["x"]).all() for epoch in epochs for batch in epoch)
