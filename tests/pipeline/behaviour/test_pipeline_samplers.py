"""Samplers and weights: what a DataLoader's user has, in epochs that all trials share."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from pipeline_datasets import Augmented, Counted
from pipeline_harness import serving
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from optuna_fleet import SharedPipeline
from optuna_fleet.exceptions import FleetConfigError, PreprocessingError

N = 50
WEIGHTS = [0.0] * 10 + [1.0] * 30 + [5.0] * 10


def labels(client, epoch=0, name="train", batch_size=7, **arguments):
    """Indices and noise of an epoch, in order."""
    batches = client.read(name, epoch=epoch, batch_size=batch_size, **arguments)
    return [
        (index, *noise[:3].tolist())
        for batch in batches
        if batch.local_size
        for index, noise in zip(batch.data[0].tolist(), batch.data[1], strict=True)
    ]


def indices(client, epoch=0, **arguments):
    return [index for index, *_ in labels(client, epoch, **arguments)]


class Shuffler(Sampler):
    """Shuffles a list that it keeps, by the generator it was given, and counts its epochs."""

    def __init__(self, dataset, rng):
        self.dataset = dataset
        self.rng = rng
        self.order = list(range(len(dataset)))
        self.num_epochs = 0

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        self.num_epochs += 1
        self.rng.shuffle(self.order)
        return iter(self.order[self.num_epochs - 1 :] + self.order[: self.num_epochs - 1])


class Curriculum(Sampler):
    """In epoch e the first 10 (e + 1) samples, drawn with what is global."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return N

    def __iter__(self):
        some = min(N, 10 * (self.epoch + 1))
        drawn = [random.randrange(some), int(np.random.randint(some))]
        return iter([*drawn, *torch.randint(some, (N - 2,)).tolist()])


SAMPLERS = {
    "weighted": lambda dataset: WeightedRandomSampler(WEIGHTS, 70),
    "random": lambda dataset: RandomSampler(dataset),
    "with_generator": lambda dataset: RandomSampler(dataset, generator=torch.Generator()),
    "subset": lambda dataset: SubsetRandomSampler(range(5, 20)),
    "sequential": SequentialSampler,
    "list": lambda dataset: [3, 1, 1, 4],
    "state": lambda dataset: Shuffler(dataset, random.Random(3)),
    "curriculum": lambda dataset: Curriculum(),
}
FIXED = {"sequential", "list"}


def test_an_epoch_is_the_same_for_all_trials():
    dataset = Augmented(N)
    samplers = {name: make(dataset) for name, make in SAMPLERS.items()}
    given = {**dict.fromkeys(samplers, dataset), "shuffled": list(samplers), "sampler": samplers}
    pipeline, others = (SharedPipeline(**given, seed=3) for _ in range(2))
    alone, inline = others.inline(), pipeline.inline()
    with serving(pipeline, num_preprocessors=3, chunk_bytes=8000) as agent:
        client, late = agent.client(), agent.client()
        for name, sampler in samplers.items():
            of_it = {"name": name}
            assert client.spec.dataset(name).num_samples == len(sampler)
            assert len(client.read(name, epoch=0, batch_size=4)) == -(-len(sampler) // 4)
            epochs = [labels(client, epoch, **of_it) for epoch in range(3)]
            # Whoever comes later, with another batch size, in the middle, or on several devices.
            assert labels(late, 2, batch_size=16, **of_it) == epochs[2]
            assert labels(late, 0, batch_size=5, first_step=2, **of_it) == epochs[0][10:]
            size = {"batch_size": len(sampler), "world_size": 3}
            shards = [labels(late, 1, rank=rank, **size, **of_it) for rank in range(3)]
            assert [sample for shard in shards for sample in shard] == epochs[1]
            assert len({len(epoch) for epoch in epochs}) == 1
            orders = [[index for index, *_ in epoch] for epoch in epochs]
            assert (orders[0] == orders[1]) == (name in FIXED)
            # Drawn or not, a sample is augmented anew each time it comes.
            noise = [numbers for epoch in epochs for _, *numbers in epoch]
            assert len({number for numbers in noise for number in numbers}) == 3 * len(noise)
            # The sampler itself is left as it was, and other processes draw the same from it.
            assert labels(inline, 2, **of_it) == epochs[2]
            assert labels(alone, 1, **of_it) == epochs[1]
            assert getattr(sampler, "num_epochs", 0) == 0


def test_samplers_draw_what_they_say():
    dataset = Augmented(N)

    def epochs(sampler):
        client = SharedPipeline(train=dataset, sampler=sampler).inline()
        return [indices(client, epoch) for epoch in range(2)]

    assert epochs([3, 1, 1, 4]) == [[3, 1, 1, 4]] * 2
    assert all(sorted(order) == [*range(5, 20)] for order in epochs(SAMPLERS["subset"](dataset)))
    first, second = epochs(Curriculum())
    assert max(first) < 10 <= max(second) < 20
    first, second = epochs(Shuffler(dataset, random.Random(3)))
    assert sorted(first) == sorted(second) == [*range(N)]


def test_weights():
    dataset = Augmented(N)
    drawing = WeightedRandomSampler(WEIGHTS, N)
    client = SharedPipeline(train=dataset, sampler=drawing, seed=1).inline()
    epochs = [indices(client, epoch, batch_size=N) for epoch in range(40)]
    assert all(len(epoch) == N for epoch in epochs)
    counts = Counter(index for epoch in epochs for index in epoch)
    assert min(counts) == 10  # 2,000 in all: 25 for each of weight 1, 125 for each of weight 5
    assert 500 < sum(counts[index] for index in range(10, 40)) < 1000
    assert all(60 < counts[index] < 200 for index in range(40, 50))
    other = SharedPipeline(train=dataset, val=dataset, sampler=drawing, seed=1).inline()
    assert indices(other, 7) == epochs[7]
    assert indices(other, 7, name="val") == [*range(N)]


def test_evaluation_data_may_be_chosen_too():
    pipeline = SharedPipeline(train=[0], val=Augmented(N), sampler={"val": [4, 4, 7]})
    with serving(pipeline) as agent:
        first, second = (labels(agent.client(), epoch, name="val") for epoch in (0, 5))
    assert first == second
    assert [index for index, *_ in first] == [4, 4, 7]


def test_the_decoded_store_serves_what_is_drawn_again():
    def augment(sample):
        return sample[0], torch.rand(300)

    pipeline = SharedPipeline(
        train=Counted(N),
        augment=lambda s: augment(s[::-1]),
        sampler=WeightedRandomSampler(WEIGHTS, N),
    )
    with serving(pipeline, num_preprocessors=1) as agent:
        client = agent.client()
        for epoch in range(3):
            read = labels(client, epoch, continues=True)
            assert len({noise for _, noise, *_ in read}) == N
        assert agent.stats().num_loaded > N
    assert read == labels(pipeline.inline(), 2)


def test_skipped_samples_are_replaced_by_others_that_were_drawn():
    class Torn(Augmented):
        def __getitem__(self, index):
            if index == 7:
                raise OSError("torn")
            return super().__getitem__(index)

    options = {"sampler": [4, 7, 7, 9], "on_error": "skip"}
    assert indices(SharedPipeline(train=Torn(N), **options).inline()) == [4, 9, 9, 9]


class Liar(Sampler):
    def __init__(self, draw, length=3):
        self.draw, self.length = draw, length
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.draw(self.epoch))


def endless():
    number = 0
    while True:
        yield number
        number = (number + 1) % N


class Endless(Sampler):
    def __iter__(self):
        return endless()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampler": DistributedSampler([1] * 9, 3, 0)}, "one rank's share. Leave it out"),
        ({"sampler": BatchSampler([0, 1], 2, False)}, "batch size of its own"),
        ({"sampler": Endless()}, r"is a Endless, but must be .* with a len\(\).*never ends"),
        ({"sampler": endless()}, r"is a generator, but must be"),
        ({"sampler": 3}, r"is a int, but must be"),
        ({"sampler": []}, r"a list with a len\(\) of 0"),
        ({"sampler": {"trian": [0]}}, "`sampler` names 'trian'"),
        ({"sampler": [0], "shuffled": []}, "For which data set is `sampler`.*{'train': ...}"),
        ({"sampler": [0], "train2": [1]}, "For which data set is `sampler`.*2 of them"),
    ],
)
def test_samplers_that_can_not_work(arguments, message):
    with pytest.raises(FleetConfigError, match=message):
        SharedPipeline(train=Augmented(N), **arguments)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda epoch: range(4), r"draws more samples in an epoch, but its len\(\) is 3"),
        (lambda epoch: endless(), "draws more samples"),
        (lambda epoch: range(2), "draws 2 samples"),
        (lambda epoch: [0, 1, N], "draws index 50, but the data set has 50 samples: .* to 49"),
        (lambda epoch: [0, 1, -1], "draws index -1"),
        (lambda epoch: [[0], [1], [2]], r"draws \[0\], .*int. A batch sampler can't be used"),
        (lambda epoch: [0, 1, 2.0], r"draws 2.0, but must draw indices, of type int\.$"),
    ],
)
@pytest.mark.parametrize("start", [lambda p: p.packed().setup(1), lambda p: p.inline()])
def test_what_samplers_draw_is_checked_before_the_sweep(draw, message, start):
    pipeline = SharedPipeline(train=Augmented(N), sampler=Liar(draw))
    with pytest.raises(FleetConfigError, match=message):
        start(pipeline)


def test_samplers_must_draw_the_same_again():
    unseeded = Liar(lambda epoch: np.random.default_rng().integers(N, size=40).tolist(), 40)
    with pytest.raises(FleetConfigError, match=r"one epoch differently each time.*set_epoch"):
        SharedPipeline(train=Augmented(N), sampler=unseeded).packed().setup(1)


def test_what_samplers_do_later_fails_those_who_read_it():
    def draw(epoch):
        if epoch == 2:
            raise RuntimeError("no more data")
        return range(3 if epoch != 1 else 2)

    with serving(SharedPipeline(train=Augmented(N), sampler=Liar(draw))) as agent:
        client = agent.client()
        assert indices(client, 0) == [0, 1, 2]
        with pytest.raises(PreprocessingError, match="draws 2 samples in an epoch"):
            indices(client, 1)
        with pytest.raises(PreprocessingError, match=r"(?s)order of an epoch.*no more data"):
            indices(client, 2)
        assert indices(client, 3) == [0, 1, 2]


# -- collate_fn -----------------------------------------------------------------------------------


class Sentences:
    """Sample i is i % 7 + 1 numbers, of which the last is i."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.cat([torch.rand(index % 7), torch.tensor([float(index)])])


def padded(samples):
    longest = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1.0)
    return {"tokens": longest, "lengths": torch.tensor(list(map(len, samples)))}


def test_padded_batches_of_any_size_on_any_number_of_devices():
    """Each share is padded to its own longest sample, and nothing else depends on the width."""
    pipeline = SharedPipeline(train=Sentences(), collate_fn=padded)
    with serving(pipeline, memory_bytes=200_000, chunk_bytes=1000) as agent:
        client = agent.client()

        def read(batch_size, rank, world_size):
            batches = client.read(
                "train", epoch=2, batch_size=batch_size, rank=rank, world_size=world_size
            )
            found = []
            for batch in batches:
                tokens, lengths = batch.data["tokens"], batch.data["lengths"]
                assert tokens.shape == (batch.local_size, max(lengths))
                assert (tokens == -1).sum() == (max(lengths) - lengths).sum()
                found.append([row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)])
            return found

        wanted = [row for batch in read(16, 0, 1) for row in batch]
        for batch_size in (16, 400, 1000):
            for world_size in (1, 2, 3):
                shards = [read(batch_size, rank, world_size) for rank in range(world_size)]
                whole = [
                    row for step in zip(*shards, strict=True) for part in step for row in part
                ]
                assert whole == wanted
        assert agent.stats().peak_bytes <= 200_000
    assert sorted(row[-1] for row in wanted) == [*range(400)]
