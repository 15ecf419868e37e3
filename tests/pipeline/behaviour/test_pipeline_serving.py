"""Agent, preprocessors and readers as processes."""

import contextlib
import os
import signal
import threading
from functools import partial

import pytest
import torch
from pipeline_datasets import (
    COUNTS,
    SWITCH,
    Augmented,
    Counted,
    Deadly,
    Raising,
    Unloadable,
    each_was_made,
)
from pipeline_harness import MAX_DEATHS, Forked, permutation, serving, vanish

from optuna_fleet import SharedPipeline
from optuna_fleet.exceptions import PreprocessingError
from tests import leftovers


def labels(client, name="train", **arguments):
    """The second leaf of every batch, in order."""
    batches = client.read(name, **{"epoch": 0, "batch_size": 7, **arguments})
    return [label for batch in batches for label in batch.data[1].tolist()]


@pytest.mark.parametrize("n", [1, 2, 5, 150])
def test_readers_of_unlike_batch_sizes_share_each_sample(n):
    epochs = range(2)

    def read(client, batch_size):
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


def test_fixed_data_set_is_preprocessed_once(agent):
    client = agent.client()
    for epoch in range(3):
        assert labels(client, "val", epoch=epoch) == list(range(20))
    assert each_was_made(20, 1)


def test_batches_of_the_canonical_order(agent):
    order = permutation(3, "train", 4, 150)
    batches = agent.client().read("train", epoch=4, batch_size=64)
    for number, batch in enumerate(batches):
        indices = order[64 * number : 64 * (number + 1)]
        assert batch.local_size == batch.global_size == len(indices)
        assert torch.equal(batch.data[1], torch.from_numpy(indices))
        assert torch.equal(
            batch.data[0], torch.from_numpy(indices)[:, None].expand(-1, 16).float()
        )


@pytest.mark.parametrize("batch_size", [2, 7, 64])
def test_shards_concatenate_to_the_global_batch(agent, batch_size):
    client = agent.client()
    whole = list(client.read("train", epoch=0, batch_size=batch_size))
    shards = [
        list(client.read("train", epoch=0, batch_size=batch_size, rank=rank, world_size=3))
        for rank in range(3)
    ]
    for batch, *parts in zip(whole, *shards, strict=True):
        assert sum(part.local_size for part in parts) == batch.global_size
        full = [part.data for part in parts if part.data is not None]
        assert len(full) == min(3, batch.global_size)
        assert torch.equal(torch.cat([y for _, y in full]), batch.data[1])
        assert torch.equal(torch.cat([x for x, _ in full]), batch.data[0])


def test_empty_shard_has_a_dummy_where_asked_for():
    with serving(SharedPipeline(val=Counted(7))) as agent:
        client = agent.client()
        arguments = {"epoch": 0, "batch_size": 2, "rank": 2, "world_size": 3}
        for batch in client.read("val", **arguments):
            assert (batch.data, batch.local_size) == (None, 0)
        batches = list(client.read("val", **arguments, dummy=True))
        assert [batch.data[1].tolist() for batch in batches] == [[0], [2], [4], [6]]
        assert [batch.local_size for batch in batches] == [0] * 4
        assert [batch.global_size for batch in batches] == [2, 2, 2, 1]
        assert agent.stats().consumed == 0


def test_augmentation_is_the_same_for_all_and_after_eviction():
    budget = 20_000  # an epoch takes about 100 kB

    def noise(client, epoch, batch_size):
        batches = client.read("train", epoch=epoch, batch_size=batch_size)
        return torch.cat([batch.data[1] for batch in batches])

    pipeline = SharedPipeline(train=Augmented(100), seed=1)
    with serving(pipeline, memory_bytes=budget, chunk_bytes=8000) as agent:
        client, other = agent.client(), agent.client()
        first = noise(client, 0, 4)
        assert not torch.equal(first, noise(client, 1, 4))
        assert torch.equal(first, noise(other, 0, 9))
        stats = agent.stats()
    assert stats.num_dropped > 0
    assert stats.preprocessed > 200
    assert stats.resident_bytes <= budget
    assert stats.peak_bytes <= budget
    with serving(SharedPipeline(train=Augmented(100), seed=1), num_preprocessors=1) as agent:
        assert torch.equal(first, noise(agent.client(), 0, 100))


@pytest.mark.parametrize("memory_bytes", [5_000, 10_000])  # chunks take a page
def test_budget_of_a_chunk_or_two_serves_everyone_and_is_kept(memory_bytes):
    pipeline = SharedPipeline(train=Counted(150))
    with serving(pipeline, memory_bytes=memory_bytes, chunk_bytes=1000) as agent:
        readers = [
            Forked(partial(labels, agent.client(), batch_size=size)) for size in (3, 40, 150)
        ]
        assert all(sorted(reader.result()) == list(range(150)) for reader in readers)
        assert 0 < agent.stats().peak_bytes <= memory_bytes


def test_kept_iterators_do_not_block_each_other_where_memory_is_short():
    pipeline = SharedPipeline(train=Counted(150))
    with serving(pipeline, memory_bytes=20_000, chunk_bytes=1000) as agent:
        client = agent.client()
        iterators = [iter(client.read("train", epoch=e, batch_size=20)) for e in range(12)]
        read = [[next(iterator).data[1].tolist() for iterator in iterators] for _ in range(7)]
        assert [sum(len(batches[e]) for batches in read) for e in range(12)] == [140] * 12
        assert agent.stats().peak_bytes <= 20_000
        for iterator in iterators:
            iterator.close()


def test_budget_below_one_chunk_is_a_clear_error():
    error = pytest.raises(PreprocessingError, match=r"'train' takes \d+ bytes.*larger memory_b")
    pipeline = SharedPipeline(train=Counted(150))
    with serving(pipeline, memory_bytes=1, chunk_bytes=1000) as agent, error:
        labels(agent.client())


class LateLarge(Counted):
    """Sample i is a text of 4000 bytes, but for the first, which is empty."""

    def __getitem__(self, index):
        return "x" * 4000 if index else ""


@pytest.mark.parametrize("collate_fn", [None, list])
def test_small_budget_serves_samples_of_unlike_size_whose_first_is_small(collate_fn):
    pipeline = SharedPipeline(val=LateLarge(600), collate_fn=collate_fn)
    with serving(pipeline, memory_bytes=64 << 10) as agent:
        read = [batch.data for batch in agent.client().read("val", epoch=0, batch_size=20)]
        assert agent.stats().peak_bytes <= 64 << 10
    assert [len(text) for batch in read for text in batch] == [0] + 599 * [4000]


class Unpicklable(Counted):
    """Sample 1 can't be pickled."""

    def __getitem__(self, index):
        return threading.Lock() if index == 1 else index


def test_sample_that_can_not_be_stored_is_an_error_that_says_so():
    with serving(SharedPipeline(val=Unpicklable(20), collate_fn=list)) as agent:
        with pytest.raises(PreprocessingError, match=r"could not be stored.*pickle"):
            list(agent.client().read("val", epoch=0, batch_size=4))
        assert agent.stats().num_lost == 0


def test_error_names_the_sample_and_spares_the_others():
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
        assert "preprocessor.py" not in text
        assert labels(client, "test") == list(range(64))
        COUNTS[SWITCH] = 1  # it works from now on
        assert [b.data.numel() for b in client.read("val", epoch=0, batch_size=64)] == [64]


def test_data_set_that_can_not_be_unpickled():
    with serving(SharedPipeline(val=Unloadable(8))) as agent:
        for client in (agent.client(), agent.client()):
            with pytest.raises(PreprocessingError, match=r"Unpickling.*OSError: no such disk"):
                labels(client, "val")


def test_work_of_a_killed_preprocessor_is_redone():
    COUNTS[SWITCH] = 1
    with serving(SharedPipeline(val=Deadly(64)), chunk_bytes=64) as agent:
        batches = list(agent.client().read("val", epoch=0, batch_size=10))
        assert torch.cat([batch.data for batch in batches]).tolist() == list(range(64))
        assert agent.stats().num_lost == 1


def test_killed_idle_preprocessors_are_replaced(agent):
    client = agent.client()
    labels(client, epoch=20)
    for pid in agent.pids():
        os.kill(pid, signal.SIGKILL)
    assert sorted(labels(client, epoch=21)) == list(range(150))


def test_chunk_that_kills_each_time_is_an_error_until_asked_for_again():
    COUNTS[SWITCH] = MAX_DEATHS + 1
    with serving(SharedPipeline(val=Deadly(64), test=Counted(64)), chunk_bytes=64) as agent:
        client = agent.client()
        with pytest.raises(PreprocessingError, match=r"Preprocessors died over a chunk.*'val'"):
            list(client.read("val", epoch=0, batch_size=64))
        assert labels(client, "test") == list(range(64))
        assert len(list(client.read("val", epoch=0, batch_size=64))) == 1


def test_death_over_the_sample_that_tells_the_size():
    COUNTS[SWITCH] = MAX_DEATHS
    with serving(SharedPipeline(val=Deadly(18, at=0))) as agent:
        batches = list(agent.client().read("val", epoch=0, batch_size=9))
        assert torch.cat([batch.data for batch in batches]).tolist() == list(range(18))
        assert agent.stats().num_lost == MAX_DEATHS


def test_killed_reader_frees_what_it_held():
    with serving(SharedPipeline(val=Counted(64)), chunk_bytes=64) as agent:
        client = agent.client()
        told, tell = os.pipe()

        def hold():
            for _ in client.read("val", epoch=0, batch_size=64):
                os.write(tell, b"x")
                signal.pause()

        reader = Forked(hold)
        vanish(client)
        os.read(told, 1)
        assert agent.stats().lent_bytes > 0
        reader.kill()
        os.close(told)
        os.close(tell)
        # A reader's death is seen at the latest with the next event after it.
        labels(agent.client(), "val")
        assert agent.stats().lent_bytes == 0


def test_leaving_the_loop_gives_back_and_reports():
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
        assert labels(client, "val") == list(range(64))


def test_changes_in_place_stay_private(agent):
    client, other = agent.client(), agent.client()
    iterator = iter(other.read("train", epoch=9, batch_size=50))
    kept = [next(iterator).data[0]]
    wanted = kept[0].clone()
    for batch in client.read("train", epoch=9, batch_size=50):
        batch.data[0].zero_()
    kept += [batch.data[0] for batch in iterator]
    assert torch.equal(kept[0], wanted)
    again = [batch.data[0] for batch in client.read("train", epoch=9, batch_size=50)]
    assert torch.equal(torch.cat(again), torch.cat(kept))
    assert torch.cat(again)[:, 0].sum() == sum(range(150))


def test_two_passes_of_one_reader_do_not_see_what_is_written_into_the_other(agent):
    client = agent.client()
    wanted = [batch.data[0].clone() for batch in client.read("val", epoch=0, batch_size=8)]
    both = (client.read("val", epoch=0, batch_size=8) for _ in range(2))
    for one, other, clean in zip(*both, wanted, strict=True):
        one.data[0].zero_()
        assert torch.equal(other.data[0], clean)


def test_stopped_reader_does_not_hold_up_the_others():
    with serving(SharedPipeline(train=Counted(150)), chunk_bytes=200) as agent:
        told, tell = os.pipe()
        client = agent.client()

        def stopped():
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


def test_waiting_is_measured(agent):
    client = agent.client()
    ends = []
    client.begin(0, lambda: ends.append(client.waited_s))
    labels(client, epoch=30)
    assert ends[-1] == client.waited_s > 0
    assert ends[::2] == [0.0, *ends[1:-1:2]]  # each wait begins where the one before ended
    assert agent.stats().use.stalled_s > 0
    assert agent.stats().use.busy_s > 0


def test_nothing_is_left_in_shared_memory():
    before = leftovers.shared_memory()
    with serving(SharedPipeline(train=Counted(150))) as agent:
        labels(agent.client())
        assert leftovers.shared_memory() <= before
    assert each_was_made(150, 1)
