"""The life of trainers: what the controller hears of it."""

from __future__ import annotations

import pytest

from optuna_fleet.events import DeviceJoined, DeviceLost, Event
from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.fleet.trainers import Trainers
from optuna_fleet.resources import Device
from optuna_fleet.wire.node_messages import ProcessId

DEVICES = {number: Device(index=number, node=0, kind="cpu") for number in range(2)}
JOINED, LOST = DeviceJoined(device=DEVICES[0]), DeviceLost(device=0)
BY_ORDER = DeviceLost(device=0, by_order=True)


def process(pid: int | str) -> ProcessId:
    return ProcessId("agent", int(pid))


def life(*news: str) -> list[Event]:
    """What the controller hears of device 0 after such news, each a word and a pid."""
    trainers, events = Trainers(DEVICES), list[Event]()
    for word, pid in (one.split() for one in news):
        match word:
            case "started":
                trainers.started(0, process(pid))
            case "ready":
                events += trainers.ready(0, process(pid))
            case "kill":
                trainers.kill(process(pid))
            case "retire":
                trainers.retire(0, process(pid))
            case "ended":
                events += trainers.ended(0, process(pid), "signal SIGKILL")
    return events


@pytest.mark.parametrize(
    ("news", "heard"),
    [
        (["started 7", "ready 7", "ended 7"], [JOINED, LOST]),
        (["started 7", "ready 7", "kill 7", "ended 7"], [JOINED, BY_ORDER]),
        (["ready 7", "retire 7", "ended 7", "ready 8"], [JOINED, JOINED]),
        (["ready 7", "kill 7", "retire 7", "ended 7", "ready 8"], [JOINED, JOINED]),
        (["started 7", "retire 7", "ended 7"], []),
        (["started 7", "kill 7", "ready 7", "ended 7", "ready 8"], [JOINED]),
        (["started 7", "ended 7", "started 7", "ready 7"], [JOINED]),  # the number is used again
    ],
)
def test_what_the_controller_hears(news: list[str], heard: list[Event]) -> None:
    assert life(*news) == heard


def test_only_starts_that_failed_in_a_row_end_a_call() -> None:
    fail = ["started 7", "ended 7"]
    assert life(*fail, *fail, "started 7", "ready 7", "ended 7", *fail, *fail) == [JOINED, LOST]
    with pytest.raises(LaunchError, match=r"3 times in a row before it was ready, .*SIGKILL"):
        life(*fail, *fail, *fail)


def test_those_of_a_dead_agent_are_not_waited_for() -> None:
    trainers = Trainers(DEVICES)
    trainers.ready(0, process(7))
    trainers.ready(1, others := ProcessId("another agent", 8))
    trainers.kill(process(7))
    trainers.kill(process(9))  # which was starting
    assert trainers.node_lost("agent") == {0: process(7)}
    assert not trainers.lingers(process(9))
    assert trainers.ended(0, process(7), "its agent's end") == [BY_ORDER]
    assert trainers.live == {1: others}


def test_one_that_was_ready_before_it_was_known_to_be_started_is_not_waited_for() -> None:
    trainers = Trainers(DEVICES)
    assert trainers.started(0, process(7))
    trainers.ready(0, process(8))
    trainers.retire(1, process(9))
    assert not trainers.started(0, process(8))
    assert not trainers.started(1, process(9))
