"""Fleets that many tests share: starting torch processes costs seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optuna
import pytest

from tests.fleets import fleet_of


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


@pytest.fixture(scope="session")
def fleet() -> Iterator[Any]:
    """Four CPU slots with small data sets."""
    with fleet_of(devices=4) as executor:
        yield executor
