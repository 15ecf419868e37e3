"""Several nodes that exchange chunks, each with agent, exchanger, preprocessors and trials."""

import contextlib
import os
import signal
from mmap import mmap
from pathlib import Path

import pytest
from exchange_harness import config, free_port, labels, nodes, pidfd, read_everywhere
from pipeline_datasets import Counted, Raising
from pipeline_harness import serving

from optuna_fleet.exceptions import PreprocessingError
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.exchange import negotiation
from optuna_fleet.pipeline.exchange.cost import Choice
from optuna_fleet.pipeline.exchange.link import Link
from optuna_fleet.pipeline.exchange.scheme import Plan
from optuna_fleet.pipeline.preprocessor.order import permutation

N = 150


@pytest.mark.parametrize(
    ("scheme", "num_nodes", "p", "times"),
    [
        ("all-shared", 2, None, 1),
        ("all-shared", 3, None, 1),
        ("single-broadcast", 3, 2, 1),
        ("multi-broadcast", 3, 1, 1),
        ("self", 2, None, 2),
    ],
)
def test_every_trial_on_every_node_reads_the_permutation(scheme, num_nodes, p, times):
    epochs, sizes = range(2), (3, 128)
    pipeline = SharedPipeline(train=Counted(N), seed=3)
    with nodes(pipeline, num_nodes, scheme=scheme, num_preprocessor_nodes=p) as agents:
        read = read_everywhere(agents, epochs, sizes)
        stats = [agent.stats() for agent in agents]
    wanted = [permutation(3, "train", e, N).tolist() for e in epochs]
    assert read == [wanted] * (num_nodes * len(sizes))
    assert sum(each.preprocessed for each in stats) == N * len(epochs) * times
    received = [each.received + each.preprocessed for each in stats]
    assert received == [N * len(epochs)] * num_nodes


def test_nodes_of_unlike_budgets_agree_on_chunks():
    pipeline = SharedPipeline(train=Counted(N), val=Counted(20), seed=3)
    with two_unlike(pipeline) as agents:
        for name, epoch, order in (
            ("train", 0, permutation(3, "train", 0, N).tolist()),
            ("val", 0, list(range(20))),
        ):
            for agent in agents:
                assert labels(agent.client(), name, epoch=epoch) == order
        assert sum(agent.stats().preprocessed for agent in agents) == N + 20


def test_little_memory_does_not_make_nodes_wait_for_each_other():
    pipeline = SharedPipeline(train=Counted(N), seed=3)
    options = {"memory_bytes": 12_000, "chunk_bytes": 400}
    with nodes(pipeline, 3, agent_options=options) as agents:
        read = read_everywhere(agents, range(2), (5, 64))
        assert all(agent.stats().peak_bytes <= 12_000 for agent in agents)
    assert read == [[permutation(3, "train", e, N).tolist() for e in range(2)]] * 6


def test_a_sample_that_raises_is_an_error_on_every_node():
    with nodes(SharedPipeline(val=Raising(64)), 2) as agents:
        for agent in agents:
            with pytest.raises(PreprocessingError, match=r"Sample 17 .* ValueError: broken"):
                list(agent.client().read("val", epoch=0, batch_size=64))


def test_auto_says_what_it_chose_and_why():
    with nodes(SharedPipeline(train=Counted(N), seed=3), 2, scheme="auto") as agents:
        clients = [agent.client() for agent in agents]
        assert agents[0].exchange()[1] == "all-shared: until measurements have chosen"
        for epoch in range(200):  # until the answer has come
            for client in clients:
                assert labels(client, epoch=epoch) == permutation(3, "train", epoch, N).tolist()
            told = [agent.exchange()[1] for agent in agents]
            if "until" not in "".join(told):
                break
        assert "samples/s that each node can get: all-shared" in told[0]
        assert told[1] == told[0].partition(":")[0] + ": node 0 chose it"


def test_nodes_do_not_wait_in_a_circle_while_the_plan_changes(monkeypatch):
    def broadcast(measured):
        plan = Plan(scheme="multi-broadcast", num_nodes=4, num_preprocessor_nodes=1, version=1)
        return Choice(plan=plan, peak_samples_per_s=1.0, reason="for the test")

    monkeypatch.setattr(negotiation, "choose", broadcast)
    pipeline = SharedPipeline(train=Counted(N), seed=3)
    with nodes(pipeline, 4, scheme="auto", fetch_timeout_s=1000) as agents:
        read = read_everywhere(agents, range(8), (16, 50))
        assert agents[0].exchange()[1] == "multi-broadcast from 1 of 4 nodes: for the test"
    assert read == [[permutation(3, "train", e, N).tolist() for e in range(8)]] * 8


def test_a_node_whose_peer_never_comes_works_alone():
    exchange = config(1, 2, free_port(), join_timeout_s=0.1)
    with serving(SharedPipeline(val=Counted(64)), chunk_bytes=64, exchange=exchange) as agent:
        assert labels(agent.client(), "val") == list(range(64))
        assert (agent.stats().preprocessed, agent.stats().received) == (64, 0)


def test_nodes_that_do_not_share_the_secret_do_not_meet():
    port = free_port()
    pipeline = SharedPipeline(val=Counted(64))
    with contextlib.ExitStack() as stack:
        agents = [
            stack.enter_context(serving(pipeline, chunk_bytes=64, exchange=exchange))
            for exchange in (
                config(0, 2, port, join_timeout_s=0.5),
                config(1, 2, port, join_timeout_s=0.5, secret=b"the secret of another"),
            )
        ]
        for agent in agents:
            assert labels(agent.client(), "val") == list(range(64))
            assert agent.stats().received == 0


def test_bytes_changed_on_the_way_are_not_used(monkeypatch):
    send = Link._send

    def change(self, data, tag):
        if isinstance(data, mmap):
            data[len(data) - 1] ^= 1
        send(self, data, tag)

    monkeypatch.setattr(Link, "_send", change)
    with nodes(SharedPipeline(train=Counted(N), seed=3), 2) as agents:
        read = read_everywhere(agents, range(1), (7,))
        stats = [agent.stats() for agent in agents]
    assert read == [[permutation(3, "train", 0, N).tolist()]] * 2
    assert [(each.preprocessed, each.received) for each in stats] == [(N, 0)] * 2


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("what", ["agent", "exchanger"])
def test_killed_node_does_not_stop_the_others(what, victim):
    pipeline = SharedPipeline(train=Counted(N), seed=3)
    with nodes(pipeline, 3) as agents, contextlib.ExitStack() as stack:
        rest = [agent for agent in agents if agent is not agents[victim]]
        readers = [iter(agent.client().read("train", epoch=0, batch_size=8)) for agent in rest]
        begun = [next(reader).data[1].tolist() for reader in readers]
        pid, _ = agents[victim].exchange()
        with pidfd(pid) as exited:
            if what == "agent":
                stack.enter_context(agents[victim].killed())
                exited()
                agents.pop(victim)
            else:
                os.kill(pid, signal.SIGKILL)
                exited()
        for reader, seen in zip(readers, begun, strict=True):
            seen += [label for batch in reader for label in batch.data[1].tolist()]
            assert seen == permutation(3, "train", 0, N).tolist()
        before = sum(agent.stats().preprocessed for agent in rest)
        wanted = permutation(3, "train", 1, N).tolist()
        assert read_everywhere(agents, range(1, 2), (7,)) == [[wanted]] * len(agents)
        # Those that are left agree on who stands in for the lost node.
        assert sum(agent.stats().preprocessed for agent in rest) == before + N


def test_stopped_node_is_not_waited_for_and_asked_again_when_it_answers():
    pipeline = SharedPipeline(train=Counted(N), seed=3)
    with nodes(pipeline, 2, fetch_timeout_s=0.3) as agents, contextlib.ExitStack() as stack:
        client = agents[0].client()
        assert labels(client, epoch=0) == permutation(3, "train", 0, N).tolist()
        pid, _ = agents[1].exchange()
        os.kill(pid, signal.SIGSTOP)
        stack.callback(os.kill, pid, signal.SIGCONT)
        before = agents[0].stats()
        for epoch in (1, 2):
            assert labels(client, epoch=epoch) == permutation(3, "train", epoch, N).tolist()
        stopped = agents[0].stats()
        # What was on its way may still have come.
        assert stopped.preprocessed - before.preprocessed >= 2 * N - 2 * 4 * 8
        os.kill(pid, signal.SIGCONT)
        for epoch in range(3, 300):
            labels(client, epoch=epoch)
            if agents[0].stats().received > stopped.received + N // 4:
                return
        pytest.fail("the node that goes on was not asked again")


def test_nodes_listen_where_they_must_and_closing_leaves_no_process():
    with nodes(SharedPipeline(train=Counted(N)), 2) as agents:
        labels(agents[0].client())
        exchangers = [agent.exchange()[0] for agent in agents]
        pids = [*exchangers, *(pid for agent in agents for pid in agent.pids())]
        listening = [address for pid in exchangers for address in listening_at(pid)]
        assert set(listening) == {"127.0.0.1"}  # and nowhere else
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def listening_at(pid):
    """Addresses at which the process waits for connections."""
    inodes = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path(f"/proc/{pid}/net/tcp6").read_text().splitlines()[1:]]
    for row in rows:
        if row[3] == "0A" and f"socket:[{row[9]}]" in inodes:
            packed = bytes.fromhex(row[1].partition(":")[0])
            yield ".".join(map(str, reversed(packed)))


@contextlib.contextmanager
def two_unlike(pipeline):
    port = free_port()
    with (
        serving(pipeline, exchange=config(0, 2, port), chunk_bytes=1000) as first,
        serving(pipeline, exchange=config(1, 2, port), chunk_bytes=300) as second,
    ):
        yield first, second
