"""Samplers and weights: what a DataLoader's user has, in epochs that all trials share."""

import os
from functools import partial

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_datasets import COUNTS, SWITCH, Counted
from pipeline_harness import Forked, serving
from torch.utils.data import (
    Sampler,
)

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.preprocessor import order_file
from optuna_fleet.pipeline.preprocessor.order_file import OrderFile

N = 50


# -- orders, drawn once per node ------------------------------------------------------------------


def test_an_order_is_drawn_once_for_all_processes():
    orders = OrderFile(3000)
    drawn = torch.zeros(1, dtype=torch.int64).share_memory_()
    gate, opened = os.pipe()
    begun, begin = os.pipe()

    def draw(epoch):
        drawn.add_(1)
        os.read(gate, 1)
        return np.arange(3000) + epoch

    def read(epoch):
        os.close(opened)
        os.write(begin, b"!")
        parts = [
            orders.read(epoch, start, min(start + 1024, 3000), partial(draw, epoch))
            for start in range(0, 3000, 1024)
        ]
        return np.concatenate(parts).tolist()

    epochs = (4, 4, 5, 4)
    readers = [Forked(partial(read, epoch)) for epoch in epochs]
    for _ in readers:
        os.read(begun, 1)
    os.close(opened)
    wanted = [[*range(epoch, 3000 + epoch)] for epoch in epochs]
    assert [reader.result() for reader in readers] == wanted
    assert drawn.item() == 2
    for end in (gate, begun, begin):
        os.close(end)


def test_who_dies_while_drawing_holds_up_nobody():
    orders = OrderFile(4)
    ready, wait = os.pipe()

    def die():
        os.write(wait, b"!")
        os.kill(os.getpid(), 9)

    victim = Forked(lambda: orders.read(0, 0, 4, die))
    os.read(ready, 1)
    assert orders.read(0, 1, 3, lambda: np.arange(4)).tolist() == [1, 2]
    os.waitpid(victim.pid, 0)
    os.close(victim._receiving)
    os.close(ready)
    os.close(wait)


@given(epochs=st.lists(st.integers(0, 500), max_size=30), length=st.integers(1, 9))
@settings(max_examples=40, database=None)
def test_orders_never_mix(epochs, length):
    orders = OrderFile(length)
    for epoch in epochs:
        wanted = np.arange(length) + 1000 * epoch
        read = orders.read(epoch, 0, length, lambda wanted=wanted: wanted)
        assert read.tolist() == wanted.tolist()


def test_orders_of_many_epochs_take_bounded_memory():
    n = 1 << 20
    orders = OrderFile(n)
    for epoch in range(20):
        orders.read(epoch, 0, 1, lambda: np.arange(n))
    assert os.fstat(orders._fd).st_blocks * 512 <= (64 << 20) + (1 << 16)


class CountingSampler(Sampler):
    def __len__(self):
        return N

    def __iter__(self):
        COUNTS[SWITCH] += 1
        return iter(range(N))


def test_orders_are_not_drawn_again_for_each_chunk_where_few_of_them_are_kept(monkeypatch):
    monkeypatch.setattr(order_file, "MOST_BYTES", 0)  # two are: epochs 0 and 2 share a place
    pipeline = SharedPipeline(train=Counted(N), sampler=CountingSampler())
    with serving(pipeline, num_preprocessors=1) as agent:
        before = COUNTS[SWITCH]
        epochs = [agent.client().read("train", epoch=epoch, batch_size=10) for epoch in (0, 2, 4)]
        for one, *others in zip(*epochs, strict=True):
            assert all(torch.equal(one.data[1], other.data[1]) for other in others)
        assert COUNTS[SWITCH] - before == len(epochs)
