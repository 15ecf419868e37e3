"""How the number of preprocessors and the measures follow what happens."""

from __future__ import annotations

import os
from typing import Any

from pipeline_datasets import Counted
from yard import IDLE_S, epochs, small, yard


def test_preprocessors_grow_in_number_while_readers_wait():
    with yard(small(Counted(150)), is_adaptive=True) as here:
        here.read(epochs(*range(6)))
        here.starve(lambda number: 1.0 / number)
        assert here.numbers[0] == 1
        assert here.numbers[-1] == 4
        use = here.server.stats().use
    # Not quite always: of four preprocessors a later chunk's may be done first.
    assert use.busy_share > 0.7
    assert use.stalled_share > 0.9
    assert 1.0 < use.num_preprocessors < 4.0


def test_one_is_enough_where_trainers_are_slow():
    with yard(small(Counted(150)), is_adaptive=True) as here:
        here.read(epochs(*range(3)))
        here.read(epochs(*range(3)))
        here.feed(0.1)
        assert max(here.numbers) == 1
        use = here.server.stats().use
    assert use.busy_share + use.blocked_share < 0.5


def test_a_full_budget_is_told_from_full_windows():
    # Room for a few chunks only; the reader needs the next one when it has given back the last.
    with yard(small(Counted(150)), memory_bytes=20_000, is_adaptive=True) as here:
        here.read(epochs(0, 1))
        here.feed(1.0)
        use = here.server.stats().use
    assert use.blocked_share > 0.5


def test_a_number_that_the_user_gave_is_kept():
    with yard(small(Counted(150), num_preprocessors=3), limit=8, is_adaptive=True) as here:
        here.read(epochs(*range(4)))
        here.starve(lambda number: 1.0)
        assert here.numbers[-1] == 3
        here.now_s += 2 * IDLE_S
        here.server.resume()
        assert len(here.server.preprocessor_pids) == 3


def test_idle_preprocessors_are_ended_and_come_back_with_the_work():
    with yard(small(Counted(150)), is_adaptive=True) as here:
        here.read(epochs(*range(5)))
        here.starve(lambda number: 1.0 / number)
        assert here.numbers[-1] == 4
        here.now_s += IDLE_S
        here.server.resume()
        assert here.server.preprocessor_pids == ()
        here.read(epochs(10))
        here.feed(0.01)
        assert len(here.server.preprocessor_pids) == 1
        here.see_exits(4)
        assert here.exits == [0] * 4
        assert here.server.stats().num_lost == 0


class Nice(Counted):
    """Sample i is (niceness of who made it, i)."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        return os.nice(0), index


def test_preprocessors_are_nice():
    wanted = os.nice(0) + 7

    def read(client: Any) -> None:
        (batch,) = client.read("train", epoch=0, batch_size=8)
        assert batch.data[0].tolist() == [wanted] * 8

    with yard(small(Nice(8)), niceness=7) as here:
        here.read(read)
        here.feed(0.0)
