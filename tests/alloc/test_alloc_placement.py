import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc import placement
from optuna_fleet.alloc.placement import fleet_score, place
from tests.behaviour.allocation import nodes_strategy

FOURS = ((0, 1, 2, 3), (4, 5, 6, 7))


def spans(devices, nodes):
    return sum(bool(set(devices) & set(node)) for node in nodes)


def test_fleet_score_is_eq4():
    assert fleet_score({1: (0, 1), 2: (2, 4), 3: (3,)}, FOURS) == 1 / 2 + 2 / 2 + 1 / 1


def test_fleet_slide_31_keeps_the_wide_trial_and_the_small_one_apart():
    placed = place({1: 1, 4: 3}, ((0, 1, 2, 3),), {})
    assert sorted(placed[1] + placed[4]) == [0, 1, 2, 3]


def test_trials_that_fill_nodes_come_first_and_pairs_fill_one_together():
    placed = place({1: 1, 2: 4, 3: 3}, FOURS, {})
    assert spans(placed[2], FOURS) == 1
    assert spans(placed[1] + placed[3], FOURS) == 1


def test_pairs_may_fill_several_nodes():
    placed = place({1: 3, 2: 5}, FOURS, {})
    assert spans(placed[1], FOURS) == 1
    assert spans(placed[2], FOURS) == 2


def test_three_trials_that_fill_a_node_are_found_by_the_search():
    placed = place({1: 1, 2: 1, 3: 2, 4: 3}, FOURS, {})
    assert fleet_score(placed, FOURS) == pytest.approx(1 + 1 + 1 / 2 + 1 / 3)


def test_uneven_nodes_take_what_fits_them():
    nodes = ((0, 1), (10, 11, 12, 13, 14), (20, 21, 22))
    placed = place({1: 5, 2: 2, 3: 3}, nodes, {})
    assert placed == {1: (10, 11, 12, 13, 14), 2: (0, 1), 3: (20, 21, 22)}


def test_small_trials_share_a_node_and_leave_the_whole_one_free():
    nodes = ((0, 1, 2, 3), (4, 5))
    placed = place({1: 1, 2: 1}, nodes, {})
    assert sorted(placed[1] + placed[2]) == [4, 5]


def test_a_trial_that_keeps_its_count_stays_although_another_place_were_better():
    placed = place({1: 2, 2: 3}, FOURS, {1: (3, 4), 2: (0, 5)})
    assert placed[1] == (3, 4)
    assert len(placed[2]) == 3


def test_a_trial_whose_device_is_gone_moves_and_one_that_grows_stays_around():
    nodes = ((0, 1, 2, 3), (5, 6, 7))
    placed = place({1: 2, 2: 3}, nodes, {1: (3, 4), 2: (6, 7)})
    assert placed[2] == (5, 6, 7)
    assert set(placed[1]) <= {0, 1, 2, 3}


def test_a_trial_that_shrinks_gives_up_its_outlying_device():
    assert place({1: 2}, FOURS, {1: (2, 3, 4)})[1] == (2, 3)


def test_devices_claimed_twice_stay_with_the_first():
    placed = place({1: 1, 2: 1}, ((0, 1),), {1: (0,), 2: (0,)})
    assert placed == {1: (0,), 2: (1,)}


def test_many_odd_trials_stay_within_the_cap_of_orders():
    nodes = tuple(tuple(range(n, n + 7)) for n in range(0, 161, 7))
    wanted = {t: 1 + t % 5 for t in range(50)}
    placed = place(wanted, nodes, {})
    assert {t: len(d) for t, d in placed.items()} == wanted
    assert fleet_score(placed, nodes) <= 1.1 * sum(1 / m for m in wanted.values())


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
    placed = place(wanted, nodes, current)
    used = [d for chosen in placed.values() for d in chosen]
    assert {t: len(d) for t, d in placed.items()} == wanted
    assert len(used) == len(set(used))
    assert set(used) <= set(devices)
    assert placed == place(dict(reversed(wanted.items())), nodes, current)


def fewest(m, nodes):
    left, num_nodes = m, 0
    for size in sorted(map(len, nodes), reverse=True):
        if left > 0:
            left, num_nodes = left - size, num_nodes + 1
    return num_nodes


@settings(max_examples=200)
@given(st.data())
def test_a_trial_alone_is_on_as_few_nodes_as_can_be_however_uneven_they_are(data):
    nodes = data.draw(nodes_strategy(12).filter(any))
    m = data.draw(st.integers(1, sum(map(len, nodes))))
    assert spans(place({1: m}, nodes, {})[1], nodes) == fewest(m, nodes)


def least_loss(widths, nodes):
    """Of Eq. 4, over all ways to place the trials."""
    if not widths:
        return 0.0
    m, *rest = widths
    devices = [d for node in nodes for d in node]
    return min(
        spans(chosen, nodes) / m
        + least_loss(rest, [[d for d in node if d not in chosen] for node in nodes])
        for chosen in itertools.combinations(devices, m)
    )


@settings(max_examples=100)
@given(st.data())
def test_few_trials_are_on_as_few_even_nodes_as_can_be(data):
    """On uneven ones too, but for the published rule that whole nodes are filled first."""
    size = data.draw(st.integers(1, 4))
    nodes = [list(range(n, n + size)) for n in range(0, size * (7 // size), size)]
    counts, left = {}, sum(map(len, nodes))
    for number in range(data.draw(st.integers(1, 3))):
        if left:
            counts[number] = data.draw(st.integers(1, left))
            left -= counts[number]
    placed = place(counts, nodes, {})
    assert fleet_score(placed, nodes) == pytest.approx(least_loss(counts.values(), nodes))


def test_trials_as_wide_as_others_that_fill_no_nodes_are_not_tried_again(monkeypatch):
    tried = []
    whole_nodes = placement._whole_nodes
    monkeypatch.setattr(
        placement, "_whole_nodes", lambda *args: tried.append(args) or whole_nodes(*args)
    )
    nodes = [range(8 * n, 8 * n + 8) for n in range(20)]
    assert len(place(dict.fromkeys(range(150), 1), nodes, {})) == 150
    assert len(tried) < 150  # of 11,000 pairs
