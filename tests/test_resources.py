"""What is found out about this machine without asking CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from optuna_fleet.resources import cpu_count, num_gpus


@pytest.mark.parametrize(
    ("visible", "number"),
    [
        (None, 2),
        ("0,1", 2),
        (" 1 ", 1),
        ("GPU-8932f937", 1),
        ("0,1,2,3", 2),
        ("0,-1,1", 1),
        ("-1", 0),
        ("", 0),
        ("NoDevFiles", 0),
    ],
)
def test_gpus_that_are_visible(tmp_path: Path, visible: str | None, number: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert num_gpus(environment, tmp_path) == number


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == 0


def test_slurm_says_how_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    there = cpu_count()
    for said, expected in {"1": 1, "1000000": there, "": there}.items():
        monkeypatch.setenv("SLURM_CPUS_ON_NODE", said)
        assert cpu_count() == expected
