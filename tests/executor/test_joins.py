"""Devices that join, or that a run leaves, at nearly the same time are planned for at once."""

from __future__ import annotations

from optuna_fleet.events import DeviceGone, DeviceJoined, RunLingers
from optuna_fleet.executor.call.gathering import AWAIT_S, GATHER_S, LEAVE_S, Endings, Joins
from optuna_fleet.resources import Device

A, B = (DeviceJoined(device=Device(index=i, node=i, kind="cpu")) for i in range(2))
LOSS = DeviceGone(device=0)


class Clock:
    """Stands still until it is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def none_starts() -> bool:
    return False


def test_devices_that_join_are_told_of_together_a_moment_after_the_first() -> None:
    clock = Clock()
    joins = Joins(none_starts, clock)
    assert (joins.held_back([A]), joins.due(), joins.soonest()) == ([], [], [100.0 + GATHER_S])
    clock.now += GATHER_S / 2
    assert (joins.held_back([B]), joins.due(), joins.soonest()) == ([], [], [100.0 + GATHER_S])
    clock.now += GATHER_S
    assert (joins.due(), joins.due(), joins.soonest()) == ([A, B], [], [])


def test_devices_whose_trainers_are_on_their_way_are_waited_for_but_not_for_ever() -> None:
    clock = Clock()
    starting = [True]
    joins = Joins(lambda: bool(starting), clock)
    joins.held_back([A])
    clock.now += 2 * GATHER_S
    assert (joins.due(), joins.soonest()) == ([], [100.0 + AWAIT_S])
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
    assert (joins.held_back([LOSS]), joins.soonest()) == ([LOSS], [])


def test_where_nothing_has_run_yet_a_device_is_told_of_at_once() -> None:
    joins = Joins(none_starts, Clock())
    assert joins.held_back([A], at_once=True) == [A]


def test_a_run_lingers_if_its_last_rank_has_not_ended_a_moment_after_the_first() -> None:
    clock = Clock()
    endings = Endings(clock)
    endings.rank_ended(7, is_last=False)
    endings.rank_ended(8, is_last=False)
    clock.now += GATHER_S / 2
    endings.rank_ended(7, is_last=False)
    endings.rank_ended(8, is_last=True)
    assert (endings.due(), endings.soonest()) == ([], [100.0 + GATHER_S])
    clock.now += GATHER_S
    assert endings.due() == [RunLingers(run_id=7)]
    assert (endings.due(), endings.soonest()) == ([], [])
    endings.leaves(9)
    assert endings.soonest() == [clock.now + LEAVE_S]
    endings.rank_ended(9, is_last=True)
    assert endings.soonest() == []
