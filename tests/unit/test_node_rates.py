"""Rates of trials on several nodes."""

from __future__ import annotations

import pytest

from optuna_fleet.events import Ending, Launch, RankEnded, RateMeasured
from optuna_fleet.executor.deciding.profiles import Profiles
from optuna_fleet.executor.deciding.state import Presence
from optuna_fleet.resources import Device
from tests.unit.test_controller import reached
from tests.unit.test_presence import Sweep, joined, node_leaves


def presence_of(*sizes: int, kind: str = "cpu") -> Presence:
    """Nodes of so many devices each, numbered through."""
    presence, nodes = Presence(), [n for n, size in enumerate(sizes) for _ in range(size)]
    for index, node in enumerate(nodes):
        presence.join(Device(index=index, node=node, kind=kind))
    return presence


def test_the_fewest_nodes_follow_who_is_there() -> None:
    presence = presence_of(1, 3, 2)
    assert presence.fewest_nodes("cpu", 7) == (1, 1, 1, 2, 2, 3, 1)
    presence.leave(2)  # of the largest
    assert presence.fewest_nodes("cpu", 5) == (1, 1, 2, 2, 3)
    presence.join(Device(index=9, node=7, kind="a100"))
    assert presence.fewest_nodes("a100", 2) == (1, 1)
    assert len(presence.nodes_of([0, 1, 3])) == 2


def test_equal_widths_on_one_node_and_on_two_are_unlike_facts() -> None:
    profiles = Profiles({}, presence := presence_of(2, 2))
    profiles.measure("s", (0, 1), 190.0)
    assert profiles.is_measured("s", (2, 3))
    assert not profiles.is_measured("s", (1, 2))
    profiles.measure("s", (1, 2), 120.0)
    assert profiles.is_measured("s", (1, 2))
    assert profiles.rates("s", 2, "cpu") == (95.0, 190.0)  # two fit on one node
    presence.leave(1)
    presence.leave(3)
    assert profiles.rates("s", 2, "cpu") == (95.0, 120.0)


def test_what_was_never_measured_on_two_nodes_is_estimated_from_what_was() -> None:
    profiles = Profiles({}, presence_of(1, 1, 1))
    profiles.measure("new", (0,), 10.0)
    assert profiles.rates("new", 2, "cpu") == (10.0, 19.0)  # nothing is known of two nodes
    for structure, share in (("a", 0.5), ("b", 0.6), ("c", 0.9)):
        profiles.measure(structure, (0,), 100.0)
        profiles.measure(structure, (0, 1), share * 190.0)
    assert profiles.rates("new", 2, "cpu") == pytest.approx((10.0, 0.6 * 19.0))
    assert profiles.rates("a", 2, "cpu") == (100.0, 95.0)
    assert profiles.rates("new", 3, "cpu")[2] == pytest.approx(30.0 * 0.95**2)  # nor of three


def test_a_rate_is_compared_with_what_was_expected_on_so_many_nodes() -> None:
    profiles = Profiles({}, presence_of(2, 2))
    for structure in ("a", "b"):
        profiles.measure(structure, (0, 1), 200.0)
    assert profiles.measure("a", (0, 2), 100.0)
    assert not profiles.measure("b", (0, 2), 100.0)
    assert profiles.measure("b", (0, 1), 100.0)


def test_plans_know_what_widths_cost_that_span_nodes() -> None:
    sweep = Sweep(trials=1)
    sweep.tell(joined(0), joined(1), joined(2, node=1))
    sweep.tell(reached(0, "s"), RateMeasured(run_id=0, samples_per_s=100.0))
    ended = sweep.tell(RankEnded(run_id=0, device=0, ending=Ending.YIELDED))
    (launch,) = [i for i in ended if isinstance(i, Launch)]
    assert (launch.devices, launch.measure) == ((0, 1, 2), True)
    sweep.tell(RateMeasured(run_id=launch.run_id, samples_per_s=90.0))
    (candidate,) = sweep.problems[-1].candidates
    assert candidate.rates[2] == 90.0
    assert candidate.useful_widths(3) == (1, 2)
    sweep.tell(*node_leaves(2), joined(5))  # three on one node: not known yet
    assert sweep.controller._profiles.rates("s", 3, "cpu")[2] > 90.0
