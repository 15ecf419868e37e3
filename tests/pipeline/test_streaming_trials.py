"""Trials that read a stream: which move, grow, read in steps, and are checked beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import optuna
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from optuna_fleet import SharedPipeline
from tests.fleets import Leg, fleet_of, run

N = 50
ORDER = [number for turn in range(7) for number in range(8 * turn, min(8 * turn + 8, N))]


class Numbers(IterableDataset[int]):
    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        yield from range(info.id, self.n, info.num_workers)


def objective(trial: Any, name: str = "train") -> float:
    model = torch.nn.Linear(1, 1, dtype=torch.float64)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model, optimizer = trial.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in trial.epochs(4):
        for numbers in trial.batches(name, batch_size=8):
            assert not trial.is_preflight or max(numbers.tolist()) < 80
            optimizer.zero_grad()
            loss = (model(numbers.double()[:, None] / N) - 1).square().mean()
            loss.backward()
            optimizer.step()
    return model.weight.item()


def in_periods(trial: Any) -> float:
    seen: list[int] = []
    for _ in trial.steps(10, every=4):
        for batch in trial.batches("train", batch_size=8):
            seen += batch.tolist()
    trial.set_user_attr("seen", seen)
    return 0.0


def test_trials_of_a_fleet_that_move_and_grow_and_the_check_reads_the_first_rows() -> None:
    pipeline = SharedPipeline(train=Numbers(), train_long=Numbers(4000), seed=1)
    study = optuna.create_study()
    with fleet_of(devices=2, pipeline=pipeline) as fleet:
        fleet.script = {0: [Leg((0,))], 1: [Leg((1,), 1), Leg((0, 1), 3), Leg((0,))]}
        study.optimize(objective, n_trials=2, executor=fleet)
        assert fleet.summary.pipeline.preprocessed == 4 * N
        seen = run(fleet, in_periods, Leg((0,))).user_attrs["seen"]
        report = fleet.preflight(study, lambda trial: objective(trial, "train_long"))
        assert "the same on any devices" in str(report)
    still, moved = (trial.value for trial in study.trials)
    assert moved == pytest.approx(still, rel=1e-9)
    assert seen == (ORDER * 2)[: 7 * 8 - 6 + 3 * 8]
