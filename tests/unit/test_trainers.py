"""The life of trainers: the table, and what the controller hears whatever order news comes in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optuna_fleet.events import DeviceJoined, DeviceLost, Event
from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.fleet.trainers import TRANSITIONS, KillLate, Trainers, TrainerStatus
from optuna_fleet.resources import Device
from optuna_fleet.wire.node_messages import ProcessId

DEVICES = {number: Device(index=number, node=0, kind="cpu") for number in range(2)}
JOINED, LOST = DeviceJoined(device=DEVICES[0]), DeviceLost(device=0)
BY_ORDER = DeviceLost(device=0, by_order=True)


def test_every_life_ends_and_begins_as_one_that_was_started() -> None:
    assert set(TRANSITIONS) == set(TrainerStatus)
    reached, fresh = set[TrainerStatus](), {TrainerStatus.STARTING}
    while fresh:
        reached |= fresh
        fresh = {after for status in fresh for after in TRANSITIONS[status]} - reached
    assert reached == set(TrainerStatus)
    assert [status for status, after in TRANSITIONS.items() if not after] == [TrainerStatus.GONE]


class Timers:
    """An inbox that notes what is to come."""

    def __init__(self) -> None:
        self.times: list[tuple[float, Any]] = []

    def later(self, seconds: float, event: Any) -> None:
        self.times.append((seconds, event))


def process(pid: int | str) -> ProcessId:
    return ProcessId("agent", int(pid))


def life(*news: str) -> list[Event]:
    """What the controller hears of device 0 after such news, each a word and a pid."""
    trainers, events = Trainers(DEVICES, Timers()), list[Event]()
    for word, pid in (one.split() for one in news):
        match word:
            case "started":
                trainers.started(0, process(pid))
            case "ready":
                events += trainers.ready(0, process(pid))
            case "kill":
                trainers.kill(0, process(pid))
            case "retire":
                events += trainers.retire(0, process(pid))
            case "ended":
                events += trainers.ended(0, process(pid), "signal SIGKILL")
    return events


@pytest.mark.parametrize(
    ("news", "heard"),
    [
        (["started 7", "ready 7", "ended 7"], [JOINED, LOST]),
        (["ready 7", "started 7", "kill 7", "ended 7"], [JOINED, BY_ORDER]),
        (["ready 7", "ready 8", "ended 7"], [JOINED, LOST, JOINED]),
        (["ready 7", "ready 8", "ended 8"], [JOINED]),
        (["ready 7", "retire 7", "ended 7", "ready 8"], [JOINED, JOINED]),
        (["ready 7", "ready 8", "retire 7", "ended 7"], [JOINED, JOINED]),
        (["ready 7", "kill 7", "retire 7", "ended 7", "ready 8"], [JOINED, JOINED]),
        (["started 7", "retire 7", "ended 7"], []),
        (["started 7", "ended 7", "ready 7", "ready 8"], [JOINED]),
        (["started 7", "ended 7", "retire 7", "ready 8"], [JOINED]),
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
    trainers = Trainers(DEVICES, inbox := Timers())
    trainers.ready(0, process(7))
    trainers.ready(0, process(8))
    trainers.started(1, process(9))
    trainers.kill(0, process(7))
    trainers.kill(1, process(9))
    assert inbox.times == [(10.0, KillLate(process=process(pid))) for pid in (7, 9)]
    assert trainers.lingers(process(7))
    assert trainers.node_lost("agent") == {0: process(7)}
    assert trainers.live == {0: process(7)}
    assert not any(trainers.lingers(process(pid)) for pid in (7, 9))
    assert trainers.ended(0, process(7), "its agent's end") == [BY_ORDER]
    assert trainers.live == {}


def test_a_lost_node_takes_only_its_own_trainers_along() -> None:
    trainers = Trainers(DEVICES, Timers())
    next_ = ProcessId("the next agent there", 9)
    for device in DEVICES:
        trainers.ready(device, process(7 + device))
    assert trainers.ready(1, next_) == []
    assert trainers.node_lost("agent") == {0: process(7), 1: process(8)}
    trainers.ended(0, process(7), "its node's end")
    trainers.ended(1, process(8), "its node's end")
    assert trainers.live == {1: next_}


@given(data=st.data(), num_lives=st.integers(1, 5))
def test_a_device_joins_and_is_lost_in_turn(data: st.DataObject, num_lives: int) -> None:
    """One trainer after the other; each says hello on a channel of its own, so at any time."""
    trainers, has_joined = Trainers(DEVICES, Timers()), False
    of_agent = [(word, pid) for pid in range(num_lives) for word in ("started", "ended")][:-1]
    hellos = [("ready", pid) for pid in range(num_lives)]
    while of_agent or hellos:
        joined = trainers.live.get(0, process(num_lives - 1)).pid
        meanwhile = [("retire", joined), ("kill", joined)] if joined < num_lives - 1 else []
        word, pid = news = data.draw(st.sampled_from([*of_agent[:1], *hellos, *meanwhile]))
        of_agent = of_agent[of_agent[:1] == [news] :]
        hellos = [hello for hello in hellos if hello != news]
        events: list[Event] = []
        match word:
            case "started":
                trainers.started(0, process(pid))
            case "ready":
                events = trainers.ready(0, process(pid))
            case "kill":
                trainers.kill(0, process(pid))
                assert trainers.is_killed(0)
            case "retire":
                has_joined, events = (
                    False,
                    trainers.retire(0, process(pid)),
                )  # the driver says so
            case _:
                try:
                    events = trainers.ended(0, process(pid), "exit code 1")
                except LaunchError:
                    return
        for event in events:
            assert isinstance(event, DeviceLost) == has_joined
            has_joined = not has_joined
        assert (trainers.process_on(0) in trainers.live.values()) == has_joined
    assert trainers.live == {0: process(num_lives - 1)}
