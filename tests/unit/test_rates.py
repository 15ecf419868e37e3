"""What is known of how fast trials train: by device type, and by how many nodes a width spans."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_fleet.alloc.problem import SEVERAL
from optuna_fleet.events import DeviceGone, Ending, Launch, RankEnded
from optuna_fleet.executor.deciding.profiles import Profiles
from optuna_fleet.executor.deciding.state import Presence
from optuna_fleet.resources import Device
from tests.unit.world import World, joined, rate, reached


def presence_of(*nodes: str) -> Presence:
    """The letters of a node are its devices' types; devices are numbered through."""
    presence = Presence()
    for index, (node, kind) in enumerate(
        (n, kind) for n, kinds in enumerate(nodes) for kind in kinds
    ):
        presence.join(Device(index=index, node=node, kind=kind))
    return presence


def profiles_of(nodes: str, *measured: tuple[str, tuple[int, ...], float]) -> Profiles:
    profiles = Profiles({}, presence_of(*nodes.split()))
    for one in measured:
        profiles.measure(*one)
    return profiles


def on(structure: str, *by_device: float) -> list[tuple[str, tuple[int, ...], float]]:
    """It was measured on one device after the other; on 0 it was not."""
    return [(structure, (d,), speed) for d, speed in enumerate(by_device) if speed]


@pytest.mark.parametrize(
    ("nodes", "measured", "asked", "expected"),
    [
        ("vaa", [("s", (0,), 100.0), ("s", (2,), 250.0)], ("s", 1, "v"), (100.0,)),
        ("vaa", [("s", (2,), 250.0), ("s", (1, 2), 480.0)], ("s", 2, "a"), (250.0, 480.0)),
        # One that was measured on another type only: by the median of those measured on both.
        ("va", [*on("a", 100, 200), *on("b", 50, 150), *on("c", 80, 200), *on("d", 10)],
         ("d", 1, "a"), (25.0,)),
        ("va", [*on("a", 100, 200), *on("b", 50, 150), *on("c", 80, 200), *on("e", 0, 10)],
         ("e", 1, "v"), (4.0,)),
        # Types with nothing in common count as equally fast, what was never seen as the others.
        ("va", [*on("a", 100), *on("b", 0, 300)], ("a", 1, "a"), (100.0,)),
        ("va", [*on("a", 100), *on("b", 0, 300)], ("never", 1, "v"), (200.0,)),
        # Of several types, that with most in common tells.
        ("xyz", [*on("a", 0, 1, 3), *on("b", 0, 1, 3), *on("c", 7, 10)], ("c", 1, "z"), (30.0,)),
        # Two fit on one node; else what was measured on two counts.
        ("cc cc", [("s", (0, 1), 190.0), ("s", (1, 2), 120.0)], ("s", 2, "c"), (95.0, 190.0)),
        ("c c", [("s", (0, 1), 120.0)], ("s", 2, "c"), (60.0, 120.0)),
        ("c c c", [("new", (0,), 10.0)], ("new", 2, "c"), (10.0, 19.0)),
    ],
)  # fmt: skip
def test_rates(nodes: str, measured: Any, asked: Any, expected: tuple[float, ...]) -> None:
    assert profiles_of(nodes, *measured).rates(*asked) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("nodes", "measured", "same", "others"),
    [
        ("vaa", (1, 2), [(2, 1)], [(0, 1), (0,)]),
        ("vvaa", (0, 2), [(1, 3)], [(0, 1), (0, 1, 2)]),
        ("vvaa", (0, 1, 2), [(0, 1, 3)], [(0, 2, 3)]),
        ("cc cc", (0, 1), [(2, 3)], [(1, 2)]),
    ],
)
def test_what_a_measurement_tells_of(nodes: str, measured: Any, same: Any, others: Any) -> None:
    profiles = profiles_of(nodes, ("s", measured, 100.0))
    assert all(profiles.is_measured("s", devices) for devices in same)
    assert not any(profiles.is_measured("s", devices) for devices in others)


def test_what_was_never_measured_on_two_nodes_is_estimated_from_what_was() -> None:
    profiles = profiles_of("c c c", ("new", (0,), 10.0))
    for structure, share in (("a", 0.5), ("b", 0.6), ("c", 0.9)):
        profiles.measure(structure, (0,), 100.0)
        profiles.measure(structure, (0, 1), share * 190.0)
    assert profiles.rates("new", 2, "c") == pytest.approx((10.0, 0.6 * 19.0))
    assert profiles.rates("a", 2, "c") == (100.0, 95.0)
    assert profiles.rates("new", 3, "c")[2] == pytest.approx(30.0 * 0.95**2)  # nor of three


def test_a_rate_far_below_its_estimate_is_news() -> None:
    profiles = profiles_of("va")
    assert not profiles.measure("a", (0,), 100.0)
    assert profiles.measure("a", (1,), 50.0)
    profiles = profiles_of("cc cc", ("a", (0, 1), 200.0), ("b", (0, 1), 200.0))
    assert profiles.measure("a", (0, 2), 100.0)
    assert not profiles.measure("b", (0, 2), 100.0)  # as it was for the other, on two nodes
    assert profiles.measure("b", (0, 1), 100.0)


def test_rates_on_several_types_are_made_up_of_those_on_each() -> None:
    profiles = profiles_of("vaa", ("s", (0,), 100.0), ("s", (1, 2), 500.0))
    on_three = profiles.rates("s", 3, "v"), profiles.rates("s", 3, "a")
    expected = on_three[0][2] / 3 + on_three[1][2] * 2 / 3
    assert profiles.rates("s", 3, SEVERAL)[2] == pytest.approx(expected)
    assert profiles.measure("s", (0, 1, 2), expected / 2)  # far less than was expected
    of_two = (on_three[0][1] / 3 + on_three[1][1] * 2 / 3) / 2
    assert profiles.rates("s", 3, SEVERAL)[1:] == pytest.approx((of_two, expected / 2))
    assert profiles.rates("s", 2, "a")[1] == 500.0


def test_the_fewest_nodes_follow_who_is_there() -> None:
    presence = presence_of("c", "ccc", "cc")
    assert presence.fewest_nodes("c", 7) == (1, 1, 1, 2, 2, 3, 1)
    presence.leave(2)  # of the largest
    assert presence.fewest_nodes("c", 5) == (1, 1, 2, 2, 3)
    presence.join(Device(index=9, node=7, kind="a100"))
    assert presence.fewest_nodes("a100", 2) == (1, 1)
    assert len(presence.nodes_of([0, 1, 3])) == 2


def test_plans_know_what_widths_cost_that_span_nodes() -> None:
    sweep = World(trials=1, devices=(), at_once=True)
    sweep.tell(joined(0), joined(1), joined(2, node=1))
    sweep.tell(reached(0, "s"), rate(0, 100.0))
    ended = sweep.tell(RankEnded(run_id=0, device=0, ending=Ending.YIELDED))
    (launch,) = [i for i in ended if isinstance(i, Launch)]
    assert (launch.devices, launch.measure) == ((0, 1, 2), True)
    sweep.tell(rate(launch.run_id, 90.0))
    (candidate,) = sweep.problems[-1].candidates
    assert candidate.rates[2] == 90.0
    assert candidate.useful_widths(3) == (1, 2)
    sweep.tell(DeviceGone(device=2), joined(5))  # three on one node: not known yet
    assert sweep.controller._profiles.rates("s", 3, "cpu")[2] > 90.0
