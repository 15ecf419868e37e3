"""A script that a launcher starts several times would run as many sweeps: it is refused."""

from __future__ import annotations

import re
from typing import Any

import optuna
import pytest

from optuna_fleet import FleetConfigError, FleetExecutor

SEVERAL: list[tuple[str, dict[str, str]]] = [
    ("torchrun", {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0"}),
    (
        "`accelerate launch`",
        {"ACCELERATE_MIXED_PRECISION": "no", "WORLD_SIZE": "2", "RANK": "1"},
    ),
    ("A launcher", {"WORLD_SIZE": "16", "RANK": "3"}),
    ("mpirun", {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}),
    ("mpirun", {"PMI_SIZE": "4", "PMI_RANK": "2"}),
    ("srun", {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}),
    ("horovodrun", {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}),
    ("Lightning's Trainer(devices=...)", {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}),
]
ALONE: list[dict[str, str]] = [
    {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1", "RANK": "0"},
    {"WORLD_SIZE": "8"},  # of no launcher: they all say which process it is
    {"WORLD_SIZE": "many", "RANK": "0"},
    {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
]


@pytest.fixture
def inline() -> FleetExecutor:
    return FleetExecutor(cluster="inline")


@pytest.mark.parametrize(("launcher", "variables"), SEVERAL)
def test_one_of_several_processes_is_told_to_be_started_once(
    launcher: str, variables: dict[str, str], inline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    study = optuna.create_study()
    with pytest.raises(FleetConfigError, match=r"Start it once, as in `python script\.py`") as no:
        study.optimize(lambda trial: 0.0, n_trials=1, executor=inline)
    assert str(no.value).startswith(f"{launcher} has started this script as process ")
    with pytest.raises(FleetConfigError, match=re.escape(launcher)):
        inline.evaluate(lambda trial: 0.0, {})
    assert study.trials == []


@pytest.mark.parametrize("variables", ALONE)
def test_one_alone_runs_its_sweep(
    variables: dict[str, str], inline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    study = optuna.create_study()
    study.optimize(lambda trial: 0.0, n_trials=1, executor=inline)
    assert len(study.trials) == 1
