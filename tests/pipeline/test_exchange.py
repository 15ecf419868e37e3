"""Chunks shared between nodes: who makes them, and that it shows in no batch."""

import contextlib
import os
import select
from functools import partial

import torch
from exchange_harness import CREDENTIALS, agree, labels, nodes, read_everywhere
from pipeline_datasets import Counted
from pipeline_harness import Forked

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.exchange import AskForChunk
from optuna_fleet.pipeline.preprocessor.order import permutation
from optuna_fleet.pipeline.spec import ChunkKey
from optuna_fleet.wire.channel import connect
from optuna_fleet.wire.invitation import Invitation

N = 150
LONG_S = 600.0
"""Nobody is done without because the machine is busy."""


def order_of(epoch):
    return permutation(3, "train", epoch, N).tolist()


class Gated(Counted):
    """Each sample tells that it is begun, and waits until it may go on."""

    def __init__(self, n):
        super().__init__(n)
        self.begun, self.tell = os.pipe()
        self.wait, self.gate = os.pipe()

    def __getitem__(self, index):
        os.write(self.tell, b"x")
        os.read(self.wait, 1)
        return super().__getitem__(index)


def test_nodes_do_not_wait_in_a_circle_when_the_plan_changes():
    val = Gated(1)
    data = SharedPipeline(train=Counted(N), val=val, seed=3)
    with nodes(data, 2, patience_s=LONG_S, num_preprocessors=1) as found:
        agree(found[::-1], "single-broadcast")
        assert labels(found[1].client()) == order_of(0)
        busy = Forked(partial(labels, found[1].client(), "val"))
        os.read(val.begun, 1)  # nobody else is there to make what the first node wants now
        with ask(found[1], AskForChunk(ChunkKey("train", 5, 0), 8, is_finished=True)) as waiting:
            agree(found, "single-broadcast")
            assert select.select([waiting], [], [], 60)[0]
            waiting.receive()  # yes or no: it may have come from the other node by now
        os.write(val.gate, bytes(99))
        busy.result()


@contextlib.contextmanager
def ask(node, question):
    """A connection of another node on which something was asked."""
    address = (node.peer.host, node.peer.port)
    channel = connect(Invitation(addresses=(address,), credentials=CREDENTIALS))
    channel.send(question)
    yield channel
    channel.close()


class Large(Counted):
    """Sample i is a quarter of a megabyte and i."""

    def __getitem__(self, index):
        return torch.full((1 << 16,), float(index)), index


def test_one_that_asks_and_does_not_listen_keeps_nobody_waiting():
    large = SharedPipeline(train=Large(N), seed=3)
    with nodes(large, 2, patience_s=LONG_S, chunk_bytes=4 << 20) as found:
        asked = [ChunkKey("train", 0, chunk) for chunk in range(N // 8)]
        plan = agree(found)
        own = [key for key in asked if plan.owner(key) == found[0].peer]
        with contextlib.ExitStack() as deaf:
            for key in own:
                deaf.enter_context(ask(found[0], AskForChunk(key, 8, is_finished=True)))
            assert read_everywhere(found, range(2), (7,)) == [[order_of(0), order_of(1)]] * 2
