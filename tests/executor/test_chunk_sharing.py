"""Sweeps on several nodes that share what they preprocess."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import optuna
import pytest
from numpy.testing import assert_allclose

from optuna_fleet import LocalCluster
from tests.executor.test_nodes import runtime_of, sweep
from tests.fleets import Leg, fleet_of, small_pipeline

TWO_NODES = {0: [Leg((0,))], 1: [Leg((1,))]}


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    with fleet_of(devices=2, device_type="cpu") as fleet:
        fleet.script = TWO_NODES
        return sweep(fleet)


def wait_for(fleet: Any, is_so: Callable[[Any], bool]) -> None:
    """Let the driver hear what agents say until something is so."""
    idle = optuna.create_study()
    while not fleet._runner._runtime or not is_so(runtime_of(fleet).sharing):
        idle.optimize(lambda trial: 0.0, n_trials=2, executor=fleet)


def test_nodes_share_what_they_preprocess_and_a_lost_one_costs_no_result(
    undisturbed: list[Any],
) -> None:
    pipeline = small_pipeline(exchange="all-shared")
    cluster = LocalCluster(nodes=2)
    killed: list[int] = []

    def kill_one(number: int, epoch: int) -> None:
        if epoch == 2 and not killed:
            (node, _) = runtime_of(fleet).nodes
            killed.append(node.pid)
            os.kill(node.pid, signal.SIGKILL)

    with fleet_of(devices=1, device_type="cpu", cluster=cluster, pipeline=pipeline) as fleet:
        wait_for(fleet, lambda sharing: len(sharing.plan.peers) == 2)
        fleet.script = TWO_NODES
        assert_allclose(sweep(fleet), undisturbed, rtol=1e-10)
        assert fleet.summary.pipeline.num_received
        assert "came from other nodes (all-shared)" in str(fleet.summary)

        assert_allclose(sweep(fleet, kill_one), undisturbed, rtol=1e-10)
        assert killed
