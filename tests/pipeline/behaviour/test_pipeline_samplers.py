"""Samplers, weights and collating: what a DataLoader's user has, in epochs that all share."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from pipeline_datasets import Augmented, Counted
from pipeline_harness import everywhere, samples, serving
from torch.utils.data import (
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


def indices(client, epoch=0, name="train", **arguments):
    return [sample[0] for sample in samples(client, name, epoch, **arguments)]


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


DATASET = Augmented(N)
SAMPLERS = {
    "weighted": WeightedRandomSampler(WEIGHTS, 70),
    "random": RandomSampler(DATASET),
    "with_generator": RandomSampler(DATASET, generator=torch.Generator()),
    "subset": SubsetRandomSampler(range(5, 20)),
    "sequential": SequentialSampler(DATASET),
    "list": [3, 1, 1, 4],
    "state": Shuffler(DATASET, random.Random(3)),
    "curriculum": Curriculum(),
}
FIXED = {"sequential", "list"}


def test_an_epoch_is_the_same_for_all_trials_and_what_the_sampler_says():
    given = {"shuffled": list(SAMPLERS), "sampler": SAMPLERS, "seed": 3}
    found = everywhere(dict.fromkeys(SAMPLERS, DATASET), range(3), **given)
    orders = {}
    for name, sampler in SAMPLERS.items():
        assert {len(epoch) for epoch in found[name]} == {len(sampler)}
        orders[name] = [[index for index, _ in epoch] for epoch in found[name]]
        assert (orders[name][0] == orders[name][1]) == (name in FIXED)
        # Drawn or not, a sample is augmented anew each time it comes.
        noise = [tuple(numbers[:3]) for epoch in found[name] for _, numbers in epoch]
        assert len({number for numbers in noise for number in numbers}) == 3 * len(noise)
        assert getattr(sampler, "num_epochs", 0) == 0  # it is left as it was
    assert orders["list"] == [[3, 1, 1, 4]] * 3
    assert all(sorted(order) == [*range(5, 20)] for order in orders["subset"])
    assert all(sorted(order) == [*range(N)] for order in orders["state"])
    first, second, _ = orders["curriculum"]
    assert max(first) < 10 <= max(second) < 20


def test_whoever_begins_in_the_middle_or_has_a_share_reads_the_same():
    sampler = SAMPLERS["weighted"]
    pipeline = SharedPipeline(train=DATASET, sampler=sampler, collate_fn=list)
    with serving(pipeline, chunk_bytes=8000) as agent:
        client = agent.client()
        assert len(client.read("train", epoch=0, batch_size=4)) == -(-len(sampler) // 4)
        whole = samples(client, epoch=1)
        assert samples(client, epoch=1, batch_size=5, first_step=2) == whole[10:]
        share = {"batch_size": len(sampler), "world_size": 3}
        shards = [samples(client, epoch=1, rank=rank, **share) for rank in range(3)]
        assert [sample for shard in shards for sample in shard] == whole


def test_weights():
    drawing = WeightedRandomSampler(WEIGHTS, N)
    options = {"seed": 1, "collate_fn": list}
    client = SharedPipeline(train=DATASET, sampler=drawing, **options).inline()
    epochs = [indices(client, epoch) for epoch in range(40)]
    counts = Counter(index for epoch in epochs for index in epoch)
    assert min(counts) == 10  # 2,000 in all: 25 for each of weight 1, 125 for each of weight 5
    assert 500 < sum(counts[index] for index in range(10, 40)) < 1000
    assert all(60 < counts[index] < 200 for index in range(40, 50))
    other = SharedPipeline(train=DATASET, val=DATASET, sampler=drawing, **options).inline()
    assert indices(other, 7) == epochs[7]
    assert indices(other, 7, name="val") == [*range(N)]


def test_evaluation_data_may_be_chosen_too():
    found = everywhere({"train": [0], "val": DATASET}, (0, 5), sampler={"val": [4, 4, 7]})
    first, second = ([index for index, _ in epoch] for epoch in found["val"])
    assert first == second == [4, 4, 7]


def test_the_decoded_store_serves_what_is_drawn_again():
    pipeline = SharedPipeline(
        train=Counted(N),
        augment=lambda sample: (sample[1], torch.rand(300)),
        sampler=WeightedRandomSampler(WEIGHTS, N),
        collate_fn=list,
    )
    with serving(pipeline, num_preprocessors=1) as agent:
        client = agent.client()
        for epoch in range(3):
            read = samples(client, epoch=epoch, continues=True)
            assert len({noise[0] for _, noise in read}) == N
        assert agent.stats().num_loaded > N
    assert read == samples(pipeline.inline(), epoch=2)


def test_skipped_samples_are_replaced_by_others_that_were_drawn():
    class Torn(Augmented):
        def __getitem__(self, index):
            if index == 7:
                raise OSError("torn")
            return super().__getitem__(index)

    found = everywhere({"train": Torn(N)}, [0], sampler=[4, 7, 7, 9], on_error="skip")
    assert [index for index, _ in found["train"][0]] == [4, 9, 9, 9]


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


def unseeded(epoch):
    return np.random.default_rng().integers(N, size=40).tolist()


@pytest.mark.parametrize("start", [lambda p: p.packed().setup(1), lambda p: p.inline()])
@pytest.mark.parametrize(
    ("draw", "length", "message"),
    [
        (lambda epoch: iter(int, 1), 3, r"draws more samples in an epoch, but its len\(\) is 3"),
        (lambda epoch: range(2), 3, "draws 2 samples"),
        (lambda epoch: [0, 1, N], 3, "draws index 50, but the data set has 50 samples: .* to 49"),
        (lambda epoch: [0, 1, -1], 3, "draws index -1"),
        (lambda epoch: [[0], [1], [2]], 3, r"draws \[0\], .*single indices"),
        (lambda epoch: [0, 1, 2.0], 3, "draws 2.0"),
        (unseeded, 40, r"one epoch differently each time.*set_epoch"),
    ],
)
def test_what_samplers_draw_is_checked_before_the_sweep(draw, length, message, start):
    pipeline = SharedPipeline(train=DATASET, sampler=Liar(draw, length))
    with pytest.raises(FleetConfigError, match=message):
        start(pipeline)


def test_what_samplers_do_later_fails_those_who_read_it():
    def draw(epoch):
        if epoch == 2:
            raise RuntimeError("no more data")
        return range(3 if epoch != 1 else 2)

    with serving(SharedPipeline(train=DATASET, sampler=Liar(draw), collate_fn=list)) as agent:
        client = agent.client()
        for epoch, message in ((1, "draws 2 samples"), (2, r"(?s)order of an epoch.*no more dat")):
            with pytest.raises(PreprocessingError, match=message):
                samples(client, epoch=epoch)
        assert indices(client, 0) == indices(client, 3) == [0, 1, 2]


# -- collate_fn -----------------------------------------------------------------------------------


class Sentences:
    """Sample i is i % 7 + 1 numbers, of which the last is i."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.cat([torch.rand(index % 7), torch.tensor([float(index)])])


def padded(rows):
    longest = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1.0)
    return {"tokens": longest, "lengths": torch.tensor(list(map(len, rows)))}


def test_padded_batches_of_any_size_on_any_number_of_devices():
    """Each share is padded to its own longest sample, and nothing else depends on the width."""
    pipeline = SharedPipeline(train=Sentences(), collate_fn=padded)
    with serving(pipeline, memory_bytes=200_000, chunk_bytes=1000) as agent:
        client = agent.client()

        def read(size, rank, world_size):
            share = {"rank": rank, "world_size": world_size}
            found = []
            for batch in client.read("train", epoch=2, batch_size=size, **share):
                tokens, lengths = batch.data["tokens"], batch.data["lengths"]
                assert tokens.shape == (batch.local_size, max(lengths))
                assert (tokens == -1).sum() == (max(lengths) - lengths).sum()
                found.append([row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)])
            return found

        wanted = [row for batch in read(16, 0, 1) for row in batch]
        for size, world_size in ((16, 3), (400, 2), (1000, 3)):
            shards = [read(size, rank, world_size) for rank in range(world_size)]
            steps = zip(*shards, strict=True)
            assert [row for step in steps for part in step for row in part] == wanted
        assert agent.stats().peak_bytes <= 200_000
    assert sorted(row[-1] for row in wanted) == [*range(400)]
