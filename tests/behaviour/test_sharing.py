"""G3: one preprocessing for all trials of a flotilla."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import torch
from torch import nn

from optuna_fleet import SharedPipeline, policies
from tests.behaviour.harness import Leg, fleet_of


class Counted(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Writes down each index it is asked for; looks slightly different each time."""

    def __init__(self, log: Path, size: int, seconds: float = 0.0) -> None:
        self.log, self.size, self.seconds = str(log), size, seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        fd = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{index} {os.getpid()}\n".encode())
        os.close(fd)
        time.sleep(self.seconds)
        return torch.rand(2), index


def collect(trial: Any) -> float:
    model = trial.prepare(nn.Linear(2, 1))
    batch_size = [3, 7, 16, 100][trial.number]
    seen, looks = [], []
    for _ in trial.epochs(2):
        indices: list[int] = []
        for x, index in trial.batches("train", batch_size=batch_size):
            model(x).sum().backward()
            indices += index[: trial.shard_size].tolist()
            looks += x[: trial.shard_size].flatten().tolist()
        seen.append(indices)
    trial.set_user_attr("seen", seen)
    trial.set_user_attr("looks", looks)
    return 0.0


def test_each_sample_is_preprocessed_once_per_epoch_and_delivered_to_every_trial(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    study = optuna.create_study()
    with fleet_of(devices=4, pipeline=SharedPipeline(train=Counted(log, 40))) as fleet:
        fleet.script = {number: [Leg((number,))] for number in range(4)}
        study.optimize(collect, n_trials=4, executor=fleet)
        summary = fleet.summary
    first, *others = (trial.user_attrs for trial in study.trials)
    for indices in first["seen"]:
        assert sorted(indices) == list(range(40))  # every index exactly once
    assert first["seen"][0] != first["seen"][1]
    for other in others:
        assert other["seen"] == first["seen"]  # the same order at another batch size
        assert other["looks"] == first["looks"]  # the same augmentation
    preprocessed = Counter(map(int, log.read_text().split()[::2]))
    # One is made once more at first, to see whether that gives the same.
    assert sorted(preprocessed.values()) == [2] * 39 + [3]
    assert (summary.preprocessed, summary.consumed) == (80, 320)
    assert summary.sharing_factor == 4.0


def test_a_baseline_shares_nothing_between_trials_and_gives_the_same(tmp_path: Path) -> None:
    seen, summaries = [], []
    for own in (None, 1):
        log, study = tmp_path / f"log {own}", optuna.create_study()
        policy, pipeline = policies.Baseline(own_preprocessors=own), Counted(log, 40)
        with fleet_of(devices=3, policy=policy, pipeline=SharedPipeline(train=pipeline)) as fleet:
            fleet.script = {0: [Leg((0, 1))], 1: [Leg((2,))], 2: [Leg((1,))]}
            study.optimize(collect, n_trials=3, executor=fleet)
            summaries.append(fleet.summary)
        seen.append([trial.user_attrs for trial in study.trials])
    assert seen[0] == seen[1]
    shared, alone = summaries
    assert shared.sharing_factor == 3.0
    assert alone.preprocessed == alone.consumed == 3 * 80
    assert alone.sharing_factor == 1.0
    assert "sharing factor 1.0" in str(alone)
    preprocessed = Counter(map(int, log.read_text().split()[::2]))
    assert min(preprocessed.values()) == 6  # in each epoch of each trial


def test_one_preprocessor_works_for_each_trial_of_a_baseline(tmp_path: Path) -> None:
    log, study = tmp_path / "log", optuna.create_study()
    pipeline = SharedPipeline(train=Counted(log, 400, seconds=0.001), val=Counted(log, 100))
    policy = policies.Baseline(own_preprocessors=1)
    with fleet_of(devices=3, policy=policy, pipeline=pipeline) as fleet:
        fleet.script = {0: [Leg((0,))]}
        study.optimize(evaluate_often, n_trials=1, executor=fleet)
        summary = fleet.summary
    assert len(set(log.read_text().split()[1::2])) == 1
    # What is evaluated on is made anew each time too, as by a DataLoader.
    assert (summary.preprocessed, summary.consumed) == (400 + 3 * 100, 400 + 3 * 100)


def evaluate_often(trial: Any) -> float:
    trial.prepare(nn.Linear(2, 1))
    for name in ("train", "val", "val", "val"):
        for _ in trial.batches(name, batch_size=8):
            pass
    return 0.0


def test_ranks_of_a_trial_share_its_batches(tmp_path: Path) -> None:
    study = optuna.create_study()
    pipeline = SharedPipeline(train=Counted(tmp_path / "log", 10))
    with fleet_of(devices=3, pipeline=pipeline) as fleet:
        fleet.script = {0: [Leg((0, 1, 2))]}
        study.optimize(gather, n_trials=1, executor=fleet)
    # Batches of 4 on three ranks: 2 + 1 + 1, 2 + 1 + 1, and the last 2 as 1 + 1 + 0.
    assert study.trials[0].user_attrs["sizes"] == [4, 4, 2]
    assert sorted(study.trials[0].user_attrs["indices"]) == list(range(10))


def gather(trial: Any) -> float:
    model = trial.prepare(nn.Linear(2, 1))
    sizes, indices = [], []
    for _ in trial.epochs(1):
        for x, index in trial.batches("train", batch_size=4):
            model(x).sum().backward()
            sizes.append(trial.sum(trial.shard_size))
            mine = torch.zeros(10, dtype=torch.int64)
            mine[index[: trial.shard_size]] = 1
            indices += trial.sum(mine).nonzero().flatten().tolist()
    trial.set_user_attr("sizes", sizes)
    trial.set_user_attr("indices", indices)
    return 0.0
