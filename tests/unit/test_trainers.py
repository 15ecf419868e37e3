"""The life of trainers: what the controller hears of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from optuna_fleet.events import DeviceJoined, DeviceLost, Event
from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.fleet.faults import Faults
from optuna_fleet.executor.fleet.trainers import Trainers
from optuna_fleet.resources import Device
from optuna_fleet.wire.node_messages import ProcessId

DEVICES = {number: Device(index=number, node=0, kind="cpu") for number in range(2)}
JOINED, LOST = DeviceJoined(device=DEVICES[0]), DeviceLost(device=0)
BY_ORDER = DeviceLost(device=0, by_order=True)


def process(pid: int | str) -> ProcessId:
    return ProcessId("agent", int(pid))


class Agents:
    """One, with one of the devices or both; it notes what comes later."""

    def __init__(self, number: int = 1) -> None:
        devices = dict([*DEVICES.items()][:number])
        node = SimpleNamespace(agent="agent", devices=tuple(devices.values()), pid=1, name="here")
        self.devices, self.are_starting, self.start_s = devices, False, 8.0
        self.nodes: Any = SimpleNamespace(
            devices=devices, get=lambda agent: node, pid_of=lambda process: None
        )
        self.node, self.inbox = node, self
        self.due: list[Any] = []
        self.told: list[Any] = []

    def later(self, seconds: float, due: Any) -> None:
        self.due.append(due)

    def tell(self, agent: str, message: Any) -> None:
        self.told.append(message)


def trainers_of(agents: Any) -> Trainers:
    return Trainers(agents, Faults())


def life(*news: str) -> list[Event]:
    """What the controller hears of device 0 after such news, each a word and a pid."""
    agents, events = Agents(), list[Event]()
    trainers = trainers_of(agents)
    for word, pid in (one.split() for one in news):
        match word:
            case "started":
                trainers.started(0, process(pid))
            case "ready":
                events += trainers.ready(0, process(pid))
            case "late":
                agents.due[-1]()
            case "kill":
                trainers.kill(0)
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
        (["started 7", "late 7", "ready 7", "ended 7", "ready 8"], [JOINED]),
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
    agents = Agents(2)
    trainers = trainers_of(agents)
    trainers.ready(0, process(7))
    trainers.kill(0)
    trainers.started(1, process(9))
    (*_, starting) = agents.due
    starting()
    assert trainers.node_lost(agents.node) == {0: process(7)}
    agents.due[-1]()  # that one is not there any more
    assert [message.pid for message in agents.told] == [7, 9]
    assert trainers.ended(0, process(7), "its agent's end") == [BY_ORDER]
    assert trainers.live == {}


def test_one_that_was_ready_before_it_was_known_to_be_started_is_not_waited_for() -> None:
    agents = Agents(2)
    trainers = trainers_of(agents)
    trainers.ready(0, process(8))
    trainers.retire(1, process(9))
    for device, pid in enumerate((8, 9)):
        trainers.started(device, process(pid))
    assert agents.due == []
    assert trainers.process_on(0) == process(8)


def test_only_the_last_deadline_of_a_trainer_counts() -> None:
    """One that was killed as it was late is not late once more."""
    agents = Agents()
    trainers = trainers_of(agents)
    trainers.started(0, process(7))
    trainers.ready(0, process(7))
    trainers.kill(0)
    for due in agents.due[:-1]:
        due()
    assert [message.pid for message in agents.told] == [7]
