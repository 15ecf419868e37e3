"""The pre-flight check of one objective: processes are forked from one that all tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from optuna_fleet.preflight.checker import Checker
from optuna_fleet.preflight.verdict import Verdict


@pytest.fixture(scope="session")
def check() -> Iterator[Callable[..., Verdict]]:
    """``check(objective, params=None)``, on the tables' data."""
    from tests.preflight.table import pipeline  # imports torch

    with Checker() as checker:
        yield lambda objective, params=None: checker.check(objective, pipeline(), params)
