"""Data sets are packed once per fleet, and there once per machine, whoever joins and reads."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from optuna_fleet import FleetExecutor, LocalCluster, SharedPipeline
from optuna_fleet.executor.cluster import config


class Counted(torch.utils.data.Dataset[torch.Tensor]):
    """Counts how often it is pickled here."""

    num_pickled = 0

    def __init__(self) -> None:
        self.rows = torch.arange(16)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]

    def __getstate__(self) -> Any:
        Counted.num_pickled += 1
        return vars(self)


def objective(trial: Any) -> float:
    return sum(x.sum().item() for x in trial.batches("train", 8))


def agents(fleet: Any) -> list[int]:
    return [node.pid for node in fleet._runner._runtime.nodes]


def files_of(pid: int) -> set[int]:
    """The memory files with data sets that a process has open."""
    links = [link for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return {os.stat(x).st_ino for x in links if "optuna-fleet-data" in os.readlink(x)}


def sweep_on_both(fleet: FleetExecutor) -> None:
    """One that was started anew may join when all trials are done by the other."""
    while True:
        study = optuna.create_study()
        study.optimize(objective, n_trials=4, executor=fleet)
        assert [trial.value for trial in study.trials] == [120.0] * 4
        with contextlib.suppress(OSError):  # of one whose end is not known yet
            if len(agents(fleet)) == 2 and all(map(files_of, agents(fleet))):
                return


@pytest.fixture
def fleet() -> Iterator[FleetExecutor]:
    Counted.num_pickled = 0
    pipeline = SharedPipeline(train=Counted(), exchange="local")
    cluster = LocalCluster(nodes=2)
    with FleetExecutor(pipeline, devices=1, device_type="cpu", cluster=cluster) as fleet:
        yield fleet


@pytest.mark.parametrize("is_here", [True, False])
def test_nodes_of_a_machine_read_one_file_that_is_packed_once(
    fleet: FleetExecutor, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other machines fetch it; so does who comes later."""
    gc.collect()
    before = files_of(os.getpid())  # of other tests' fleets
    if not is_here:
        monkeypatch.setattr(config, "machine", lambda: "another")
    sweep_on_both(fleet)
    os.kill(agents(fleet)[0], signal.SIGKILL)
    sweep_on_both(fleet)
    (file,) = files_of(os.getpid()) - before
    theirs = [files_of(agent) for agent in agents(fleet)]
    assert Counted.num_pickled == 1
    assert [len(files) for files in theirs] == [1, 1]
    assert len({file}.union(*theirs)) == (1 if is_here else 3)
    fleet.close()
    assert files_of(os.getpid()) == before
