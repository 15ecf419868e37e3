"""A sweep that is run by jobs, which end in its midst."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optuna_fleet import Checkpoints, FleetExecutor
from tests.clusters import recorded
from tests.clusters.forks import agents_are_forked
from tests.fleets import small_pipeline
from tests.waiting import until


def objective(trial: Any) -> float:
    """Say when a trial is in its midst, and wait there until the job is told."""

    def wait(epoch: int) -> None:
        if epoch == 3:
            Path("midst").touch()
            until(Path("told").exists)

    return recorded.objective(trial, before=wait)


if __name__ == "__main__":
    with (
        agents_are_forked(),
        FleetExecutor(
            small_pipeline(),
            devices=2,
            device_type="cpu",
            cluster="slurm",
            checkpoints=Checkpoints("checkpoints", interval_s=0.0),
        ) as fleet,
    ):
        recorded.run(fleet, objective, storage="sqlite:///s.db")
