"""The check says nothing of what is the same anywhere."""

from __future__ import annotations

from typing import Any

import pytest

from tests.behaviour.words import pytestmark  # noqa: F401
from tests.preflight.cases_good import GOOD
from tests.preflight.table import pipeline
from tests.preflight.verdicts import VERDICTS


# All of them: python benchmarks/preflight.py
@pytest.mark.parametrize("name", [*list(GOOD)[::16], "folds_with_dropout"])
def test_it_is_let_go(check: Any, name: str) -> None:
    case = GOOD[name]
    verdict = check(case.objective, pipeline(), case.params)
    assert isinstance(verdict, VERDICTS[case.verdict]), verdict
    for word in case.says:
        assert word in str(verdict), f"{word!r} is not in: {verdict}"
