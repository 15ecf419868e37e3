"""Two nodes with a network between them that can fail; what travels on it is in TLS."""

import contextlib
from functools import partial

import pytest
from exchange_harness import Node, agree, labels
from network_namespaces import NotPermittedError, Switch
from pipeline_datasets import Counted
from pipeline_harness import Forked

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.preprocessor.order import permutation
from optuna_fleet.wire import channel

N = 150


def read_and_unplug():
    """Returns what each node read and received, before and after one was unplugged."""
    channel.HANDSHAKE_LIMIT_S = 1.0
    try:
        switch = Switch(2)
    except NotPermittedError as error:
        return str(error)
    pipeline = SharedPipeline(train=Counted(N), seed=3)
    with contextlib.closing(switch), contextlib.ExitStack() as stack:
        found = []
        for number in range(2):
            host = Switch.address(number)
            start = partial(Node, pipeline, f"node {number}", host=host, patience_s=5.0)
            found.append(switch.at(number, start))
            stack.callback(found[-1].close)
        agree(found)
        clients = [node.client() for node in found]
        said = []
        for epoch in range(2):
            read = [labels(client, epoch=epoch) for client in clients]
            said.append((read, [node.stats().num_received for node in found]))
            switch.unplug(1)
        return said


def test_nodes_in_network_namespaces_share_until_one_is_unplugged():
    said = Forked(read_and_unplug).result()
    if isinstance(said, str):
        pytest.skip(f"network namespaces: {said}")
    (shared, received), (alone, received_then) = said
    assert shared == [permutation(3, "train", 0, N).tolist()] * 2
    assert alone == [permutation(3, "train", 1, N).tolist()] * 2
    assert sum(received) > 0
    assert received_then == received
