"""Which step a trial goes on with whose ranks have died in part."""

from __future__ import annotations

from optuna_fleet.executor.survivors import agreed


def test_the_furthest_step_that_any_holds_is_the_one() -> None:
    assert agreed({4: (1, 0, 7), 2: (1, 0, 8), 3: (1, 0, 8)}) == (2, 3)
    assert agreed({2: (1, 0, 10), 1: (1, 1, 0)}) == (1,)
    assert agreed({5: (2, 0, 0), 6: (1, 9, 9)}) == (5,)


def test_nobody_holds_anything() -> None:
    assert agreed({}) == ()
