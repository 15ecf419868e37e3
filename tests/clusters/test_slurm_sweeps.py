"""Whole sweeps under Slurm, whose nodes fail or are taken: all trials have their results.

On nodes that reach each other by a network only it is `test_nodes_apart`.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_fleet import FleetExecutor, HarvestCluster, SlurmCluster
from optuna_fleet.cli import main
from tests.clusters import recorded
from tests.clusters.forked import FORKED
from tests.clusters.slurm_lab import SlurmLab
from tests.executor.test_nodes import runtime_of
from tests.fleets import small_pipeline
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("forked_agents")


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    return pytest.approx(recorded.undisturbed(), rel=1e-10)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file that is made once the driver says that a node was lost."""
    gate, handler = tmp_path / "lost", logging.Handler()
    handler.filter = lambda record: "was lost" in record.getMessage()  # type: ignore[method-assign]
    handler.emit = lambda record: gate.touch()  # type: ignore[method-assign]
    logging.getLogger("optuna").addHandler(handler)
    yield gate
    logging.getLogger("optuna").removeHandler(handler)


def wait(gate: Path, epoch: int) -> None:
    """No trial ends before the driver has noticed that the node has failed."""
    until(lambda: epoch < 5 or gate.exists())


@pytest.mark.parametrize("kind", ["slurm", "harvest"])
def test_no_node_that_fails_or_is_taken_costs_a_result(
    kind: str,
    slurm: SlurmLab,
    allocate: Callable[..., str],
    undisturbed: Any,
    log: io.StringIO,
    gate: Path,
    tmp_path: Path,
) -> None:
    optuna.logging.set_verbosity(optuna.logging.INFO)
    cluster: Any = HarvestCluster(partition="low", max_nodes=3, logs=tmp_path)
    if kind == "slurm":
        allocate("--nodelist=node1,node2,node3")
        cluster = SlurmCluster()
    names: list[str] = []
    with FleetExecutor(small_pipeline(), devices=1, device_type="cpu", cluster=cluster) as fleet:
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
                    slurm.crash(node.name)

        objective = functools.partial(recorded.objective, before=functools.partial(wait, gate))
        assert recorded.run(fleet, objective, act=disturb) == undisturbed
    taken, failed = names
    assert f"Node {taken} leaves at" in log.getvalue()
    assert f"Node {failed} was lost" in log.getvalue()
    slurm.wait_for(lambda: kind == "slurm" or not slurm.queue())


def test_a_sweep_that_is_cancelled_preempted_and_requeued_records_what_it_would_have(
    slurm: SlurmLab, undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    midst, out = Path("midst"), Path("out")
    cancelled = submit(slurm, "cancelled")
    slurm.wait_for(midst.exists)
    slurm.run("scancel", cancelled)
    slurm.wait_for(lambda: not slurm.queue())
    midst.unlink()
    job = submit(slurm, "out")
    slurm.wait_for(midst.exists)
    slurm.submit("true", "--partition=high", "--nodes=4", "--exclusive")
    slurm.wait_for(lambda: "its trials move away" in out.read_text())
    Path("told").touch()
    slurm.wait_for(lambda: job not in slurm.queue())
    said = out.read_text()
    assert len(re.findall("go on, [1-9] of them from a checkpoint", said)) == 2, said
    for raw in ("Traceback", "srun:", "STEP"):
        assert raw not in said
    study = optuna.load_study(study_name="s", storage="sqlite:///s.db")
    assert recorded.numbers_of(study) == undisturbed


def submit(slurm: SlurmLab, output: str) -> str:
    """Submit the sweep, or what is left of it; return the job's number."""
    options = ["--requeue", "--partition=low", "--exclusive", f"--output={output}"]
    assert main(["submit", *options, *FORKED, "tests.clusters.requeued"]) == 0
    (job,) = slurm.queue()
    return job
