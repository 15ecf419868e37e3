"""Two nodes with a network between them that can fail."""

import contextlib
from functools import partial

import pytest
from exchange_harness import config, free_port, labels
from network_namespaces import NotPermittedError, Switch
from pipeline_datasets import Counted
from pipeline_harness import Agent, Forked

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.preprocessor.order import permutation

N = 150


def read_and_unplug():
    """Returns what each node read and received, before and after one was unplugged."""
    try:
        switch = Switch(2)
    except NotPermittedError as error:
        return str(error)
    pipeline = SharedPipeline(train=Counted(N), seed=3)
    options = {"host": Switch.address(0), "fetch_timeout_s": 4, "join_timeout_s": 60}
    port = free_port()
    with contextlib.closing(switch), contextlib.ExitStack() as stack:
        agents = []
        for node in range(2):
            exchange = config(node, 2, port, **options)
            start = partial(Agent, pipeline, exchange=exchange, chunk_bytes=1000)
            agents.append(switch.at(node, start))
            stack.callback(agents[-1].close)
        clients = [agent.client() for agent in agents]
        found = []
        for epoch in range(2):
            read = [labels(client, epoch=epoch) for client in clients]
            found.append((read, [agent.stats().received for agent in agents]))
            switch.unplug(1)
        return found


def test_nodes_in_network_namespaces_share_until_one_is_unplugged():
    found = Forked(read_and_unplug).result()
    if isinstance(found, str):
        pytest.skip(f"network namespaces: {found}")
    (shared, received), (alone, received_then) = found
    assert shared == [permutation(3, "train", 0, N).tolist()] * 2
    assert alone == [permutation(3, "train", 1, N).tolist()] * 2
    assert sum(received) == N
    assert received_then == received
