"""Agent, preprocessors and readers as processes."""

import pytest
import torch
from pipeline_datasets import COUNTS, SWITCH
from pipeline_harness import serving

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.reader.batches import OpenedPass
from optuna_fleet.pipeline.reader.mapping import Mapping


class Many:
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return index

    def __getitems__(self, wanted):
        return wanted


@pytest.mark.parametrize("batched", [False, True])
def test_no_chunk_has_very_many_samples(batched):
    """Whoever waits for a chunk waits for all of its samples: readers, and other nodes."""
    with serving(SharedPipeline(train=Many(), batched=batched), num_preprocessors=1) as agent:
        assert agent.client().open_pass("train", 0, 0).chunk_size == 256


class Faltering(Many):
    """One sample can't be had the first few times; the third is larger than the others."""

    def __init__(self, broken, times):
        self.broken, self.times = broken, times

    def __getitem__(self, index):
        if index == self.broken and COUNTS[SWITCH] < self.times:
            COUNTS[SWITCH] += 1
            raise OSError("no answer")
        return torch.zeros(100_000 if index == 2 else 1)


@pytest.mark.parametrize(("broken", "times"), [(0, 0), (0, 1), (0, 2), (2, 1)])
def test_a_size_is_measured_again_where_that_failed(broken, times):
    """Nodes that cut differently would share nothing."""
    pipeline = SharedPipeline(val=Faltering(broken, times), collate_fn=list)
    with serving(pipeline, num_preprocessors=1) as agent:
        assert agent.client().open_pass("val", 0, 0).chunk_size == 8


def labels(client, name="train", **arguments):
    """The second leaf of every batch, in order."""
    batches = client.read(name, **{"epoch": 0, "batch_size": 7, **arguments})
    return [label for batch in batches for label in batch.data[1].tolist()]


def test_a_loops_last_batch_is_its_own(agent, monkeypatch):
    """It is still bound when the chunk goes, which would have to be copied otherwise."""
    monkeypatch.setattr(Mapping, "keep", None)
    client = agent.client()
    for epoch in range(2):
        for batch in client.read("train", epoch=epoch, batch_size=1):  # views of chunks
            assert batch.data[0].shape


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_pass_is_told_while_another_is_interrupted_is_heard_again(agent, monkeypatch, when):
    client = agent.client()
    left = iter(client.read("train", epoch=0, batch_size=7))
    begun = next(left).data[1].tolist()  # has asked for the next chunk, in good time
    (waiting,) = client._passes.values()
    hear, interrupted = OpenedPass.hear, []

    def heard(self, message):
        if self is waiting and not interrupted:
            interrupted.append(message.chunk)
            if when == "after":
                hear(self, message)
            raise KeyboardInterrupt
        hear(self, message)

    monkeypatch.setattr(OpenedPass, "hear", heard)
    with pytest.raises(KeyboardInterrupt):
        labels(client)
    client.hear()
    assert waiting.has(*interrupted)  # or its reader would wait for ever
    assert begun + [i for b in left for i in b.data[1].tolist()] == labels(client)
