"""Optuna's own tests pass where trials run on a fleet of one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.upstream import NotFetchedError, declared, fetch, run


@pytest.mark.timeout(900)
def test_optunas_own_tests_pass(tmp_path: Path) -> None:
    try:
        root = fetch(tmp_path)
    except NotFetchedError as error:
        pytest.skip(str(error))
    report = run(root, "quick", width=1)
    assert report.of("failed") == [], str(report)
    assert len(report.of("passed")) > 150  # they were found, and got as far as to optimize


def test_every_test_that_is_let_off_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "optuna.md").read_text()
    for let_off in declared():
        for test, reason in let_off.items():
            assert f"`{test.rpartition('::')[2]}`" in text
            assert reason in text
