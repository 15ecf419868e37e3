"""The decoded store: what is the same in every epoch is done once, and nothing looks different."""

import os
import re

import pytest
import torch
from pipeline_datasets import COUNTS
from pipeline_harness import permutation, serving
from torchvision.transforms import v2

from optuna_fleet import SharedPipeline, take_apart


class Pictures:
    """Counts how often each picture is loaded."""

    def __init__(self, n, transform=None):
        self.n = n
        self.transform = transform

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        COUNTS[index] += 1
        generator = torch.Generator().manual_seed(index)
        shape = (3, 20 + index % 3, 30)
        image = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return (self.transform(image) if self.transform else image), index


CROP = v2.Compose([v2.CenterCrop(18), v2.RandomCrop(16), v2.ToDtype(torch.float32, scale=True)])


def cropped(dataset, augment=1, finish=2):
    """The options that keep what comes before the random crop."""
    dataset, augment, finish = take_apart(dataset, augment=augment, finish=finish)
    return {"train": dataset, "augment": augment, "finish": finish}


def epochs(client, number=3):
    return [
        torch.cat(
            [
                batch.data[0]
                for batch in client.read("train", epoch=e, batch_size=7, continues=True)
            ]
        )
        for e in range(number)
    ]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def plain():
    """Without stages."""
    with serving(SharedPipeline(train=Pictures(40, CROP))) as agent:
        read = epochs(agent.client())
        assert agent.stats().num_loaded == 0
        assert agent.notices() == []
    return read


def test_later_epochs_load_no_sample_again_and_look_the_same(plain):
    with serving(SharedPipeline(**cropped(Pictures(40, CROP)))) as agent:
        assert same(epochs(agent.client(), 1), plain[:1])
        loaded = COUNTS[:40].copy()
        assert same(epochs(agent.client()), plain)
        # Stages are tried on sample 0. Those that told the size were not stored, and those of
        # one chunk not yet when the next epoch was begun beside it.
        assert (COUNTS[1:40] - loaded[1:]).sum() <= 16
        stats = agent.stats()
        assert agent.notices() == []
    assert stats.num_loaded >= 80 - 16
    assert 40 * 3 * 18 * 18 <= stats.decoded_bytes <= 1 << 20


def test_a_first_sample_that_is_skipped_does_not_spoil_the_others():
    class Torn(Pictures):
        def __getitem__(self, index):
            if index in (0, 1):
                raise OSError(f"corrupt {index}")
            return super().__getitem__(index)

    def augment(sample):
        return sample[0].float() + torch.rand(()), sample[1]

    pipeline = SharedPipeline(train=Torn(30), prepare=first_rows, augment=augment, on_error="skip")
    with serving(pipeline) as agent:
        for epoch in range(2):
            batches = agent.client().read("train", epoch=epoch, batch_size=30, continues=True)
            (batch,) = batches
            assert sorted(batch.data[1].tolist()) == sorted([2, 2, *range(2, 30)])


def first_rows(sample):
    return sample[0][:, :8, :8], sample[1]


def test_store_that_is_too_small_keeps_what_it_can(plain):
    pipeline = SharedPipeline(**cropped(Pictures(40, CROP)))
    with serving(pipeline, memory_bytes=18 * 4096) as agent:
        assert same(epochs(agent.client()), plain)
        stats = agent.stats()
        (notice,) = [text for text in agent.notices() if "decoded store" in text]
    share = re.search(r"about (\d+)% of the samples of data set 'train'", notice)[1]
    assert 40 <= int(share) <= 55
    assert re.search(r"ms of a core each, .* s per epoch\. A larger memory_bytes", notice)
    # Up to 24 samples fit; how many of them are there in time for which epoch, the load decides.
    assert 0 < stats.num_loaded <= 48
    assert stats.decoded_bytes <= 6 * 4096
    assert stats.peak_bytes <= 18 * 4096


class Unlike(Pictures):
    """The first samples are small, the others ten times as large."""

    def __getitem__(self, index):
        side = 12 if index in (0, *self.first) else 40
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (3, side, side), dtype=torch.uint8, generator=generator)
        return self.transform(image), index


def test_the_budget_holds_where_the_first_samples_are_small():
    dataset = Unlike(1000, v2.Compose([v2.RandomCrop(10), v2.RandomHorizontalFlip()]))
    dataset.first = permutation(0, "train", 0, 1000)[:2].tolist()  # these tell the sizes
    budget = 3 << 20
    pipeline = SharedPipeline(**cropped(dataset, 0, None))
    with serving(pipeline, memory_bytes=budget, chunk_bytes=10_000) as agent:
        client = agent.client()
        for epoch in range(10):
            for _ in client.read("train", epoch=epoch, batch_size=8, continues=True):
                pass
        stats = agent.stats()
    assert 900_000 < stats.decoded_bytes <= 1 << 20
    assert stats.peak_bytes <= budget


def test_killed_preprocessor_leaves_no_half_written_sample(plain):
    pipeline = SharedPipeline(**cropped(Pictures(40, CROP)))
    with serving(pipeline, chunk_bytes=1000) as agent:
        client = agent.client()
        read = []
        for epoch in range(3):
            batches = iter(client.read("train", epoch=epoch, batch_size=5))
            parts = [next(batches).data[0]]
            for pid in agent.pids():
                os.kill(pid, 9)
            parts += [batch.data[0] for batch in batches]
            read.append(torch.cat(parts))
        assert agent.stats().num_loaded > 0
    assert same(read, plain)
