"""How epochs are cut into chunks."""

import pytest
import torch
from pipeline_datasets import COUNTS, SWITCH
from pipeline_harness import serving

from optuna_fleet.pipeline import SharedPipeline


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


@pytest.mark.parametrize(("broken", "times"), [(0, 1), (2, 1)])
def test_a_size_is_measured_again_where_that_failed(broken, times):
    """Nodes that cut differently would share nothing."""
    pipeline = SharedPipeline(val=Faltering(broken, times), collate_fn=list)
    with serving(pipeline, num_preprocessors=1) as agent:
        assert agent.client().open_pass("val", 0, 0).chunk_size == 8
