"""Streams (``IterableDataset``): one pass is an epoch, the same for all trials."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from exchange_harness import nodes
from pipeline_harness import PipelineClient, serving
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


def read(
    client: PipelineClient, epoch: int = 0, batch_size: int = 7, name: str = "train", **more: Any
) -> list[Any]:
    batches = client.read(name, epoch=epoch, batch_size=batch_size, **more)
    return [batch.data for batch in batches]


def numbers(batches: list[Any]) -> list[int]:
    return [int(each) for batch in batches for each in (batch if batch is not None else [])]


def rows(batches: list[Any]) -> list[Any]:
    """What makes one sample, for each."""
    found = []
    for indices, epochs, counts, seeds, (python, numpy, tensors) in batches:
        columns = (indices, epochs, counts, seeds, python, numpy, tensors)
        found += list(zip(*(each.tolist() for each in columns), strict=True))
    return found


def interleaved(n: int, shards: int) -> list[int]:
    parts = [list(range(first, n, shards)) for first in range(shards)]
    return [part[turn] for turn in range(n) for part in parts if turn < len(part)]


@pytest.mark.parametrize("shards", [8, 1])
def test_shards_are_read_in_turn(shards: int) -> None:
    data = {"train": Numbers(), "train_sized": Sized(), "val": Numbers(3)}
    pipeline = SharedPipeline(**data, shards=shards)
    inline = pipeline.inline()
    with serving(pipeline) as agent:
        client = agent.client()
        for name, stream in data.items():
            batches = read(client, name=name)
            assert numbers(batches) == interleaved(stream.n, shards)
            assert [len(batch) for batch in batches] == [7] * (stream.n // 7) + [stream.n % 7]
            assert numbers(read(inline, name=name)) == interleaved(stream.n, shards)
            assert pipeline.spec().dataset(name).num_samples == stream.n
            assert numbers(read(client, 1, name=name)) == numbers(batches)


def test_samples_come_as_from_the_workers_of_a_loader() -> None:
    loader = DataLoader(Parts(), batch_size=None, num_workers=2)
    theirs = [row[:3] for row in loader]  # one sample of each worker in turn
    with serving(SharedPipeline(train=Parts(), shards=2)) as agent:
        ours = [row[:3] for row in rows(read(agent.client()))]
    assert [row[0] for row in ours] == [row[0] for row in theirs]
    assert [row[2] for row in ours] == [row[2] for row in theirs]


def test_every_reader_gets_the_same_whatever_its_batches_and_pace() -> None:
    pipeline = SharedPipeline(train=Parts(), seed=3)
    wanted = [rows(read(pipeline.inline(), epoch)) for epoch in range(2)]
    assert [row[0] for row in wanted[0]] == [row[0] for row in wanted[1]]
    assert [{row[1] for row in epoch} for epoch in wanted] == [{0}, {1}]
    assert all(a[4:] != b[4:] for a, b in zip(*wanted, strict=True))
    with serving(pipeline, chunk_bytes=1000) as agent:
        early = iter(agent.client().read("train", epoch=0, batch_size=16))
        first = [next(early).data]
        for batch_size in (1, 9, 50):
            for epoch in (1, 0):
                assert rows(read(agent.client(), epoch, batch_size)) == wanted[epoch]
        assert rows(first + [batch.data for batch in early]) == wanted[0]
        stats = agent.stats()
    assert stats.preprocessed == 2 * N


def test_little_memory_costs_time_only() -> None:
    pipeline = SharedPipeline(train=Parts(400), seed=3)
    wanted = [rows(read(pipeline.inline(), epoch)) for epoch in range(2)]
    with serving(pipeline, chunk_bytes=700, memory_bytes=20_000) as agent:
        readers = [iter(agent.client().read("train", epoch=e, batch_size=9)) for e in (0, 1, 0)]
        found: list[list[Any]] = [[next(reader).data] for reader in readers]
        for at in (2, 0, 1):
            found[at] += [batch.data for batch in readers[at]]
        assert agent.stats().repeated > 0
    assert [rows(each) for each in found] == [wanted[0], wanted[1], wanted[0]]


def test_a_maker_that_is_killed_is_replaced_by_one_that_reads_on() -> None:
    pipeline = SharedPipeline(train=Parts(400), seed=3)
    with serving(pipeline, chunk_bytes=1000, memory_bytes=40_000) as agent:
        batches = iter(agent.client().read("train", epoch=1, batch_size=16))
        found = [next(batches).data]
        for _ in range(3):
            for pid in agent.pids():
                os.kill(pid, 9)
            found += [next(batches).data for _ in range(5)]
        found += [batch.data for batch in batches]
        assert agent.stats().num_lost >= 1
    assert rows(found) == rows(read(pipeline.inline(), 1))


def test_shards_of_ranks_and_a_beginning_in_the_midst_of_an_epoch() -> None:
    with serving(SharedPipeline(train=Sized())) as agent:
        client = agent.client()
        ranks = [read(client, rank=rank, world_size=2) for rank in range(2)]
        both = [each for pair in zip(*ranks, strict=True) for each in pair]
        assert numbers(both) == numbers(read(client))
        assert numbers(read(client, first_step=3)) == interleaved(N, 8)[21:]


def test_stages_are_for_streams_too_and_other_data_sets_beside_them() -> None:
    options = {"prepare": {"train": lambda n: n * 2}, "augment": lambda n: (n, torch.rand(()))}
    pipeline = SharedPipeline(train=Sized(), val=[5, 6, 7], seed=1, **options)
    wanted = [read(pipeline.inline(), epoch) for epoch in range(2)]
    with serving(pipeline) as agent:
        client = agent.client()
        found = [read(client, epoch) for epoch in range(2)]
        assert numbers(read(client, name="val")) == [5, 6, 7]
        assert agent.stats().num_loaded == 0
    for ours, theirs in zip(chain(*found), chain(*wanted), strict=True):
        assert [each.tolist() for each in ours] == [each.tolist() for each in theirs]
    assert found[0][0][0].tolist() == [2 * n for n in interleaved(N, 8)[:7]]
    assert found[0][0][1].tolist() != found[1][0][1].tolist()


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
            read(agent.client())
        assert 'raise OSError("the connection is lost")' in str(error.value)
    with pytest.raises(OSError, match="the connection is lost"):
        read(SharedPipeline(train=Torn()).inline())


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
        read(agent.client())
    with serving(SharedPipeline(train=All(), shards=1)) as agent:
        assert numbers(read(agent.client())) == [*range(N)]


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
    assert numbers(read(pipeline.inline())) == interleaved(N, 8)


def test_one_node_reads_a_stream_for_all() -> None:
    pipeline = SharedPipeline(train=Parts(300), val=[*range(300)], seed=3)
    wanted = [rows(read(pipeline.inline(), epoch)) for epoch in range(2)]
    with nodes(pipeline, 3, patience_s=600.0) as found:
        for node in found:
            assert [rows(read(node.client(), epoch)) for epoch in range(2)] == wanted
        stats = [node.stats() for node in found]
    assert sorted(each.preprocessed for each in stats) == [0, 0, 600]


def test_a_stream_of_hugging_face() -> None:
    rows = datasets.Dataset.from_dict({"x": [*range(30)]}).to_iterable_dataset(num_shards=3)
    stream = rows.shuffle(seed=1, buffer_size=5).map(lambda row: {"y": 2 * row["x"]})
    with serving(SharedPipeline(train=stream)) as agent:
        epochs = [read(agent.client(), epoch) for epoch in (0, 1, 0)]
    found = [[x for batch in epoch for x in batch["x"].tolist()] for epoch in epochs]
    assert found[0] == found[2] != found[1]
    assert sorted(found[0]) == sorted(found[1]) == [*range(30)]
    assert all((batch["y"] == 2 * batch["x"]).all() for epoch in epochs for batch in epoch)
