"""The last step of the data: to the device, a batch ahead, and finished there."""

import pytest
import torch
from torchvision.transforms import v2

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.reader.batches import Batch
from optuna_fleet.pipeline.reader.inline import InlineClient
from optuna_fleet.trainer.feed import ahead, feed


def batch(number):
    return Batch(data=torch.full((2,), number), local_size=2, global_size=2)


def test_the_next_batch_is_on_its_way_while_one_is_in_use():
    told = []

    def stage(batch):
        told.append(("starts", int(batch.data[0])))
        return lambda: told.append(("arrives", int(batch.data[0]))) or batch.data

    for _, data in ahead(map(batch, range(3)), stage):
        told.append(("used", int(data[0])))
    assert told == [
        ("starts", 0),
        ("starts", 1),
        ("arrives", 0),
        ("used", 0),
        ("starts", 2),
        ("arrives", 1),
        ("used", 1),
        ("arrives", 2),
        ("used", 2),
    ]
    assert list(ahead([], stage)) == []


class Images:
    transform = v2.Compose(
        [
            v2.RandomCrop(6),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.2] * 3),
        ]
    )

    def __len__(self):
        return 10

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (3, 9, 9), dtype=torch.uint8, generator=generator)
        return self.transform(image), index


def halve(sample):
    image, index = sample
    return image / 2, index


@pytest.mark.parametrize("finish", [None, halve])
def test_batches_finished_by_the_trainer_are_those_finished_by_preprocessors(finish):
    pipeline = SharedPipeline(train=Images(), finish=finish)
    deferring = pipeline.spec(finish_on_device=True)
    assert deferring.dataset("train").finish is not None
    client = InlineClient(deferring, pipeline._source(), {})
    wanted = pipeline.inline().read("train", epoch=1, batch_size=4)
    ours = list(client.read("train", epoch=1, batch_size=4))
    assert all(batch.data[0].dtype == torch.uint8 for batch in ours)
    end = pipeline_end(deferring)
    for (_, data), other in zip(feed(ours, torch.device("cpu"), end), wanted, strict=True):
        assert torch.equal(data[0], other.data[0])
        assert torch.equal(data[1], other.data[1])


def pipeline_end(spec):
    import cloudpickle

    return cloudpickle.loads(spec.dataset("train").finish)


def test_user_collate_gets_finished_samples():
    pipeline = SharedPipeline(train=Images(), collate_fn=list)
    assert pipeline.spec(finish_on_device=True).dataset("train").finish is None
