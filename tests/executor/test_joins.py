"""Devices that join, or that a run leaves, at nearly the same time are planned for at once."""

from __future__ import annotations

from optuna_fleet.events import DeviceGone, DeviceJoined
from optuna_fleet.executor.call.waits import AWAIT_S, GATHER_S, Deadlines, Joins
from optuna_fleet.resources import Device

A, B = (DeviceJoined(device=Device(index=i, node=i, kind="cpu")) for i in range(2))
LOSS = DeviceGone(device=0)


class Clock:
    """Stands still until it is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def none_starts() -> bool:
    return False


def test_devices_that_join_are_told_of_together_a_moment_after_the_first() -> None:
    clock = Clock()
    joins = Joins(none_starts, clock)
    assert (joins.held_back([A]), joins.due(), joins.waits_s()) == (
        [],
        [],
        [GATHER_S],
    )
    clock.now += GATHER_S / 2
    assert (joins.held_back([B]), joins.due(), joins.waits_s()) == (
        [],
        [],
        [GATHER_S / 2],
    )
    clock.now += GATHER_S
    assert (joins.due(), joins.due(), joins.waits_s()) == ([A, B], [], [])


def test_devices_whose_trainers_are_on_their_way_are_waited_for_but_not_for_ever() -> None:
    clock = Clock()
    starting = [True]
    joins = Joins(lambda: bool(starting), clock)
    joins.held_back([A])
    clock.now += 2 * GATHER_S
    assert (joins.due(), joins.waits_s()) == ([], [AWAIT_S - 2 * GATHER_S])
    starting.clear()
    assert joins.due() == [A]
    starting.append(True)
    joins.held_back([B])
    clock.now += AWAIT_S
    assert joins.due() == [B]


def test_what_else_becomes_of_the_fleet_is_told_at_once_and_in_order() -> None:
    joins = Joins(none_starts, Clock())
    joins.held_back([A])
    assert joins.held_back([]) == []
    assert joins.held_back([LOSS]) == [A, LOSS]
    assert (joins.held_back([LOSS]), joins.waits_s()) == ([LOSS], [])


def test_where_nothing_has_run_yet_a_device_is_told_of_at_once() -> None:
    joins = Joins(none_starts, Clock())
    assert joins.held_back([A], at_once=True) == [A]


def test_a_wait_begins_once_is_told_of_once_when_it_is_over_and_can_be_dropped() -> None:
    clock = Clock()
    waits = Deadlines(clock)
    waits.begin(7, GATHER_S)
    waits.begin(8, GATHER_S)
    clock.now += GATHER_S / 2
    waits.begin(7, GATHER_S)
    waits.drop(8)
    assert (waits.take_expired(), waits.waits_s()) == ([], [GATHER_S / 2])
    clock.now += GATHER_S
    assert (waits.take_expired(), waits.take_expired(), waits.waits_s()) == ([7], [], [])
    waits.drop(7)


def test_a_device_that_is_given_more_time_keeps_the_less_that_it_had() -> None:
    clock = Clock()
    waits = Deadlines(clock)
    waits.give([1, 2], 3.0)
    waits.give([2, 3], 10.0)
    clock.now += 3.0
    assert (waits.take_expired(), waits.waits_s()) == ([1, 2], [7.0])
