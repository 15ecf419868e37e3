"""Who preprocesses what, and which scheme is the cheapest: pure functions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optuna_fleet.exceptions import FleetConfigError, ProtocolError
from optuna_fleet.pipeline.exchange import ExchangeConfig
from optuna_fleet.pipeline.exchange.cost import Measured, choose, peak, plans
from optuna_fleet.pipeline.exchange.deadlock_guard import DeadlockGuard
from optuna_fleet.pipeline.exchange.frames import FRAME_BYTES, Frame, Kind, Sealer, Status
from optuna_fleet.pipeline.exchange.negotiation import Report, summary
from optuna_fleet.pipeline.exchange.scheme import Plan, makers, source, sources, traffic

some_plans = st.integers(1, 9).flatmap(lambda n: st.sampled_from(plans(n)))


def plan(scheme, n, p=None):
    return Plan(scheme=scheme, num_nodes=n, num_preprocessor_nodes=p or n, version=1)


def measured(rates, *, bytes_per_s=1e9, sample_bytes=150_000, **options):
    options = {"chunk_samples": 16, "latency_s": 1e-3, "num_lanes": 4, **options}
    return Measured(
        samples_per_s=tuple(rates), bytes_per_s=bytes_per_s, sample_bytes=sample_bytes, **options
    )


@given(plan=some_plans, chunk=st.integers(0, 1000), data=st.data())
def test_nodes_never_wait_for_each_other_in_a_circle(plan, chunk, data):
    nodes = range(plan.num_nodes)
    views = [data.draw(st.sets(st.sampled_from(nodes))) for _ in nodes]  # as they may differ
    for node in nodes:
        seen = []
        while node is not None:
            assert node not in seen
            seen.append(node)
            node = source(plan, node, chunk, views[node])


@given(plan=some_plans, chunk=st.integers(0, 1000), data=st.data())
def test_one_node_makes_a_chunk_for_all_that_are_left(plan, chunk, data):
    up = data.draw(st.sets(st.sampled_from(range(plan.num_nodes)), min_size=1))
    made = [node for node in up if source(plan, node, chunk, up) is None]
    assert len(made) == (len(up) if plan.scheme == "self" else 1)


@pytest.mark.parametrize("fetch_first", [True, False])
def test_a_chunk_is_not_fetched_by_one_plan_and_given_by_another(fetch_first):
    crossing = DeadlockGuard()
    assert (crossing.fetch if fetch_first else crossing.give)("chunk", 0)
    second, end = (crossing.give, crossing.fetched) if fetch_first else (crossing.fetch, None)
    assert not second("chunk", 1)
    assert second("other", 1)
    assert second("chunk", 0)
    crossing.given("chunk", 0)
    if end is not None:
        end("chunk")
    assert second("chunk", 1)


@given(plan=some_plans)
def test_owners_have_equal_shares(plan):
    n, p = plan.num_nodes, makers(plan)
    shares = [sum(not sources(plan, node, chunk) for chunk in range(p)) for node in range(n)]
    assert shares == ([1] * n if plan.scheme == "self" else [1] * p + [0] * (n - p))


def loads(plan, end):
    """How often each node sends (end 0) or receives (end 1) a sample, on average."""
    shares = traffic(plan).items()
    nodes = range(plan.num_nodes)
    return [sum(share for link, share in shares if link[end] == node) for node in nodes]


@pytest.mark.parametrize(("p", "n"), [(1, 2), (2, 5), (3, 7), (4, 4)])
def test_traffic_in_closed_form(p, n):
    assert loads(plan("self", n), 0) == [0] * n
    for end in (0, 1):
        assert loads(plan("all-shared", n), end) == pytest.approx([(n - 1) / n] * n)
    share, others = (p - 1) / p, n - p
    for scheme in ("single-broadcast", "multi-broadcast"):
        assert loads(plan(scheme, n, p), 1) == pytest.approx([share] * p + [1] * others)
    leader = share + min(2, others)
    out = loads(plan("single-broadcast", n, p), 0)
    assert out[:p] == pytest.approx([share] * (p - 1) + [leader])
    assert max(loads(plan("multi-broadcast", n, p), 0)) <= 2


def test_peak_in_closed_form():
    slow_decode = measured([100] * 4)
    assert peak(plan("self", 4), slow_decode) == 100
    assert peak(plan("all-shared", 4), slow_decode) == 400
    assert peak(plan("multi-broadcast", 4, 2), slow_decode) == 200
    slow_network = measured([1000] * 4, bytes_per_s=15e6, latency_s=0)
    assert peak(plan("all-shared", 4), slow_network) == pytest.approx(100 * 4 / 3)
    far = measured([1e6] * 2, bytes_per_s=1e15, latency_s=0.1, num_lanes=2)
    assert peak(plan("all-shared", 2), far) == pytest.approx(2 * 16 / 0.1 * 2)


@pytest.mark.parametrize(
    ("situation", "scheme", "p"),
    [
        (measured([1000] * 4, bytes_per_s=15e6), "self", None),
        (measured([100] * 4), "all-shared", None),
        (measured([1000] * 4, latency_s=1.0), "self", None),
        (measured([1000, 1000, 10, 10, 10]), "multi-broadcast", 2),
        (measured([1000, 10]), "multi-broadcast", 1),
        (measured([100]), "all-shared", None),
    ],
)
def test_choice(situation, scheme, p):
    choice = choose(situation)
    assert choice.plan.scheme == scheme
    assert p is None or choice.plan.num_preprocessor_nodes == p
    assert choice.plan.version == 1
    assert f"{scheme} {choice.peak_samples_per_s:.0f}" in choice.reason


rates = st.floats(1, 1e6)


@given(
    st.lists(rates, min_size=1, max_size=6),
    st.floats(1e5, 1e11),
    st.floats(1, 1e7),
    st.floats(0, 1),
)
def test_choice_is_about_the_fastest_and_never_slower_than_alone(
    samples_per_s, bytes_per_s, sample_bytes, latency_s
):
    situation = measured(
        samples_per_s, bytes_per_s=bytes_per_s, sample_bytes=sample_bytes, latency_s=latency_s
    )
    best = max(peak(plan, situation) for plan in plans(len(samples_per_s)))
    assert choose(situation).peak_samples_per_s >= 0.95 * best >= 0.95 * min(samples_per_s)


def test_reports_are_summed_up_by_the_slowest():
    def report(rate, bytes_per_s, latency_s):
        return Report(
            samples_per_s=rate,
            sample_bytes=10.0,
            chunk_samples=16,
            bytes_per_s=bytes_per_s,
            latency_s=latency_s,
        )

    exchange = config(num_nodes=3)
    told = summary([report(5.0, 100.0, 0.1), report(7.0, 0.0, 0.2)], exchange)
    assert (told.samples_per_s, told.bytes_per_s, told.latency_s) == ((5.0, 7.0, 5.0), 100.0, 0.2)
    assert summary([report(5.0, 0.0, 0.1)], exchange) is None


# What travels


def test_frames_are_refused_from_whom_does_not_know_the_secret_or_the_data():
    ours, others = Sealer(b"secret", b"data"), [Sealer(b"public", b"data"), Sealer(b"secret", b"")]
    frame = Frame(kind=Kind.CHUNK, status=Status.GIVEN, numbers=(0, -5, 2**62, 1, 2, 3, 4, 8))
    packed = ours.pack(frame)
    assert len(packed) == FRAME_BYTES
    assert ours.unpack(packed) == frame
    for other in others:
        assert other.store_prefix() != ours.store_prefix()
        assert other.digest(b"bytes") != ours.digest(b"bytes")
        with pytest.raises(ProtocolError, match="secret"):
            other.unpack(packed)


@given(st.integers(0, FRAME_BYTES - 1), st.integers(1, 255))
def test_changed_frames_are_refused(place, flip):
    sealer = Sealer(b"secret")
    packed = bytearray(sealer.pack(Frame(kind=Kind.SIZE, numbers=(1, 2, 3))))
    packed[place] ^= flip
    with pytest.raises(ProtocolError):
        sealer.unpack(bytes(packed))


# What users say


def config(**options):
    options = {"node": 0, "num_nodes": 2, "host": "127.0.0.1", "port": 1, **options}
    return ExchangeConfig(secret=b"x" * 32, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node": 2}, "`node` .* is 2, but must be from 0 to 1"),
        ({"scheme": "some"}, "`scheme` .* is 'some', but must be auto or of"),
        ({"scheme": "multi-broadcast"}, "`num_preprocessor_nodes` .* None, .* from 1 to 2"),
        ({"num_preprocessor_nodes": 1}, "`num_preprocessor_nodes` .* None for 'auto'"),
        ({"fetch_timeout_s": 0}, "`fetch_timeout_s` .* is 0, but must be > 0"),
    ],
)
def test_config_says_what_is_wrong(options, message):
    with pytest.raises(FleetConfigError, match=message):
        config(**options)


def test_secret_is_not_shown():
    assert "xxx" not in repr(config())
