"""All ranks of a run leave an epoch before the same step, whenever each hears of it."""

from __future__ import annotations

import queue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optuna_fleet.executor.call import runs
from optuna_fleet.trainer.inbox import Inbox
from optuna_fleet.trainer.moves.stop_line import StopLine
from optuna_fleet.wire.calls import Reply
from optuna_fleet.wire.messages import (
    AskStep,
    AtStep,
    Place,
    StopAt,
)
from optuna_fleet.wire.node_messages import Quit

STEPS = 4
PLACES: list[Place] = [(1, epoch, step) for epoch in range(3) for step in range(STEPS)]


class Rank:
    """Goes from step to step, some of which can't be the last; hears what it is sent in order."""

    def __init__(self, odd: set[Place]) -> None:
        self.line = StopLine()
        self.mail: list[Place | None] = []
        self.told: Place | None = None
        self.stopped: Place | None = None
        self._todo = [place for place in PLACES if place not in odd]
        self._is_asked = self._knows = False

    @property
    def is_over(self) -> bool:
        return self.stopped is not None or not self._todo

    def hear(self) -> Place | None:
        place = self.mail.pop(0)
        if place is None:
            self._is_asked = True
            return self.line.ask()
        self._knows = True
        self.line.stop_at(place)
        return None

    def go_on(self) -> None:
        if self.is_over or (self._is_asked and not self._knows):  # it would wait
            return
        place = self._todo.pop(0)
        loop, epoch, step = place
        if self.line.is_reached(place, (loop, epoch, step + 1)):
            self.stopped = place
        elif step == STEPS - 1:
            self.line.come_to((loop, epoch + 1, 0))


@given(
    st.integers(1, 4),
    st.sets(st.sampled_from(PLACES)),
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60),
    st.integers(0, 30),
)
def test_all_ranks_stop_at_the_same_step(
    num_ranks: int, odd: set[Place], turns: list[tuple[int, bool]], asked_at: int
) -> None:
    ranks = [Rank(odd) for _ in range(num_ranks)]
    found = runs.StopLine()
    lines: list[Place | None] = []
    rest = [(n, hears) for _ in range(40) for n in range(num_ranks) for hears in (True, False)]
    for turn, (n, hears) in enumerate([*turns, *rest]):
        if turn == min(asked_at, len(turns)):
            found.ask(range(num_ranks))
            for rank in ranks:
                rank.mail.append(None)
        rank = ranks[n % num_ranks]
        if not hears:
            rank.go_on()
        elif rank.mail and (place := rank.hear()) is not None:
            lines.append(found.take(n % num_ranks, place))
            for each in ranks if lines[-1] else ():
                each.mail.append(lines[-1])
    assert all(rank.is_over for rank in ranks)
    line = lines[-1]
    assert line is not None
    left = [place for place in PLACES if place >= line and place not in odd]
    assert {rank.stopped for rank in ranks} == {min(left, default=None)}


def test_who_leaves_is_not_waited_for() -> None:
    line = runs.StopLine()
    assert line.take(0) is None  # nobody is asked
    line.ask(range(3))
    assert line.take(0, (1, 0, 5)) is None
    assert line.take(2) is None
    assert line.take(2) is None
    assert line.take(1, (1, 0, 4)) == (1, 0, 5)
    assert line.take(1, (1, 0, 9)) is None


def test_a_run_that_can_not_leave_may_be_asked_again() -> None:
    line = StopLine()
    line.ask()
    line.stop_at((1, 0, 0))
    assert line.is_reached((1, 0, 3), (1, 0, 4))
    line.withdraw((1, 0, 4))
    assert line.ask() == (1, 0, 4)
    line.stop_at((1, 0, 5))
    assert not line.is_reached((1, 0, 4), (1, 0, 5))
    assert line.is_reached((1, 0, 5), (1, 0, 6))


class Driver:
    """The other end of a channel; None ends it."""

    def __init__(self) -> None:
        self.messages = queue.SimpleQueue[Any]()
        self.sent = queue.SimpleQueue[Any]()

    def send(self, message: Any) -> None:
        self.sent.put(message)

    def receive(self) -> Any:
        message = self.messages.get()
        if message is None:
            raise EOFError
        return message


@pytest.fixture
def driver() -> Any:
    driver = Driver()
    yield driver
    driver.messages.put(None)


def test_an_interrupt_may_come_before_its_run(driver: Any) -> None:
    inbox = Inbox(driver)
    driver.messages.put(AskStep(run_id=7, rank=1))
    assert driver.sent.get() == AtStep(run_id=7, rank=1, place=(0, 0, 0))
    driver.messages.put(StopAt(run_id=7, place=(1, 2, 3)))
    line = inbox.stop_line(7)
    assert not line.is_reached((1, 2, 2), (1, 2, 3))
    assert line.is_reached((1, 2, 3), (1, 2, 4))
    assert not inbox.stop_line(8).is_reached((1, 2, 3), (1, 2, 4))


@pytest.mark.parametrize("end", [None, Quit()])
def test_nobody_waits_for_a_driver_that_is_gone(driver: Any, end: Any) -> None:
    inbox = Inbox(driver)
    line = inbox.stop_line(0)
    driver.messages.put(Reply(run_id=0, index=0))
    driver.messages.put(AskStep(run_id=0, rank=0))
    driver.messages.put(end)
    assert inbox.next_order() == Quit()
    assert inbox.is_over
    assert inbox.next_reply() == Reply(run_id=0, index=0)
    assert inbox.next_reply() is None
    assert inbox.next_reply() is None
    assert not line.is_reached((1, 0, 0), (1, 0, 1))
