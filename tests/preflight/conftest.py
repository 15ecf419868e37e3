"""The pre-flight check of one objective: processes are forked from one that all tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from optuna_fleet import SharedPipeline
from optuna_fleet.preflight.checker import Checker
from optuna_fleet.preflight.verdict import Verdict

Check = Callable[..., Verdict]
"""``check(objective, pipeline=None, params=None)``.

Without a pipeline it is `usual_pipeline` of tests/behaviour/parts.py ("train" in batches of 10).
The verdict is one of `Free`, `NotMoved`, `OneDevice`, `NotRepeatable`, `NotChecked`, `Plain`
(`optuna_fleet.preflight.verdict`); `verdict.may_widen`, `verdict.may_move`, `str(verdict)` and, of
most, `verdict.differences` (kind, name, epoch, step, size).
"""


def behaviour_pipeline() -> SharedPipeline:
    from tests.behaviour.parts import usual_pipeline  # imports torch

    return usual_pipeline()


@pytest.fixture(scope="session")
def checker() -> Iterator[Checker]:
    with Checker() as checker:
        yield checker


@pytest.fixture(scope="session")
def check(checker: Checker) -> Check:
    shared: dict[str, SharedPipeline] = {}

    def check(
        objective: Callable[[Any], Any],
        pipeline: SharedPipeline | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> Verdict:
        if pipeline is None:
            pipeline = shared.setdefault("behaviour", behaviour_pipeline())
        return checker.check(objective, pipeline, params)

    return check
