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
    usual: class_weights, usual: swa, steps, loss: hinge_embedding, fixed_dtype,
    groups_of_parameters, scheduler: SWALR, accumulates, stops_by_what_it_reported,
    totals_in_a_movable_pass, blocks_of_steps, pretrains_then_trains, folds_with_dropout,
    names_itself_by_chance, shows_bars, model: rare branch, model: BatchNorm in depth,
    draws_by_torch, needs two devices, plain_objective,

    nt_xent, class_weights_of_the_batch, class_weights_from_the_middle_on, adapted_by_a_step,
    buffer: Queue, teacher_outputs_are_cached, reports: mean_of_means_of_batches, aborts,
    at hand: fetches_three_ahead, once wrong: two_heads_of_equal_size,
    once wrong: embeds_in_two_backwards,

    attribute: tensor, attribute: deque, grows_its_batches_by_a_variable, best_in_a_variable,
    collects: set, sum_in_a_movable_pass, draws_between_folds,
    is_seeded_by_the_clock, asks_a_service
"""

ROUNDS = ("fixed_dtype", "model: BatchNorm in depth")
"""Where rounding is in float32, or grows from layer to layer."""


@pytest.mark.parametrize(
    "name",
    [
        *(name.strip() for name in SOME.replace("\n", " ").split(",")),
        *("example: digits, sgd, depth 1", "optimizer: Adafactor, bias, BatchNorm"),
        "autocast: float16, scaled",
    ],
)
def test_it_is_judged_as_it_should_be(check: Any, name: str) -> None:
    case = CASES[name]
    verdict = check(case.objective, case.params)
    assert verdict.outcome is case.outcome, verdict
    for word in case.says:
        assert word in str(verdict), f"{word!r} is not in: {verdict}"
    if case.outcome is ANY:
        assert verdict.worst < (1e-2 if name in ROUNDS else 1e-7)


def test_what_hangs_on_several_devices_stays_on_one() -> None:
    with Checker(least_s=15.0) as checker:
        verdict = checker.check(hangs, pipeline())
    assert verdict.outcome is ONE, verdict
    assert verdict.may_move
    assert "did not end in time" in str(verdict)
