"""The check lets go what is the same anywhere; it finds what is not, and says what it is."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_fleet.preflight.checker import Checker
from tests.behaviour.words import pytestmark  # noqa: F401
from tests.preflight.cases_good import GOOD
from tests.preflight.cases_wrong import WRONG, hangs
from tests.preflight.table import ANY, ONE, pipeline

CASES = GOOD | WRONG

# All of them: python benchmarks/preflight.py
SOME = """
usual: swa; usual: accumulates_over_the_end_of_an_epoch; fixed_dtype; autocast: float16, scaled
stops_by_what_it_reported; totals_in_a_movable_pass; blocks_of_steps; pretrains_then_trains
folds_with_dropout; tells_a_tracker_where_it_is; notes_times_in_its_state; shows_bars
model: rare branch; model: BatchNorm in depth; draws_by_torch; draws_by_python_and_numpy
plain_objective; class_weights_from_the_middle_on; buffer: Queue; needs_two_devices; aborts
reports_the_mean_of_means_of_batches; attribute: deque; counts_in_a_global; sum_in_a_movable_pass
suggests_objects; draws_between_folds; is_seeded_by_the_clock; asks_a_service
suggests_in_a_late_epoch
"""
REMEDIED = [name for name in CASES if f"{name}, mended" in CASES]

ROUNDS = ("fixed_dtype", "model: BatchNorm in depth")
"""Where rounding is in float32, or grows from layer to layer."""


@pytest.mark.parametrize("name", [*SOME.strip().replace("\n", "; ").split("; ")])
def test_it_is_judged_as_it_should_be(check: Any, name: str) -> None:
    is_judged(check, name)


def is_judged(check: Any, name: str) -> None:
    case = CASES[name]
    verdict = check(case.objective, case.params)
    assert verdict.outcome is case.outcome, verdict
    for word in case.says:
        assert word in str(verdict), f"{word!r} is not in: {verdict}"
    if case.outcome is ANY:
        assert verdict.worst < (1e-2 if name in ROUNDS else 1e-7)


@pytest.mark.parametrize("name", REMEDIED)
def test_what_is_mended_as_told_is_let_go(check: Any, name: str) -> None:
    is_judged(check, name)
    is_judged(check, f"{name}, mended")


def test_what_hangs_on_several_devices_stays_on_one() -> None:
    with Checker(least_s=5.0) as checker:
        verdict = checker.check(hangs, pipeline())
    assert verdict.outcome is ONE, verdict
    assert verdict.may_move
    assert "did not end in time" in str(verdict)
