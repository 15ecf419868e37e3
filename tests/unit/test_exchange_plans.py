"""Who owns which chunk: pure functions."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.executor.fleet.pipelines import ChunkSharing
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.exchange import Peer, Plan
from optuna_fleet.pipeline.spec import ChunkKey
from optuna_fleet.pipeline.wire import encode
from optuna_fleet.wire.node_messages import ShareChunks


def peers(count):
    return tuple(Peer(agent=f"a{n}", host="10.0.0.1", port=n + 1) for n in range(count))


KEYS = [ChunkKey("train", epoch, chunk) for epoch in range(3) for chunk in range(100)]


# -- owners ---------------------------------------------------------------------------------------


def test_owners_have_about_equal_shares():
    plan = Plan(scheme="all-shared", peers=peers(4))
    shares = Counter(plan.owner(key).agent for key in KEYS)
    assert min(shares.values()) > 50
    some = Plan(scheme="multi-broadcast", peers=peers(4), makers=frozenset({"a1", "a3"}))
    assert {some.owner(key).agent for key in KEYS} == {"a1", "a3"}
    one = Plan(scheme="single-broadcast", peers=peers(4))
    assert {one.owner(key).agent for key in KEYS} == {"a0"}


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(peers=peers(3)), Plan(scheme="all-shared", peers=peers(1))]
)
def test_each_node_makes_all_if_none_is_to_share_or_there_is_but_one(plan):
    assert {plan.owner(key) for key in KEYS} == {None}


@given(st.integers(3, 8), st.integers(0, 7))
def test_a_node_that_goes_leaves_the_chunks_of_the_others_where_they_are(count, gone):
    before = peers(count)
    after = tuple(peer for n, peer in enumerate(before) if n != gone % count)
    for key in KEYS[:50]:
        owner = Plan(scheme="all-shared", peers=before).owner(key)
        if owner in after:
            assert Plan(scheme="all-shared", peers=after).owner(key) == owner


# -- the driver's part ----------------------------------------------------------------------------


class Agents(dict):
    """What agents were told last."""

    def tell(self, agent, message):
        self.setdefault(agent, []).append(message)


def joined(exchange, count):
    agents = Agents()
    sharing = ChunkSharing(exchange, agents.tell)
    for peer in peers(count):
        sharing.joined(peer.agent)
    return sharing, agents


def test_all_nodes_know_of_each_other_while_they_are_there():
    sharing, agents = joined("all-shared", 3)
    assert agents == {f"a{n}": [ShareChunks()] for n in range(3)}
    for peer in peers(3):
        sharing.ready(peer)
    plan = Plan(scheme="all-shared", peers=peers(3))
    assert [told[-1] for told in agents.values()] == [plan] * 3
    sharing.left("a1")
    left = Plan(scheme="all-shared", peers=(peers(3)[0], peers(3)[2]))
    assert [agents[name][-1] for name in ("a0", "a2")] == [left] * 2
    assert agents["a1"][-1] == plan
    moved = Peer(agent="a0", host="10.0.0.1", port=77)  # its process was started again
    sharing.ready(moved)
    assert agents["a2"][-1] == Plan(scheme="all-shared", peers=(moved, peers(3)[2]))


def test_a_plan_of_many_nodes_fits_into_a_packet():
    sharing, _ = joined("all-shared", 1)
    for number in range(600):
        name = f"{number:064}"  # host names may be that long
        sharing.ready(Peer(agent=name, host=2 * name, port=65535))
    assert encode(sharing.plan)


@pytest.mark.parametrize(
    ("exchange", "makers"),
    [
        ("multi-broadcast", "01"),  # half of the nodes
        ("multi-broadcast:3", "012"),
        ("single-broadcast:1", "0"),
        ("single-broadcast:3", "012"),
        ("single-broadcast:900", "0123"),
    ],
)
def test_who_makes_chunks_can_be_given(exchange, makers):
    sharing, agents = joined(exchange, 4)
    for peer in peers(4):
        sharing.ready(peer)
    assert agents["a3"][-1].makers == {f"a{number}" for number in makers}
    owners = {sharing.plan.owner(ChunkKey("train", 0, chunk)).agent for chunk in range(200)}
    assert owners == {f"a{number}" for number in makers}
    sharing.left("a0")  # the next one makes in its place
    now = {f"a{int(number) + 1}" for number in makers} & {"a1", "a2", "a3"}
    assert agents["a3"][-1].makers == now


@pytest.mark.parametrize(
    "exchange",
    [
        *("all", "all-shared:2", "local:2", "single-broadcast:0", 4, None),
        *(f"multi-broadcast:{p}" for p in ("", 0, -1, 2.5, "9" * 5000)),
    ],
)
def test_a_scheme_that_there_is_not(exchange):
    with pytest.raises(FleetConfigError, match=r"`exchange` is .*, but must"):
        SharedPipeline(train=[1, 2, 3], exchange=exchange)
