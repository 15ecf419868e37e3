"""The last step of the data: to the device, a batch ahead, and finished there."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
from torchvision.transforms import v2

from optuna_fleet import SharedPipeline, take_apart
from optuna_fleet.pipeline.reader.client import Batch
from optuna_fleet.trainer.data import feed as feed_module
from optuna_fleet.trainer.data.feed import ahead, feed
from tests.pipeline.pipeline_harness import serving


def batch(number):
    return Batch(data=torch.full((2,), number), local_size=2, global_size=2)


class Copies:
    """A device that keeps its bytes in a list, and tells what is done, and by which thread."""

    def __init__(self):
        self.told = []
        self.may_pin = threading.Event()
        self.may_pin.set()

    def pin(self, data):
        if data[0] == 1:
            self.may_pin.wait()
        self.tell("pinned", data)
        return data.clone()

    def send(self, pinned):
        self.tell("sent", pinned)
        return [pinned], pinned[0]

    def take(self, sent, mark):
        assert sent[0][0] == mark
        self.tell("taken", sent[0])
        return sent[0]

    def tell(self, what, data):
        self.told.append((what, int(data[0]), threading.current_thread().name.split("_")[0]))


@pytest.fixture
def copies():
    return Copies()


@pytest.fixture
def stage(copies):
    with ThreadPoolExecutor(1, "staging") as thread:
        yield copies, thread
        copies.may_pin.set()


def test_the_next_batch_is_on_its_way_while_one_is_in_use(stage, copies):
    for _, data in ahead(map(batch, range(3)), *stage):
        copies.tell("used", data)
    training = [told for told in copies.told if told[2] == "MainThread"]
    assert training == [
        (what, number, "MainThread") for number in range(3) for what in ("taken", "used")
    ]
    staging = [told for told in copies.told if told[2] != "MainThread"]
    assert staging == [
        (what, number, "staging") for number in range(3) for what in ("pinned", "sent")
    ]
    assert list(ahead([], *stage)) == []


def test_who_trains_does_not_wait_for_the_next_batch(stage, copies):
    copies.may_pin.clear()
    fed = ahead(map(batch, range(3)), *stage)
    assert int(next(fed)[1][0]) == 0
    assert ("pinned", 1, "staging") not in copies.told
    copies.may_pin.set()
    assert [int(data[0]) for _, data in fed] == [1, 2]


def test_memory_of_a_batch_is_left_alone_until_it_has_been_read(stage, copies, monkeypatch):
    """The pipeline uses it again as soon as another batch is asked for."""
    copies.may_pin.clear()
    wait = feed_module.wait
    monkeypatch.setattr(feed_module, "wait", lambda read: (copies.may_pin.set(), wait(read)))

    def batches():
        memory = torch.zeros(2)
        for number in range(3):
            yield Batch(data=memory.fill_(number), local_size=2, global_size=2)
            assert ("pinned", number, "staging") in copies.told

    assert [int(data[0]) for _, data in ahead(batches(), *stage)] == [0, 1, 2]


class Stream:
    has_failed = False

    def record_event(self):
        return "mark"

    def query(self):
        if self.has_failed:
            raise RuntimeError("CUDA error")


@pytest.mark.parametrize("has_failed", [False, True])
def test_memory_is_free_after_a_pass_unless_the_device_has_failed(monkeypatch, has_failed):
    """To free it would abort the process then."""
    stream = Stream()
    gpu = SimpleNamespace(module=SimpleNamespace(Stream=lambda _: stream, stream=nullcontext))
    monkeypatch.setattr(feed_module, "accelerator_of", lambda _: gpu)
    copies = feed_module.Copies(torch.device("cpu"))
    pinned = torch.zeros(2)
    copies.send(pinned)
    memory = weakref.ref(pinned)
    del pinned
    assert memory() is not None
    stream.has_failed = has_failed
    with suppress(RuntimeError):
        copies.forget()
    assert (memory() is not None) == has_failed
    stream.has_failed = False
    copies.forget()


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


def test_batches_finished_by_the_trainer_are_those_finished_by_preprocessors():
    dataset, augment, finish = take_apart(Images(), augment=0, finish=1)
    pipeline = SharedPipeline(train=dataset, augment=augment, finish=finish)
    wanted = pipeline.inline().read("train", epoch=1, batch_size=4)
    with serving(pipeline, finish_on_device=True) as agent:
        client = agent.client()
        ours = client.read("train", epoch=1, batch_size=4)
        fed = feed(ours, torch.device("cpu"), client.finisher("train"))
        for (batch, data), other in zip(fed, wanted, strict=True):
            assert batch.data[0].dtype == torch.uint8
            assert torch.equal(data[0], other.data[0])
            assert torch.equal(data[1], other.data[1])
