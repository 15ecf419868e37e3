"""One sweep on several kinds of clusters, whose nodes fail and are taken: it has the same records.

On nodes that reach each other by a network only it is `test_nodes_apart`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_fleet import FleetExecutor, HarvestCluster, LocalCluster, SlurmCluster
from tests.clusters import recorded
from tests.clusters.slurm_lab import SlurmLab
from tests.executor.test_nodes import runtime_of
from tests.fleets import small_pipeline
from tests.waiting import until


@dataclass(frozen=True, kw_only=True)
class Case:
    """Three nodes of one device each; how one of them fails, by its name and its agent's pid.

    A SIGTERM is a notice, unless agents are children of the driver.
    """

    cluster: Any
    has_notices: bool = True
    crash: Callable[[str, int], object] = lambda name, pid: os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _local(request: pytest.FixtureRequest) -> Iterator[Case]:
    yield Case(cluster=LocalCluster(nodes=3), has_notices=False)


@contextlib.contextmanager
def _slurm(request: pytest.FixtureRequest) -> Iterator[Case]:
    lab: SlurmLab = request.getfixturevalue("slurm")
    request.getfixturevalue("allocate")("--nodelist=node1,node2,node3")
    yield Case(cluster=SlurmCluster(), crash=lambda name, pid: lab.crash(name))


@contextlib.contextmanager
def _harvest(request: pytest.FixtureRequest) -> Iterator[Case]:
    lab: SlurmLab = request.getfixturevalue("slurm")
    folder: Path = request.getfixturevalue("tmp_path")
    cluster = HarvestCluster(partition="low", max_nodes=3, logs=folder)
    yield Case(cluster=cluster, crash=lambda name, pid: lab.crash(name))
    lab.wait_for(lambda: not lab.queue())


def wait(gate: Path, epoch: int) -> None:
    """No trial ends before the driver has noticed that the node has failed."""
    until(lambda: epoch < 5 or gate.exists())


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    return recorded.undisturbed()


@pytest.mark.usefixtures("forked_agents")
@pytest.mark.parametrize("kind", [_local, _slurm, _harvest])
def test_no_node_that_fails_or_is_taken_costs_a_result(
    kind: Any,
    request: pytest.FixtureRequest,
    undisturbed: list[float],
    log: io.StringIO,
    opens: Callable[[Path, str], None],
    tmp_path: Path,
) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)
    gate = tmp_path / "lost"
    with (
        kind(request) as case,
        FleetExecutor(
            small_pipeline(), devices=1, device_type="cpu", cluster=case.cluster
        ) as fleet,
    ):
        names: list[str] = []
        idle = optuna.create_study()
        while not fleet._runner._runtime or len(runtime_of(fleet).trainers.have_served) < 3:
            idle.optimize(lambda trial: 0.0, n_trials=3, executor=fleet)

        def disturb(number: int, epoch: int) -> None:
            """Take a node in the midst of a trial, with notice; then have another one fail."""
            if epoch == 2 * (len(names) + 1) < 6:
                node = next(n for n in runtime_of(fleet).nodes if n.name not in names)
                names.append(node.name)
                if epoch == 2:
                    os.kill(node.pid, signal.SIGTERM)
                else:
                    opens(gate, f"Node {node.name} was lost")
                    case.crash(node.name, node.pid)

        objective = functools.partial(recorded.objective, before=functools.partial(wait, gate))
        numbers = recorded.run(fleet, objective, act=disturb)
        assert numbers == pytest.approx(undisturbed, rel=1e-10)
    taken, failed = names
    assert (f"Node {taken} leaves at" in log.getvalue()) is case.has_notices
    assert f"Node {failed} was lost" in log.getvalue()
