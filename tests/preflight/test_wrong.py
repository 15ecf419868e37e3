"""The check finds what is not the same elsewhere, and says what it is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.behaviour.words import pytestmark  # noqa: F401
from tests.preflight.cases_wrong import WRONG
from tests.preflight.table import pipeline
from tests.preflight.verdicts import VERDICTS


# All of them: python benchmarks/preflight.py
@pytest.mark.parametrize("name", [*list(WRONG)[::12], "draws_between_folds"])
def test_it_is_found(check: Any, name: str) -> None:
    case = WRONG[name]
    verdict = check(case.objective, pipeline(), case.params)
    assert isinstance(verdict, VERDICTS[case.verdict]), verdict
    for word in case.says:
        assert word in str(verdict), f"{word!r} is not in: {verdict}"
