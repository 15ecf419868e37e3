"""Devices that join, or that a run leaves, at nearly the same time are planned for at once."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from optuna_fleet.events import DeviceGone, DeviceJoined, Ending, Event, Launch, RunLingers
from optuna_fleet.executor.call.ranks import RunCalls
from optuna_fleet.executor.call.receiver import AWAIT_S, GATHER_S, Joins, Receiver
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.resources import Device
from optuna_fleet.wire.messages import Ended

A, B = (DeviceJoined(device=Device(index=i, node=i, kind="cpu")) for i in range(2))
LOSS = DeviceGone(device=0)


class Clocked:
    """Devices that join, by a clock that stands still until it is set; and what was told of."""

    def __init__(self) -> None:
        self.now = 0.0
        self.are_starting = False
        self.told: list[Event] = []
        self._times: list[tuple[float, Callable[[], list[Event]]]] = []
        self.joins = Joins(lambda: self.are_starting, self._later, lambda: self.now)

    def _later(self, seconds: float, act: Callable[[], list[Event]]) -> None:
        self._times.append((self.now + seconds, act))

    def hear(self, *events: Event, at_once: bool = False) -> None:
        self.told += self.joins.held_back(events, at_once=at_once)

    def after(self, seconds: float) -> list[Event]:
        self.now += seconds
        for due, act in sorted(self._times, key=lambda time: time[0]):
            self.told += act() if due <= self.now else []
        told, self.told = self.told, []
        return told


def test_devices_that_join_are_told_of_together_a_moment_after_the_first() -> None:
    clocked = Clocked()
    clocked.hear(A)
    assert clocked.after(GATHER_S / 2) == []
    clocked.hear(B)
    assert clocked.after(GATHER_S / 2) == [A, B]
    assert clocked.after(AWAIT_S) == []


def test_devices_whose_trainers_are_on_their_way_are_waited_for_but_not_for_ever() -> None:
    clocked = Clocked()
    clocked.are_starting = True
    clocked.hear(A)
    assert clocked.after(2 * GATHER_S) == []
    clocked.are_starting = False
    clocked.hear()  # the last one is ready, say
    clocked.are_starting = True
    clocked.hear(B)
    assert clocked.after(0.0) == [A]
    assert clocked.after(AWAIT_S) == [B]


def test_what_else_becomes_of_the_fleet_is_told_at_once_and_in_order() -> None:
    clocked = Clocked()
    clocked.hear(A)
    clocked.hear()
    assert clocked.after(0.0) == []
    clocked.hear(LOSS)
    assert clocked.after(0.0) == [A, LOSS]
    clocked.hear(B, at_once=True)  # where nothing has run yet
    assert clocked.after(0.0) == [B]


def test_a_run_lingers_if_its_last_rank_has_not_ended_a_moment_after_the_first() -> None:
    launch = Launch(run_id=1, number=1, devices=(0, 1, 2), probe=False, measure=False, round=1)
    run = RunRecord(launch=launch, start=0.0, calls=RunCalls(world_size=3))
    sweep = mock.MagicMock(runs={1: run})
    receiver = Receiver(sweep, mock.MagicMock(), mock.MagicMock())
    for rank in range(3):
        receiver.take(Ended(run_id=1, rank=rank, device=rank, time_s=0.0, ending=Ending.YIELDED))
    (call,) = sweep.later_of.call_args_list
    seconds, of_run, act = call.args
    assert (seconds, of_run, act(run)) == (GATHER_S, run, [RunLingers(run_id=1)])
