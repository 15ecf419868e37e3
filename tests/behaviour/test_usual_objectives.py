"""G2 for what users write: what `objectives` come to does not depend on the devices."""

from __future__ import annotations

from typing import Any

import pytest

from tests.behaviour.objectives import OBJECTIVES
from tests.behaviour.words import pytestmark  # noqa: F401

# Three first, so that what went wrong there has consequences; then one stays and another joins.
WIDTHS = {
    "compiled": [(0, 1), (0,)],  # each rank compiles for itself
    "prunes_its_weights": [3, 2],  # it has but one moment between two epochs
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_same_on_any_devices(lab: Any, name: str) -> None:
    widths = WIDTHS.get(name, [3, 2, 1])
    rel = 0.05 if name == "autocast" else 1e-8  # bfloat16 has three digits
    flown = lab.same(OBJECTIVES[name], widths, rel=rel)
    seen = flown.trial.user_attrs["seen"]
    assert len(set(seen)) > len(seen) / 2  # it does train
