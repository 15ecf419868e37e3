"""What keeps a node from exchanging keeps no trial from reading: all is made at home instead."""

import contextlib
import errno
import os
import signal
import socket
import threading
import time

import pytest
from exchange_harness import config, free_port, labels, pidfd
from pipeline_datasets import Counted
from pipeline_harness import serving
from torch.utils.data import default_collate

from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.exchange import exchange, exchanger
from optuna_fleet.pipeline.preprocessor.order import permutation

N = 64
FIXED = SharedPipeline(val=Counted(N))
SHUFFLED = SharedPipeline(train=Counted(N), seed=3)
EPOCHS = [permutation(3, "train", epoch, N).tolist() for epoch in range(300)]
NO_ANSWER = "self: the exchanger of this node does not answer"


@contextlib.contextmanager
def two_nodes(before_second=lambda: None, pipelines=(SHUFFLED, SHUFFLED), **options):
    """Two agents; what is patched ``before_second`` concerns the second only."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        agents = []
        for node, pipeline in enumerate(pipelines):
            if node:
                before_second()
            setting = config(node, 2, port, **options)
            agents.append(stack.enter_context(serving(pipeline, exchange=setting)))
        yield agents


@contextlib.contextmanager
def resumed(agent):
    """The agent's exchanger, which was stopped or stops, goes on afterwards."""
    pid, _ = agent.exchange()
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def read_until_received(agent):
    """Reads epochs until there are chunks of the other node among them."""
    client, before = agent.client(), agent.stats().received
    for epoch in range(3, 300):
        assert labels(client, epoch=epoch) == EPOCHS[epoch]
        if agent.stats().received > before:
            return
        time.sleep(0.02)  # on a busy machine the nodes need time to find each other
    pytest.fail("the other node was not asked")


# Joining


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("what", ["port", "host", "interface"])
def test_node_that_cannot_join_works_alone_and_says_why(what, node):
    with socket.create_server(("127.0.0.1", 0)) as stranger:  # takes calls and says nothing
        options = {
            "port": {"port": stranger.getsockname()[1]},
            "host": {"host": "no.such.host.invalid"},
            "interface": {"interface": "nosuch0"},
        }[what]
        setting = config(node, 2, **{"port": free_port(), "join_timeout_s": 1, **options})
        with serving(FIXED, exchange=setting) as agent:
            assert labels(agent.client(), "val") == list(range(N))
            stats, status = agent.stats(), agent.exchange()[1]
    assert (stats.preprocessed, stats.received) == (N, 0)
    if node == 0 and what != "interface":
        assert status.startswith("self: it can't open the meeting point ([Errno ")
    else:
        assert status.startswith(f"self: node {1 - node} did not come (")


@pytest.mark.parametrize("what", ["open_meeting_point", "connect"])
def test_what_blocks_for_ever_is_not_waited_for(what, monkeypatch):
    monkeypatch.setattr(exchanger, what, lambda *_, **__: threading.Event().wait())
    with serving(FIXED, exchange=config(0, 2, free_port(), join_timeout_s=0.1)) as agent:
        assert labels(agent.client(), "val") == list(range(N))
        assert "(no answer within 0.1 s)" in agent.exchange()[1]


def test_exchanger_that_never_gets_ready(monkeypatch):
    monkeypatch.setattr(exchanger, "meet", lambda *_, **__: threading.Event().wait())
    monkeypatch.setattr(exchange, "_START_S", 0.1)
    with serving(FIXED, exchange=config(1, 2, free_port(), join_timeout_s=0.1)) as agent:
        assert labels(agent.client(), "val") == list(range(N))
        assert agent.exchange()[1] == NO_ANSWER


# Measuring the network


def trap(monkeypatch, spring):
    """The next exchangers do something at the first question of a node that measures."""
    springs, echo = [spring], exchanger.echo

    def answer(request):
        while springs:
            springs.pop()()
        return echo(request)

    monkeypatch.setattr(exchanger, "echo", answer)


def test_peer_that_is_killed_while_the_network_is_measured(monkeypatch):
    with two_nodes(lambda: trap(monkeypatch, die), scheme="auto") as agents:
        for agent in agents:
            assert labels(agent.client()) == EPOCHS[0]
        told = [agent.exchange()[1] for agent in agents]
    assert told[0].startswith("self: the link to node 1 broke (")
    assert told[1] == "self: the exchanger of this node died"


def test_peer_that_is_stopped_while_the_network_is_measured_is_asked_once_it_answers(monkeypatch):
    def before_second():
        trap(monkeypatch, stop)
        monkeypatch.setattr(exchange, "_START_S", 0.1)
        monkeypatch.setattr(exchange, "_GRACE_S", 0.1)

    limits = {"join_timeout_s": 2, "fetch_timeout_s": 2}
    with two_nodes(before_second, scheme="auto", **limits) as agents:
        with resumed(agents[1]):
            for agent in agents:
                assert labels(agent.client()) == EPOCHS[0]
            told = [agent.exchange()[1] for agent in agents]
        read_until_received(agents[0])
    assert "node 1 was asked how fast the network is (no answer within 2 s)" in told[0]
    assert told[1] == NO_ANSWER


# Later


def test_own_exchanger_that_is_stopped_is_not_waited_for_and_used_again_when_it_answers(
    monkeypatch,
):
    monkeypatch.setattr(exchange, "_GRACE_S", 0.2)
    with two_nodes(fetch_timeout_s=0.3) as agents:
        client = agents[0].client()
        assert labels(client) == EPOCHS[0]
        os.kill(agents[0].exchange()[0], signal.SIGSTOP)
        with resumed(agents[0]):
            for epoch in (1, 2):
                assert labels(client, epoch=epoch) == EPOCHS[epoch]
            assert agents[0].exchange()[1] == NO_ANSWER
        read_until_received(agents[0])


def test_own_exchanger_that_is_stopped_with_chunks_on_their_way_and_then_killed(monkeypatch):
    """Its orders are nobody's when it dies: they have been carried out here."""
    monkeypatch.setattr(exchange, "_GRACE_S", 0.2)
    monkeypatch.setattr(exchanger, "sealed_file", lambda *_: stop())
    with two_nodes(fetch_timeout_s=0.3) as agents:
        assert labels(agents[0].client()) == EPOCHS[0]
        pid, status = agents[0].exchange()
        assert status == NO_ANSWER
        with pidfd(pid) as exited:
            os.kill(pid, signal.SIGKILL)
            exited()
        for epoch in (1, 2):
            assert labels(agents[0].client(), epoch=epoch) == EPOCHS[epoch]
        assert agents[0].exchange()[1] == "self: the exchanger of this node died"


def test_node_without_memory_for_what_comes_makes_it_itself(monkeypatch):
    """As far as it can; what it did not take stands in the way of all that follows."""

    def fail(*_):
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(exchanger, "sealed_file", fail)
    with two_nodes(fetch_timeout_s=1000) as agents:
        for agent in agents:
            assert labels(agent.client()) == EPOCHS[0]
            assert agent.stats().received == 0


# What must be the same on all nodes


class OnDevice:
    """A pipeline that leaves the end of samples to the trainers."""

    def __init__(self, pipeline):
        self._pipeline = pipeline

    def spec(self):
        return self._pipeline.spec(finish_on_device=True)

    def setup(self, num_preprocessors):
        return self._pipeline.setup(num_preprocessors, finish_on_device=True)


def doubled(sample):
    return sample[0] * 2, sample[1] * 2


def tripled(sample):
    return sample[0] * 3, sample[1] * 3


def collated(samples):
    return default_collate(samples)


def val(**options):
    return SharedPipeline(val=Counted(N), **options)


@pytest.mark.parametrize(
    ("pipelines", "factors", "received"),
    [
        ((val(finish=doubled), OnDevice(val(finish=doubled))), (2, 1), [0, 0]),
        ((OnDevice(val(finish=doubled)), OnDevice(val(finish=tripled))), (1, 1), [0, 0]),
        ((val(), val(collate_fn=collated)), (1, 1), [0, 0]),
        ((val(), val(on_error="skip")), (1, 1), [0, 0]),
        ((val(), val(order="rolling")), (1, 1), [0, 0]),
        ((OnDevice(val(finish=doubled)), OnDevice(val(finish=doubled))), (1, 1), [N // 2] * 2),
    ],
    ids=["whether-finished", "how-finished", "collate", "errors", "order", "same"],
)
def test_nodes_that_would_make_unlike_chunks_do_not_exchange(pipelines, factors, received):
    timeout_s = 60 if any(received) else 1
    with two_nodes(pipelines=pipelines, join_timeout_s=timeout_s) as agents:
        for agent, factor in zip(agents, factors, strict=True):
            assert labels(agent.client(), "val") == [factor * i for i in range(N)]
        assert [agent.stats().received for agent in agents] == received
