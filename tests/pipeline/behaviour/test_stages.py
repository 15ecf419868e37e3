"""What `prepare`, `augment` and `finish` must do; it is tried before anything starts."""

import random
import threading

import numpy as np
import pytest
import torch
from pipeline_datasets import COUNTS
from pipeline_harness import serving

from optuna_fleet import FleetConfigError, SharedPipeline

N = 20


class Rows:
    """Sample i is (a row of i's, i)."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        COUNTS[index] += 1
        return torch.full((4,), float(index)), index


def noisy(sample):
    return sample[0] + torch.rand(4), sample[1]


def sometimes(sample):
    """Draws, but does nothing with it for most samples."""
    return (sample[0] + 1 if random.random() > 0.999 else sample[0]), sample[1]


def counting(sample, counter=iter(range(1_000_000))):  # noqa: B008
    return sample[0] + next(counter), sample[1]


def half(batch):
    return [batch[0] / 2, batch[1]]


def centred(batch):
    return [batch[0] - batch[0].sum(), batch[1]]


@pytest.mark.parametrize("start", [lambda p: p.packed(), lambda p: p.inline()])
@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ({"prepare": noisy}, "`prepare` gives draws random numbers. Leave all that is random to"),
        ({"prepare": sometimes}, "`prepare` gives draws random numbers"),
        ({"prepare": counting}, "`prepare` gives is not the same each time, but it is kept"),
        (
            {"prepare": lambda s: (*s, np.random.default_rng().random())},
            "`prepare` gives is not the same",
        ),
        ({"prepare": lambda s: threading.Lock()}, "`prepare` gives can't be kept .*pickle"),
        ({"augment": noisy, "finish": centred}, "`finish` does not give the same for a batch as"),
    ],
)
def test_stages_that_do_not_do_what_they_must(start, stages, words):
    with pytest.raises(FleetConfigError, match=f"For sample 0 of data set 'train' {words}"):
        start(SharedPipeline(train=Rows(), **stages))


class Drawing(Rows):
    def __getitem__(self, index):
        return noisy(super().__getitem__(index))


def test_without_prepare_the_data_set_itself_must_be_the_same_each_time():
    with pytest.raises(
        FleetConfigError, match=r"dataset\[index\], without a `prepare`, draws rand"
    ):
        SharedPipeline(train=Drawing(), augment=noisy).packed()


def test_a_fixed_data_set_is_tried_too_and_one_without_stages_is_not():
    with pytest.raises(FleetConfigError, match="of data set 'val'"):
        SharedPipeline(train=Rows(), val=Rows(), prepare={"val": noisy}).packed()
    COUNTS[:] = 0
    SharedPipeline(train=Drawing(), val=Rows(), finish=half).packed()
    assert COUNTS.sum() == 0


class Torn(Rows):
    def __getitem__(self, index):
        if index < 3:
            raise OSError("torn")
        return super().__getitem__(index)


def test_the_first_sample_that_does_not_raise_is_tried():
    with pytest.raises(FleetConfigError, match="For sample 3 of data set 'train'"):
        SharedPipeline(train=Torn(), prepare=noisy).packed()


@pytest.mark.parametrize("in_place", [False, True])
def test_stages_give_what_they_give_one_after_another(in_place):
    def prepare(sample):
        return sample[0] * 3, sample[1]

    def augment(sample):
        row, index = sample
        noise = torch.rand(4)
        return (row.add_(noise) if in_place else row + noise), index

    class Whole(Rows):
        def __getitem__(self, index):
            return half(augment(prepare(super().__getitem__(index))))

    pipeline = SharedPipeline(train=Rows(), prepare=prepare, augment=augment, finish=half)
    wanted = SharedPipeline(train=Whole()).inline()
    with serving(pipeline, chunk_bytes=100) as agent:
        client = agent.client()
        for epoch in (0, 1, 2, 0):
            ours = client.read("train", epoch=epoch, batch_size=7, continues=True)
            theirs = wanted.read("train", epoch=epoch, batch_size=7)
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(one.data[0], other.data[0])
                assert torch.equal(one.data[1], other.data[1])
        assert agent.stats().num_loaded > 0
        assert agent.notices() == []


def test_a_generator_of_a_class_that_pickle_does_not_find_is_noticed_too():
    class Own(random.Random):
        pass

    class Rolling(Rows):
        own = None

        def __getitem__(self, index):
            row, _ = super().__getitem__(index)
            return (row + 1 if self.own.random() > 0.999 else row), index

    rolling = Rolling()
    rolling.own = Own(3)
    with pytest.raises(FleetConfigError, match=r"without a `prepare`, draws random numbers"):
        SharedPipeline(train=rolling, augment=noisy).packed()
