"""Who owns which chunk, and which scheme is the cheapest: pure functions."""

import math
import os
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.executor.fleet.sharing import ChunkSharing, measured_of
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.exchange.cost import Measured, choose, peak
from optuna_fleet.pipeline.exchange.plan import Peer, Plan
from optuna_fleet.pipeline.spec import ChunkKey
from optuna_fleet.pipeline.stats import PipelineStats, PipelineUse
from optuna_fleet.pipeline.wire import encode
from optuna_fleet.wire.node_messages import PipelineReport, ShareChunks


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


# -- costs ----------------------------------------------------------------------------------------

ALIKE = Measured(
    samples_per_s=(100.0,) * 4,
    sample_s=0.01,
    wanted_per_s=1000.0,
    sample_bytes=1e5,
    bytes_per_s=1e9,
)


def like(**more):
    return replace(ALIKE, **more)


def test_peak_in_closed_form():
    everyone = (0, 1, 2, 3)
    assert peak("local", everyone, ALIKE) == 100
    assert peak("all-shared", everyone, ALIKE) == 400
    assert peak("multi-broadcast", (0, 1), ALIKE) == 200
    assert peak("single-broadcast", (0,), ALIKE) == 100
    slow = like(bytes_per_s=1.5e7)  # 150 samples/s
    assert peak("all-shared", everyone, slow) == 150 / (3 / 4)
    assert peak("multi-broadcast", (0, 1), slow) == 150 * 2 / 3
    assert peak("single-broadcast", (0,), slow) == 150 / 3
    unlike = like(samples_per_s=(100.0, 100.0, 100.0, 10.0))
    assert peak("all-shared", everyone, unlike) == 40
    assert peak("multi-broadcast", (0, 1, 2), unlike) == 300


@pytest.mark.parametrize(
    ("measured", "scheme", "makers"),
    [
        (ALIKE, "all-shared", (0, 1, 2, 3)),  # needed for its speed
        (like(wanted_per_s=50.0), "all-shared", (0, 1, 2, 3)),  # saves preprocessing
        (like(wanted_per_s=50.0, bytes_per_s=5e6), "local", (0, 1, 2, 3)),  # sending costs more
        (like(bytes_per_s=5e6), "local", (0, 1, 2, 3)),  # the network is too slow
        (like(samples_per_s=(100.0, 1.0, 100.0, 100.0)), "multi-broadcast", (0, 2, 3)),
    ],
)
def test_choice(measured, scheme, makers):
    choice = choose(measured)
    assert (choice.scheme, choice.makers) == (scheme, makers)


@given(
    st.lists(st.floats(1, 1e4), min_size=2, max_size=6),
    st.floats(1e-4, 1),
    st.floats(1, 1e5),
    st.floats(1e4, 1e10),
)
def test_what_is_chosen_feeds_trials_as_well_as_each_for_itself(rates, sample_s, wanted, link):
    measured = Measured(
        samples_per_s=tuple(rates),
        sample_s=sample_s,
        wanted_per_s=wanted,
        sample_bytes=1e5,
        bytes_per_s=link,
    )
    choice = choose(measured)
    alone = min(min(rates), wanted)
    assert peak(choice.scheme, choice.makers, measured) >= 0.9 * alone
    again = choose(measured, (choice.scheme, choice.makers))
    assert (again.scheme, again.makers) == (choice.scheme, choice.makers)


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


def report(agent, num_most=4, **more):
    values = {
        "preprocessed": 1000,
        "consumed": 4000,
        "busy_s": 10.0,
        "num_received": 1000,
        "received_bytes": 10**8,
        "link_bytes_per_s": 1e9,
        "use": PipelineUse(active_s=10.0, starved_s=5.0),
    }
    return PipelineReport(
        agent=agent, num_most=num_most, stats=PipelineStats(**{**values, **more})
    )


def test_a_node_alone_shares_with_nobody():
    assert joined("auto", 1)[1] == {}
    assert joined("local", 3)[1] == {}


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
        sharing.ready(Peer(agent=name, host=2 * name, port=65535, fingerprint=os.urandom(32)))
    assert encode(sharing.plan)


def test_a_broadcast_that_is_wanted_is_that_of_half_of_the_nodes():
    sharing, agents = joined("multi-broadcast", 3)
    for peer in peers(3):
        sharing.ready(peer)
    assert agents["a2"][-1].makers == {"a0", "a1"}


@pytest.mark.parametrize(("given", "makers"), [("1", "0"), ("3", "012"), ("900", "0123")])
def test_how_many_nodes_broadcast_can_be_given(given, makers):
    sharing, agents = joined(f"multi-broadcast:{given}", 4)
    for peer in peers(4):
        sharing.ready(peer)
    assert agents["a3"][-1].makers == {f"a{number}" for number in makers}
    owners = {sharing.plan.owner(ChunkKey("train", 0, chunk)).agent for chunk in range(200)}
    assert owners == {f"a{number}" for number in makers}
    sharing.left("a0")  # the next one makes in its place
    now = {f"a{int(number) + 1}" for number in makers} & {"a1", "a2", "a3"}
    assert agents["a3"][-1].makers == now


def test_the_scheme_changes_when_the_rates_are_known_and_only_then():
    sharing, agents = joined("auto", 2)
    for peer in peers(2):
        sharing.ready(peer)
    assert agents["a0"][-1].scheme == "all-shared"
    slow = {"link_bytes_per_s": 1e6}
    sharing.reported({"a0": report("a0", **slow)})
    assert agents["a0"][-1].scheme == "all-shared"
    sharing.reported({name: report(name, **slow) for name in ("a0", "a1")})
    assert [agents[name][-1].scheme for name in ("a0", "a1")] == ["local"] * 2
    assert "local, peak(2)" in sharing.reason


def test_rates_are_those_of_reports():
    idle = report("a1", preprocessed=0, busy_s=0.0, num_received=0, received_bytes=0, num_most=2)
    measured = measured_of([report("a0"), idle])
    assert measured.samples_per_s == (400.0, 200.0)
    assert measured.sample_s == 0.01
    assert math.isclose(measured.wanted_per_s, 2000 / 5)
    assert measured.sample_bytes == 1e5
    assert measured_of([idle, idle]) is None


@pytest.mark.parametrize(
    "exchange",
    ["all", *(f"multi-broadcast:{p}" for p in ("", 0, -1, 2.5, "9" * 5000)), "local:2", 4, None],
)
def test_a_scheme_that_there_is_not(exchange):
    with pytest.raises(FleetConfigError, match=r"`exchange` is .*, but must"):
        SharedPipeline(train=[1, 2, 3], exchange=exchange)
