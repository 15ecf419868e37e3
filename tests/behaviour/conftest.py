"""Fleets for all of these tests: starting torch processes costs seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from optuna_fleet import FleetExecutor


@pytest.fixture(scope="session")
def narrow() -> Iterator[FleetExecutor]:
    """One device, no data: there trials come one after the other."""
    with FleetExecutor(devices=1, device_type="cpu") as executor:
        yield executor


@pytest.fixture(scope="session")
def lab() -> Iterator[Any]:
    from tests.behaviour.harness import Lab  # imports torch, which the master does not need
    from tests.behaviour.parts import usual_pipeline

    with Lab(usual_pipeline()) as lab:
        yield lab
