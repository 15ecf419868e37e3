"""Whatever a data set does: what readers get is what the data set gives, or there is an error."""

import os
from functools import partial

import pytest
import torch
from pipeline_harness import serving
from torchvision.transforms import v2

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.trainer.feed import feed

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


class OnDevice:
    """A pipeline for trainers that finish batches themselves, as those on GPUs do."""

    def __init__(self, pipeline):
        self._pipeline = pipeline
        self._setup = pipeline.setup(1, finish_on_device=True)

    def spec(self):
        return self._setup.spec

    def setup(self, num_preprocessors):
        return self._setup


def on_device(dataset, **options):
    """All leaves of two epochs, as the trial gets them."""
    with serving(OnDevice(SharedPipeline(train=dataset, **options)), chunk_bytes=1500) as agent:
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
    with serving(OnDevice(SharedPipeline(train=Unsteady(in_preprocessors)))) as agent:
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
    SharedPipeline(train=Images(v2.Compose([v2.RandomHorizontalFlip(), *END]))).setup(1)
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


class Restoring(Parameterised):
    """Sets it only for as long as the transform takes."""

    def __getitem__(self, index):
        at_first, self.flip.p = self.flip.p, float(index % 4 == 1)
        try:
            return Images.__getitem__(self, index)
        finally:
            self.flip.p = at_first


class Remembering(Images):
    """A step of its transform is a method that looks at what the data set remembers."""

    def __init__(self):
        super().__init__(v2.Compose([v2.RandomHorizontalFlip(), self.brighten]))
        self.current = 0

    def __getitem__(self, index):
        self.current = index
        return super().__getitem__(index)

    def brighten(self, image):
        return image + self.current


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


@pytest.mark.parametrize(
    "new",
    [
        partial(Parameterised, 0.5),
        partial(Parameterised, 0.0),
        partial(Restoring, 0.0),
        Remembering,
        Shifting,
    ],
    ids=["others", "sometimes", "restored", "method", "end"],
)
@pytest.mark.parametrize("defers", [False, True])
def test_parameters_that_are_set_for_each_sample(new, defers):
    wanted = whole(new())
    pipeline = SharedPipeline(train=new(), decoded_bytes=1 << 20)
    with serving(OnDevice(pipeline) if defers else pipeline) as agent:
        client = agent.client()
        read = []
        for epoch in range(2):
            batches = client.read("train", epoch=epoch, batch_size=7, continues=True)
            fed = feed(batches, torch.device("cpu"), client.finisher("train"))
            read += [leaf for _, data in fed for leaf in data]
    assert same(read, wanted)


class Noting(Images):
    """A step of its transform notes what it has drawn."""

    def __init__(self):
        super().__init__(v2.Compose([v2.CenterCrop(10), Shift()]))


class Shift:
    def __call__(self, image):
        self.last = int(torch.randint(0, 99, ()))
        return image + self.last


def test_steps_that_change_themselves_are_kept_apart_from_that():
    dataset = Noting()
    wanted = whole(dataset)
    with serving(SharedPipeline(train=dataset, decoded_bytes=1 << 20)) as agent:
        batches = [
            agent.client().read("train", epoch=epoch, batch_size=7, continues=True)
            for epoch in range(2)
        ]
        assert same([leaf for epoch in batches for b in epoch for leaf in b.data], wanted)
        assert agent.stats().num_loaded > 0
