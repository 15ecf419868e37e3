"""Whatever a data set does: what readers get is what the data set gives, or there is an error."""

import os
from functools import partial

import numpy as np
import pytest
import torch
from pipeline_harness import serving
from torchvision.transforms import v2

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.preprocessor.comparing import Audit
from optuna_fleet.trainer.data.feed import feed

TEST = os.getpid()
END = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.2] * 3)]


def pixels(index):
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, 256, (3, 12, 12), dtype=torch.uint8, generator=generator)


class Images:
    """Sample i is (picture i after the transform, i)."""

    def __init__(self, transform, n=40):
        self.transform = transform
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return self.transform(pixels(index)), index


ON_DEVICE = {"num_preprocessors": 1, "finish_on_device": True}
"""For trainers that finish batches themselves, as those on GPUs do."""


def on_device(dataset, **options):
    """All leaves of two epochs, as the trial gets them."""
    pipeline = SharedPipeline(train=dataset, split=True, **options)
    with serving(pipeline, chunk_bytes=1500, **ON_DEVICE) as agent:
        client = agent.client()
        return [leaf for epoch in range(2) for leaf in finished(client, epoch)]


def finished(client, epoch):
    batches = client.read("train", epoch=epoch, batch_size=7, continues=True)
    end = client.finisher("train")
    assert end is not None
    return [leaf for _, data in feed(batches, torch.device("cpu"), end) for leaf in data]


def whole(dataset, epochs=2, **options):
    """The same, from a pipeline that takes nothing apart."""
    client = SharedPipeline(train=dataset, split=False, **options).inline()
    batches = [client.read("train", epoch=epoch, batch_size=7) for epoch in range(epochs)]
    return [leaf for epoch in batches for batch in epoch for leaf in batch.data]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# -- finished once --------------------------------------------------------------------------------


class Unsteady(Images):
    """Its file server fails when sample 0 is read for the second time in one kind of process."""

    def __init__(self, in_preprocessors, **more):
        super().__init__(v2.Compose([v2.RandomHorizontalFlip(), *END]), **more)
        self.in_preprocessors = in_preprocessors
        self.reads = {}

    def __getitem__(self, index):
        if index == 0:
            reads = self.reads[os.getpid()] = self.reads.get(os.getpid(), 0) + 1
            if reads == 2 and (os.getpid() != TEST) == self.in_preprocessors:
                raise OSError("stale file handle")
        return super().__getitem__(index)


@pytest.mark.parametrize("in_preprocessors", [False, True])
def test_an_error_of_the_moment_does_not_decide_who_finishes_samples(in_preprocessors):
    pipeline = SharedPipeline(train=Unsteady(in_preprocessors), split=True)
    with serving(pipeline, **ON_DEVICE) as agent:
        read = finished(agent.client(), 0)
    assert same(read, whole(Images(Unsteady(True).transform), epochs=1))


class Odd(Images):
    """Every third sample is made without the transform that the others go through."""

    def __getitem__(self, index):
        if index % 3 == 1:
            image = v2.functional.to_dtype(pixels(index), torch.float32, scale=True)
            return image - image.mean(), index
        return super().__getitem__(index)


def test_samples_that_go_another_way_are_finished_once():
    dataset = Odd(v2.Compose([v2.RandomHorizontalFlip(), *END]))
    assert same(on_device(dataset), whole(dataset))


class OddEnd(Images):
    """The second half of the samples go another way: some chunks are finished, others are not."""

    def __getitem__(self, index):
        image, index = super().__getitem__(index)
        return (image.clone() if index >= 20 else image), index


def test_batches_of_chunks_that_are_finished_and_of_others():
    dataset = OddEnd(v2.Compose([*END]))
    options = {"shuffled": []}
    assert same(on_device(dataset, **options), whole(dataset, **options))


def test_the_scripts_own_random_numbers_are_left_alone():
    torch.manual_seed(1)
    wanted = torch.rand(1)
    torch.manual_seed(1)
    dataset = Images(v2.Compose([v2.RandomHorizontalFlip(), *END]))
    SharedPipeline(train=dataset, split=True).packed().setup(1)
    assert torch.equal(torch.rand(1), wanted)


# -- steps whose parameters the data set sets -----------------------------------------------------


class Parameterised(Images):
    """Sets a parameter of one of its steps for each sample."""

    def __init__(self, at_first):
        self.flip = v2.RandomHorizontalFlip(at_first)
        super().__init__(v2.Compose([self.flip, *END]))

    def __getitem__(self, index):
        self.flip.p = float(index % 2)
        return super().__getitem__(index)


class Shifting(Images):
    """Sets a parameter of the elementwise end."""

    def __init__(self):
        self.end = v2.Normalize([0.5] * 3, [0.2] * 3)
        super().__init__(
            v2.Compose([v2.CenterCrop(10), v2.ToDtype(torch.float32, scale=True), self.end])
        )

    def __getitem__(self, index):
        self.end.mean = [0.5 + (index % 3) / 9] * 3
        return super().__getitem__(index)


class Labelling(Images):
    """Looks at what its transform gave."""

    def __init__(self):
        super().__init__(v2.Compose([v2.RandomHorizontalFlip(), *END]))

    def __getitem__(self, index):
        image, _ = super().__getitem__(index)
        return image, int(image[:, :, 0].sum())


@pytest.mark.parametrize("new", [partial(Parameterised, 0.0), Shifting, Labelling])
@pytest.mark.parametrize("defers", [False, True])
def test_transforms_of_the_users_own_classes_are_left_whole(new, defers):
    wanted = whole(new())
    pipeline = SharedPipeline(train=new(), decoded_bytes=1 << 20)
    with serving(pipeline, **(ON_DEVICE if defers else {})) as agent:
        client = agent.client()
        read = []
        for epoch in range(2):
            batches = client.read("train", epoch=epoch, batch_size=7, continues=True)
            fed = feed(batches, torch.device("cpu"), client.finisher("train"))
            read += [leaf for _, data in fed for leaf in data]
        assert agent.stats().num_loaded == 0
    assert same(read, wanted)


class Noting(Images):
    """A step of its transform notes what it has drawn."""

    def __init__(self):
        super().__init__(v2.Compose([v2.CenterCrop(10), Shift()]))


class Shift:
    def __call__(self, image):
        self.last = int(torch.randint(0, 99, ()))
        return image + self.last


def test_steps_may_change_themselves():
    dataset = Noting()
    wanted = whole(dataset)
    with serving(SharedPipeline(train=dataset, split=True, decoded_bytes=1 << 20)) as agent:
        batches = [
            agent.client().read("train", epoch=epoch, batch_size=7, continues=True)
            for epoch in range(2)
        ]
        assert same([leaf for epoch in batches for b in epoch for leaf in b.data], wanted)
        assert agent.stats().num_loaded > 0


def dark(sample):
    """Works in place, on what was not mirrored too: that is the decoded store's memory."""
    return sample[0].clamp_(max=100), sample[1]


def test_a_finish_that_works_in_place_does_not_write_into_the_decoded_store():
    dataset = Images(v2.Compose([v2.CenterCrop(10), v2.RandomHorizontalFlip()]))
    options = {"finish": dark, "seed": 0}  # sample 0, on which the split is tried, is mirrored
    wanted = whole(dataset, **options)
    pipeline = SharedPipeline(train=dataset, split=True, decoded_bytes=1 << 20, **options)
    with serving(pipeline) as agent:
        epochs = [
            agent.client().read("train", epoch=e, batch_size=7, continues=True) for e in (0, 1)
        ]
        assert same([leaf for epoch in epochs for b in epoch for leaf in b.data], wanted)
        assert agent.stats().num_loaded > 0


# -- what nobody can see beforehand ---------------------------------------------------------------

HIDDEN = np.random.default_rng()
"""Of a module that is imported: nobody seeds it for a sample."""


class Secretive(Images):
    """Half of its samples are random before the first random step, but not the first one."""

    def __getitem__(self, index):
        image = pixels(index)
        if index % 2:
            image = image // 2 + torch.from_numpy(HIDDEN.integers(0, 99, image.shape, np.uint8))
        return self.transform(image), index


class Stale(Images):
    """A step of its transform looks at a global variable that is set for each sample."""

    strength = 1

    def __init__(self, n):
        super().__init__(v2.Compose([v2.CenterCrop(10), brighter, v2.RandomCrop(8)]), n)

    def __getitem__(self, index):
        Stale.strength = index % 7 + 1
        return super().__getitem__(index)


def brighter(image):
    return image // 8 * Stale.strength


def epochs_until_told(agent):
    """Reads until the mismatch has been told of, and returns the number of the next epoch."""
    client = agent.client()
    epoch = 0
    while not agent.notices():
        for _ in client.read("train", epoch=epoch, batch_size=64, continues=True):
            pass
        epoch += 1
    return epoch


@pytest.mark.parametrize("defers", [False, True])
def test_hidden_randomness_is_found_and_told_of_once(defers):
    steps = [v2.CenterCrop(10), v2.RandomCrop(8), *END]
    dataset = Secretive(v2.Compose(steps), 1000)
    # Of seed 2 the first sample is not a random one.
    pipeline = SharedPipeline(train=dataset, split=True, decoded_bytes=8 << 20, seed=2)
    with serving(pipeline, **(ON_DEVICE if defers else {})) as agent:
        epoch = epochs_until_told(agent)
        # The beginnings of a few chunks may have been ordered before it was told of.
        for later in range(2):
            for _ in agent.client().read("train", epoch=epoch + later, batch_size=64):
                pass
        before = agent.stats()
        for _ in agent.client().read("train", epoch=epoch + 2, batch_size=64):
            pass
        after = agent.stats()
        (notice,) = agent.notices()
    assert "of data set 'train', made again, is not what the decoded store gave" in notice
    assert after.preprocessed > before.preprocessed
    assert after.num_loaded == before.num_loaded


def test_hidden_parameters_are_found_too():
    dataset = Stale(1000)
    with serving(SharedPipeline(train=dataset, split=True, decoded_bytes=8 << 20)) as agent:
        epoch = 3 + epochs_until_told(agent)
        batches = agent.client().read("train", epoch=epoch, batch_size=64)
        read = [leaf for batch in batches for leaf in batch.data]
    client = SharedPipeline(train=dataset, split=False).inline()
    wanted = [leaf for b in client.read("train", epoch=epoch, batch_size=64) for leaf in b.data]
    assert same(read, wanted)


def test_audits_cost_little_and_fall_on_other_samples_each_epoch():
    busy_s = [0.0]
    audit = Audit(lambda: busy_s[0])
    due = [[i for i in range(100_000) if audit.is_due(epoch, i)] for epoch in range(2)]
    assert all(150 < len(indices) < 250 for indices in due)
    assert due[0] != due[1]
    assert not audit.agrees("train", due[0][0], 1, lambda: 2)
    assert audit.mismatches == {"train": due[0][0]}
    assert not audit.is_due(0, due[0][0])  # it has not yet computed for long enough
    busy_s[0] = 1e9
    assert audit.is_due(0, due[0][0])
