"""Chunks shared between nodes: who makes them, and that it shows in no batch."""

import itertools
import os
import signal

import pytest
from exchange_harness import OTHERS, Node, agree, labels, nodes, read_everywhere
from pipeline_datasets import COUNTS, SWITCH, Counted, Raising
from pipeline_harness import permutation

from optuna_fleet import SharedPipeline
from optuna_fleet.exceptions import PreprocessingError

N = 150
LONG_S = 600.0
"""Nobody is done without because the machine is busy."""


def order_of(epoch):
    return permutation(3, "train", epoch, N).tolist()


def pipeline():
    return SharedPipeline(train=Counted(N), val=Counted(20), seed=3)


def sums(found):
    """Samples preprocessed, and received, by all nodes."""
    stats = [node.stats() for node in found]
    return sum(each.preprocessed for each in stats), sum(each.num_received for each in stats)


@pytest.mark.parametrize(
    ("scheme", "times"),
    [("local", 3), ("all-shared", 1), ("single-broadcast", 1), ("multi-broadcast", 1)],
)
def test_every_trial_on_every_node_reads_the_permutation(scheme, times):
    epochs = range(2)
    makers = frozenset({"node 0", "node 2"})
    with nodes(pipeline(), 3, patience_s=LONG_S) as found:
        agree(found, scheme, makers=makers)
        read = read_everywhere(found, epochs, (7, 16))
        stats = [node.stats() for node in found]
    assert read == [[order_of(epoch) for epoch in epochs]] * 6
    assert [each.preprocessed + each.num_received for each in stats] == [2 * N] * 3
    assert sum(each.preprocessed for each in stats) == times * 2 * N
    busy = {0, 2} if "broadcast" in scheme else {0, 1, 2}
    assert {node for node, each in enumerate(stats) if each.preprocessed} == busy


def test_the_last_maker_of_a_single_broadcast_gives_to_those_that_make_nothing():
    with nodes(pipeline(), 3, patience_s=LONG_S) as found:
        agree(found, "single-broadcast", makers=frozenset({"node 0", "node 1"}))
        assert labels(found[2].client()) == order_of(0)
        first, second, other = (node.stats() for node in found)
        assert (other.preprocessed, other.num_received) == (0, N)
        assert second.preprocessed + second.num_received == N  # it has all to give
        assert (first.preprocessed, first.num_received) == (second.num_received, 0)
        assert 0 < first.preprocessed < N
        os.kill(found[1].giver, signal.SIGKILL)
        assert labels(found[2].client(), epoch=1) == order_of(1)


@pytest.mark.parametrize(
    "unlike", [{"chunk_bytes": 300}, {"finish_on_device": True}, {"credentials": OTHERS}]
)
def test_nodes_whose_chunks_are_unlike_or_of_another_sweep_share_none(unlike):
    def finishing():
        return SharedPipeline(train=Counted(N), seed=3, finish=lambda x: x)

    with nodes(finishing(), 1, patience_s=LONG_S) as found:
        found.append(Node(finishing(), "node 1", **{"patience_s": LONG_S, **unlike}))
        agree(found)
        assert read_everywhere(found, range(1), (7,)) == [[order_of(0)]] * 2
        assert sums(found) == (2 * N, 0)
        found.pop().close()


KEPT = {"prepare": lambda s: (s[0].repeat(8), s[1]), "augment": lambda sample: sample}


@pytest.mark.parametrize(
    ("stages", "memory_bytes"),
    [({}, 6000), (KEPT, 80_000)],  # of a chunk; what the decoded store leaves
)
def test_little_memory_does_not_make_nodes_wait_for_each_other(stages, memory_bytes):
    data = SharedPipeline(train=Counted(N), seed=3, **stages)
    with nodes(data, 2, patience_s=LONG_S, memory_bytes=memory_bytes) as found:
        assert read_everywhere(found, range(2), (7, 16)) == [[order_of(0), order_of(1)]] * 4


def test_a_sample_that_raises_is_an_error_on_every_node():
    data = SharedPipeline(train=Raising(64, at=1), shuffled=[])
    with nodes(data, 2, patience_s=LONG_S) as found:
        for node in found:
            with pytest.raises(PreprocessingError, match="broken image"):
                list(node.client().read("train", epoch=0, batch_size=8))
            assert sum("their size is guessed" in text for text in node.notices()) == 1
        COUNTS[SWITCH] = 1  # mended
        for node in found:
            read = node.client().read("train", epoch=0, batch_size=8)
            assert sum(batch.local_size for batch in read) == 64


def test_plans_may_change_at_any_time():
    with nodes(pipeline(), 2, patience_s=LONG_S) as found:
        streams = [node.client().read("train", epoch=0, batch_size=5) for node in found]
        read = [[], []]
        for step, batches in enumerate(zip(*streams, strict=True)):
            agree(found[:: 1 if step % 2 else -1], "single-broadcast")
            for labels_read, batch in zip(read, batches, strict=True):
                labels_read += batch.data[1].tolist()
        assert read == [order_of(0)] * 2


def test_a_node_that_comes_takes_part_and_one_that_goes_costs_only_its_chunks():
    with nodes(pipeline(), 2, patience_s=LONG_S) as found:
        assert read_everywhere(found, range(1), (7,)) == [[order_of(0)]] * 2
        assert sums(found) == (N, N)
        found.append(Node(pipeline(), "node 2", patience_s=LONG_S))
        agree(found)
        assert read_everywhere(found, range(1, 2), (7,)) == [[order_of(1)]] * 3
        assert sums(found) == (2 * N, 3 * N)
        assert found[2].stats().preprocessed
        with found.pop().killed():
            agree(found)
            assert read_everywhere(found, range(2, 3), (7,)) == [[order_of(2)]] * 2
        made, received = sums(found)
        assert made + received == 6 * N


def test_a_stopped_node_is_done_without_until_there_is_a_new_plan():
    with nodes(pipeline(), 2, patience_s=0.5) as found:
        client = found[0].client()
        assert labels(client, epoch=0) == order_of(0)
        os.kill(found[1].giver, signal.SIGSTOP)
        before = found[0].stats()
        assert labels(client, epoch=1) == order_of(1)
        assert sums(found[:1]) == (before.preprocessed + N, before.num_received)
        os.kill(found[1].giver, signal.SIGCONT)
        for epoch in itertools.count(2):  # where the machine is busy, it may be too slow again
            agree(found)
            assert labels(client, epoch=epoch) == order_of(epoch)
            if found[0].stats().num_received > before.num_received:
                break
