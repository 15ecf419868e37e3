"""Which devices trials get: few nodes for each, and as few changes as can be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc.placement import place as placed
from tests.behaviour.allocation import nodes_strategy, problem_of, trial

FOURS = ((0, 1, 2, 3), (4, 5, 6, 7))


def place(counts, nodes, current=None):
    """Of trials that get so many devices, and have these now."""
    current = current or {}
    trials = [trial(n, (1.0,) * 40, devices=current.get(n, ())) for n in counts]
    return placed(problem_of(*trials, nodes=nodes), {n: {"": m} for n, m in counts.items()})


def spans(devices, nodes):
    return sum(bool(set(devices) & set(node)) for node in nodes)


@pytest.mark.parametrize(
    ("counts", "nodes", "expected"),
    [
        ({1: 1, 2: 4, 3: 3}, FOURS, {2: (0, 1, 2, 3), 3: (4, 5, 6), 1: (7,)}),
        ({1: 2, 2: 6}, FOURS, {2: (0, 1, 2, 3, 4, 5), 1: (6, 7)}),
        (
            {1: 5, 2: 2, 3: 3},
            ((0, 1), (10, 11, 12, 13, 14), (20, 21, 22)),
            {1: (10, 11, 12, 13, 14), 2: (0, 1), 3: (20, 21, 22)},
        ),
        ({1: 1, 2: 1}, ((0, 1, 2, 3), (4, 5)), {1: (4,), 2: (5,)}),  # one stays whole
    ],
)
def test_each_is_where_it_fits_tightest_the_widest_first(counts, nodes, expected):
    assert place(counts, nodes) == expected


@pytest.mark.parametrize(
    ("counts", "nodes", "current", "expected"),
    [
        ({1: 2, 2: 2}, FOURS, {1: (3, 4)}, {1: (3, 4), 2: (0, 1)}),  # though it were closer
        ({1: 3}, ((0, 1, 2, 3), (5, 6, 7)), {1: (6, 7)}, {1: (5, 6, 7)}),
        ({1: 2}, ((0, 1, 2, 3), (5, 6, 7)), {1: (3, 4)}, {1: (0, 3)}),  # one is gone
        ({1: 1, 2: 1}, ((0, 1),), {1: (0,), 2: (0,)}, {1: (0,), 2: (1,)}),
    ],
)
def test_who_has_devices_keeps_them_and_grows_where_it_is(counts, nodes, current, expected):
    assert place(counts, nodes, current) == expected


@settings(max_examples=60)
@given(st.data())
def test_placement_is_complete_disjoint_and_deterministic(data):
    nodes = data.draw(nodes_strategy(12))
    devices = [d for node in nodes for d in node]
    wanted, current, left = {}, {}, list(devices)
    for number in range(data.draw(st.integers(0, 5))):
        if left:
            wanted[number] = data.draw(st.integers(1, len(left)))
            del left[: wanted[number]]
            current[number] = tuple(data.draw(st.lists(st.sampled_from(devices), unique=True)))
    found = place(wanted, nodes, current)
    used = [d for chosen in found.values() for d in chosen]
    assert {t: len(d) for t, d in found.items()} == wanted
    assert len(used) == len(set(used))
    assert set(used) <= set(devices)
    assert found == place(dict(reversed(wanted.items())), nodes, current)


def fewest(m, nodes):
    left, num_nodes = m, 0
    for size in sorted(map(len, nodes), reverse=True):
        if left > 0:
            left, num_nodes = left - size, num_nodes + 1
    return num_nodes


@settings(max_examples=50)
@given(st.data())
def test_a_trial_alone_is_on_as_few_nodes_as_can_be_however_uneven_they_are(data):
    nodes = data.draw(nodes_strategy(12).filter(any))
    m = data.draw(st.integers(1, sum(map(len, nodes))))
    assert spans(place({1: m}, nodes)[1], nodes) == fewest(m, nodes)
