"""All ranks of a run leave an epoch before the same step, whenever each hears of it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optuna_fleet.executor.call import runs
from optuna_fleet.trainer.link import StopLine
from optuna_fleet.wire.messages import Place, StopAt

STEPS = 4
PLACES: list[Place] = [(1, epoch, step) for epoch in range(3) for step in range(STEPS)]


class Rank:
    """Goes from step to step, some of which can't be the last; hears what it is sent in order."""

    def __init__(self, odd: set[Place], tell: Callable[[Place], None]) -> None:
        self.line = StopLine()
        self.mail: list[StopAt | None] = []
        self.stopped: Place | None = None
        self.saved: list[Place] = []
        self._tell = tell
        self._todo = [place for place in PLACES if place not in odd]

    @property
    def is_over(self) -> bool:
        return self.stopped is not None or not self._todo

    def hear(self) -> None:
        order = self.mail.pop(0)
        if order is None:
            self.line.ask(self._tell)
        else:
            self.line.stop_at(order)

    def go_on(self) -> None:
        if self.is_over or (self.line._is_asked and self.line._order is None):  # it would wait
            return
        place = self._todo.pop(0)
        loop, epoch, step = place
        order = self.line.take(place, (loop, epoch, step + 1))
        if order is not None and not order.saves:
            self.stopped = place
        elif order is not None:
            self.saved.append(place)
        elif step == STEPS - 1:
            self.line.come_to((loop, epoch + 1, 0))


class Run:
    """Of several ranks, which the driver asks to be saved, and at last to leave."""

    def __init__(self, num_ranks: int, odd: set[Place]) -> None:
        self.ranks = [Rank(odd, functools.partial(self._told, n)) for n in range(num_ranks)]
        self.orders: list[StopAt] = []
        self._found = runs.StopLine()

    def _told(self, n: int, place: Place) -> None:
        if (line := self._found.take(n, place)) is not None:
            self._send(StopAt(run_id=0, place=line, saves=self._found.saves))

    def _send(self, order: StopAt | None) -> None:
        self.orders += [] if order is None else [order]
        for rank in self.ranks:
            rank.mail.append(order)

    def ask(self, *, saves: bool) -> None:
        if self._found.ask(range(len(self.ranks)), saves=saves):
            self._send(None)


@given(
    st.integers(1, 4),
    st.sets(st.sampled_from(PLACES)),
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60),
    st.sets(st.integers(0, 60)),
)
def test_all_ranks_are_saved_and_stop_at_the_same_steps(
    num_ranks: int, odd: set[Place], turns: list[tuple[int, bool]], saved_at: set[int]
) -> None:
    """Asked to be saved again and again, perhaps before they have come to the last such step."""
    run = Run(num_ranks, odd)
    ranks = run.ranks
    rest = [(n, hears) for _ in range(80) for n in range(num_ranks) for hears in (True, False)]
    for turn, (n, hears) in enumerate([*turns, *rest]):
        if turn == len(turns) or (turn < len(turns) and turn in saved_at):
            run.ask(saves=turn < len(turns))
        rank = ranks[n % num_ranks]
        if not hears:
            rank.go_on()
        elif rank.mail:
            rank.hear()
    assert all(rank.is_over for rank in ranks)
    assert all(rank.saved == ranks[0].saved for rank in ranks)
    last = run.orders[-1]
    left = [place for place in PLACES if place not in odd and place not in ranks[0].saved]
    left = [place for place in left if place >= last.place and not last.saves]
    assert not (last.saves and any(place >= last.place for place in ranks[0].saved))
    assert {rank.stopped for rank in ranks} == {min(left, default=None)}


def test_who_leaves_is_not_waited_for() -> None:
    line = runs.StopLine()
    assert line.take(0) is None  # nobody is asked
    line.ask(range(3), saves=False)
    assert line.take(0, (1, 0, 5)) is None
    assert line.take(2) is None
    assert line.take(2) is None
    assert line.take(1, (1, 0, 4)) == (1, 0, 5)
    assert line.take(1, (1, 0, 9)) is None


def order(place: Place, *, saves: bool = False) -> StopAt:
    return StopAt(run_id=0, place=place, saves=saves)


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_that_goes_on_may_be_asked_again(saves: bool) -> None:
    line, told = StopLine(), list[Place]()
    line.ask(told.append)
    line.stop_at(order((1, 0, 0), saves=saves))
    line.ask(told.append)  # it tells when it has come there
    assert told == [(0, 0, 0)]
    assert line.take((1, 0, 3), (1, 0, 4)) == order((1, 0, 0), saves=saves)
    assert told == [(0, 0, 0), (1, 0, 4)]
    line.stop_at(order((1, 0, 5)))
    assert line.take((1, 0, 4), (1, 0, 5)) is None
    assert line.take((1, 0, 5), (1, 0, 6)) == order((1, 0, 5))
