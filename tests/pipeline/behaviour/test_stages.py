"""`prepare`, `augment`, `finish`: tried before anything starts, and done as seldom as may be."""

import os
import random
import threading

import numpy as np
import pytest
import torch
from pipeline_datasets import COUNTS
from pipeline_harness import permutation, serving
from torch.utils.data import Subset, TensorDataset
from torchvision.transforms import v2

from optuna_fleet import FleetConfigError, PreprocessingError, SharedPipeline, take_apart

N = 20


class Rows:
    """Sample i is (a row of i's, i)."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        COUNTS[index] += 1
        return torch.full((4,), float(index)), index


# -- what they must -------------------------------------------------------------------------------


def noisy(sample):
    return sample[0] + torch.rand(4), sample[1]


def sometimes(sample):
    """Draws, but does nothing with it for most samples."""
    return (sample[0] + 1 if random.random() > 0.999 else sample[0]), sample[1]


def counting(sample, counter=iter(range(1_000_000))):  # noqa: B008
    return sample[0] + next(counter), sample[1]


def unseeded(sample):
    return *sample, np.random.default_rng().random()


def centred(batch):
    return [batch[0] - batch[0].sum(), batch[1]]


class Drawing(Rows):
    def __getitem__(self, index):
        return noisy(super().__getitem__(index))


class Rolling(Rows):
    """Draws from a generator of a class that pickle does not find, and seldom uses it."""

    def __init__(self):
        class Own(random.Random):
            pass

        self.own = Own(3)

    def __getitem__(self, index):
        row, _ = super().__getitem__(index)
        return (row + 1 if self.own.random() > 0.999 else row), index


class Torn(Rows):
    def __getitem__(self, index):
        if index < 3:
            raise OSError("torn")
        return super().__getitem__(index)


WRONG = [
    ({"prepare": noisy}, "0 of data set 'train' `prepare` gives draws random numbers"),
    ({"prepare": sometimes}, "`prepare` gives draws random numbers"),
    ({"prepare": counting}, "`prepare` gives is not the same each time"),
    ({"prepare": unseeded}, "`prepare` gives is not the same"),
    ({"prepare": lambda sample: threading.Lock()}, "`prepare` gives can't be kept .*pickle"),
    ({"augment": noisy, "finish": centred}, "`finish` does not give the same for a batch as"),
    ({"train": Drawing(), "augment": noisy}, r"dataset\[index\], without a `prepare`, draws"),
    ({"train": Rolling(), "augment": noisy}, "without a `prepare`, draws random numbers"),
    ({"val": Rows(), "prepare": {"val": noisy}}, "of data set 'val'"),
    ({"train": Torn(), "prepare": noisy}, "For sample 3 of data set 'train'"),
]


@pytest.mark.parametrize("start", [lambda p: p.packed(), lambda p: p.inline()])
@pytest.mark.parametrize(("given", "words"), WRONG)
def test_stages_that_do_not_do_what_they_must(start, given, words):
    with pytest.raises(FleetConfigError, match=words):
        start(SharedPipeline(**{"train": Rows(), **given}))


def half(batch):
    return [batch[0] / 2, batch[1]]


def test_a_data_set_without_stages_is_not_tried():
    SharedPipeline(train=Drawing(), val=Rows(), finish=half).packed()
    assert COUNTS.sum() == 0


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one.data, other.data, strict=True):
            assert (a.dtype, a.shape, a.is_conj()) == (b.dtype, b.shape, b.is_conj())
            assert torch.equal(a.to_dense(), b.to_dense())


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
        for epoch in (0, 1, 2, 0):
            ours = agent.client().read("train", epoch=epoch, batch_size=7, continues=True)
            assert_same(ours, wanted.read("train", epoch=epoch, batch_size=7))
        assert agent.stats().num_loaded > 0
        assert agent.notices() == []


# -- the decoded store ----------------------------------------------------------------------------


class Pictures:
    """Counts how often each picture is loaded."""

    def __init__(self, n, transform, small=()):
        self.n, self.transform, self.small = n, transform, small

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        COUNTS[index] += 1
        generator = torch.Generator().manual_seed(index)
        side = 18 if index in self.small else 40
        image = torch.randint(0, 256, (3, side, side), dtype=torch.uint8, generator=generator)
        return self.transform(image), index


CROP = v2.Compose([v2.CenterCrop(18), v2.RandomCrop(16), v2.ToDtype(torch.float32, scale=True)])


def cropped(augment=1, finish=2, n=40, transform=CROP, **more):
    """The options that keep what comes before the random crop."""
    dataset = Pictures(n, transform, **more)
    dataset, augment, finish = take_apart(dataset, augment=augment, finish=finish)
    return {"train": dataset, "augment": augment, "finish": finish}


def images(agent, number=3, kill=False):
    found = []
    for epoch in range(number):
        batches = iter(agent.client().read("train", epoch=epoch, batch_size=7, continues=True))
        found.append(next(batches).data[0])
        for pid in agent.pids() if kill else ():
            os.kill(pid, 9)
        found += [batch.data[0] for batch in batches]
    return found


@pytest.fixture(scope="module")
def plain():
    """Without stages."""
    with serving(SharedPipeline(train=Pictures(40, CROP))) as agent:
        read = images(agent)
        assert agent.stats().num_loaded == 0
    return read


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_later_epochs_load_no_sample_again_and_look_the_same(plain):
    with serving(SharedPipeline(**cropped())) as agent:
        images(agent, 1)
        loaded = COUNTS[:40].copy()
        assert same(images(agent), plain)
        # Stages are tried on sample 0. Those that told the size were not stored, and those of
        # one chunk not yet when the next epoch was begun beside it.
        assert (COUNTS[1:40] - loaded[1:]).sum() <= 16
        stats = agent.stats()
        assert agent.notices() == []
    assert stats.num_loaded >= 80 - 16
    assert 40 * 3 * 18 * 18 <= stats.decoded_bytes <= 1 << 20


def test_a_first_sample_that_is_skipped_does_not_spoil_the_others():
    pipeline = SharedPipeline(train=Torn(), prepare=half, augment=noisy, on_error="skip")
    with serving(pipeline) as agent:
        for epoch in range(2):
            (batch,) = agent.client().read("train", epoch=epoch, batch_size=N, continues=True)
            assert {*batch.data[1].tolist()} == {*range(3, N)}


def test_a_store_that_is_too_small_keeps_what_it_can(plain):
    pipeline = SharedPipeline(**cropped(), train_few=cropped(n=2)["train"])
    with serving(pipeline, memory_bytes=18 * 4096) as agent:
        few = [next(iter(agent.client().read("train_few", epoch=0, batch_size=2)))]
        assert same(images(agent), plain)
        few += agent.client().read("train_few", epoch=1, batch_size=2)
        stats = agent.stats()
        told = [text for text in agent.notices() if "decoded store" in text]
    assert len(few) == 2
    assert [text for text in told if "'train'" in text] == told  # the few are all there
    assert len(told) == 1
    # Up to 24 samples fit; how many of them are there in time for which epoch, the load decides.
    assert 0 < stats.num_loaded <= 50
    assert stats.decoded_bytes <= 6 * 4096
    assert stats.peak_bytes <= 18 * 4096


def test_the_budget_holds_where_the_first_samples_are_small():
    first = permutation(0, "train", 0, 400)[:2].tolist()  # these tell the sizes
    flip = v2.Compose([v2.RandomCrop(10), v2.RandomHorizontalFlip()])
    budget = 3 << 19
    pipeline = SharedPipeline(**cropped(0, None, n=400, transform=flip, small=(0, *first)))
    with serving(pipeline, memory_bytes=budget, chunk_bytes=10_000) as agent:
        images(agent, 8)
        stats = agent.stats()
    assert 450_000 < stats.decoded_bytes <= 1 << 19
    assert stats.peak_bytes <= budget


def test_a_killed_preprocessor_leaves_no_half_written_sample(plain):
    with serving(SharedPipeline(**cropped()), chunk_bytes=1000) as agent:
        assert same(images(agent, kill=True), plain)
        assert agent.stats().num_loaded > 0


# -- rows of tensors, which are read by the block -------------------------------------------------

M = 150
NUMBERS = torch.arange(float(M))
TABLE = TensorDataset(NUMBERS[:, None] + torch.arange(4), NUMBERS.long())
TENSORS = {
    "table": TABLE.tensors,
    "kinds": tuple(NUMBERS.to(d) for d in (torch.bool, torch.bfloat16, torch.uint8, torch.cfloat)),
    "strided": (NUMBERS[:, None, None].expand(M, 2, 3), torch.rand(3, M, 2).transpose(0, 1)),
    "empty": (torch.zeros(M, 0), NUMBERS),
    "large": (NUMBERS[:, None].expand(M, 5000).contiguous(),),
    "conjugate": (torch.complex(NUMBERS, -NUMBERS).conj(),),
    "gradients": (NUMBERS.clone().requires_grad_(),),
    "sparse": (torch.eye(M).to_sparse(), NUMBERS),
    "subclass": (torch.nn.Parameter(NUMBERS.clone()),),
}


class Doubled(TensorDataset):
    """A subclass may do what it likes."""

    def __getitem__(self, index):
        return tuple(2 * each for each in super().__getitem__(index))


def collate_sparse(samples):
    return [torch.stack([each[i].to_dense() for each in samples]) for i in range(2)]


def test_rows_are_those_that_are_read_one_by_one():
    data = {"train_doubled": Doubled(NUMBERS)}
    for kind, tensors in TENSORS.items():
        data[f"train_{kind}"] = whole = TensorDataset(*tensors)
        data[f"train_{kind}_part"] = Subset(Subset(whole, range(M)), [7, 7, *range(M - 1, 9, -2)])
    samples = {name: [each[index] for index in range(len(each))] for name, each in data.items()}
    options = {"collate_fn": {name: collate_sparse for name in data if "sparse" in name}}
    alone = SharedPipeline(**samples, seed=2, **options).inline()
    with serving(SharedPipeline(**data, seed=2, **options), chunk_bytes=3000) as agent:
        client = agent.client()
        for name in data:
            for how in ({"epoch": 0, "batch_size": 7}, {"epoch": 1, "batch_size": 64}):
                assert_same(client.read(name, **how), alone.read(name, **how))
        assert agent.notices() == []


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": [3, 3, 0, *range(60), 149]},
        {"collate_fn": lambda samples: [torch.stack([row for row, _ in samples]) * 2]},
        {"augment": lambda sample: (sample[0] + torch.rand(4), sample[1])},
        {"finish": lambda sample: [sample[0] / 2, sample[1]]},
        {"on_error": "skip"},
    ],
)
def test_options_hold_for_rows_too(options):
    pipeline = SharedPipeline(train=TABLE, **options)
    inline = pipeline.inline()
    with serving(pipeline, chunk_bytes=1000) as agent:
        for how in ({"epoch": 0, "batch_size": 16}, {"epoch": 1, "batch_size": 16}):
            assert_same(agent.client().read("train", **how), inline.read("train", **how))


def test_an_index_that_there_is_not_is_told_as_ever():
    error = pytest.raises(PreprocessingError, match="Sample 2 of data set 'val' raised IndexError")
    with serving(SharedPipeline(val=Subset(TABLE, [0, 1, M]))) as agent, error:
        list(agent.client().read("val", epoch=0, batch_size=3))
