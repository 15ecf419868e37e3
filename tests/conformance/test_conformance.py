"""Optuna's own tests pass where trials run on a fleet of one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.upstream import NotFetchedError, declared, fetch, judged, run


@pytest.mark.timeout(2000)
def test_optunas_own_tests_pass(tmp_path: Path) -> None:
    try:
        root = fetch(tmp_path)
    except NotFetchedError as error:
        pytest.skip(str(error))
    report = run(root, "quick", width=1)
    assert report.of("failed") == [], str(report)
    assert len(report.of("passed")) >= 110  # they were found, and got as far as to optimize
    assert len(report.of("passed inline")) >= 8


def test_every_test_that_is_let_off_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "results.md").read_text()
    assert "(../tests/conformance/declared.tsv)" in text
    assert all(row.reason.endswith(".") for row in declared())


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (
            ">       assert len(study.trials) == 3\nE       assert 6 == 3\nE        +  ...",
            "differs",
        ),
        (">       assert len(study.trials) == 3\nE       assert 2 == 3", "failed"),
        (">       study.optimize(objective, n_trials=10)\nE       KeyError: 'x'", "failed"),
        ("Failed: Timeout (>300.0s) from pytest-timeout.", "failed"),
    ],
)
def test_only_the_failure_that_is_declared_is_let_off(failure: str, outcome: str) -> None:
    test = "tests/study_tests/test_study.py::test_stop_in_objective"
    found = {test: {"outcome": "failed", "text": f"def test():\n{failure}\n\ntest.py:1: Error"}}
    assert judged(found, "core", width=4).outcomes == {test: outcome}
    assert judged(found, "core", width=1).outcomes == {test: "failed"}


def test_a_test_that_differs_is_let_off_by_its_failure() -> None:
    assert all(row.failure for row in declared("differs"))
