"""What preprocessors can give is measured, and limits plans without that anybody says so."""

from __future__ import annotations

import logging
import time
from typing import Any

import optuna
import pytest
import torch
from torch import nn

from optuna_fleet import SharedPipeline, policies
from optuna_fleet.executor.fleet import pipelines
from optuna_fleet.executor.fleet.pipelines import LEAST_BUSY, LEAST_MADE, WINDOW_S, Capacity
from optuna_fleet.pipeline.pipeline_messages import PipelineStats
from optuna_fleet.wire.node_messages import PipelineReport
from tests.fleets import fleet_of

NUM_MOST = 4


def done(seconds: float, *, busy: float, made: int = 1000, got: int = 3000) -> PipelineStats:
    """What four preprocessors did, busy for this share of the time."""
    busy_s = busy * NUM_MOST * seconds
    return PipelineStats(preprocessed=made, consumed=got, active_s=seconds, busy_s=busy_s)


def measured(*reports: PipelineStats, agents: int = 1) -> float | None:
    """By agents that all say the same, one after the other, after what they had done before."""
    capacity, total = Capacity(), done(1000.0, busy=1.0)
    for stats in (PipelineStats(), *reports):
        total = total.plus(stats)
        said = {
            f"{n}": PipelineReport(agent=f"{n}", stats=total, num_most=NUM_MOST)
            for n in range(agents)
        }
        capacity.heard(said)
    return capacity.samples_per_s


def test_time_to_spare_is_counted_in() -> None:
    assert measured(done(10.0, busy=0.75)) == pytest.approx(400.0)


def test_it_is_not_measured_in_a_moment_nor_by_a_few_samples() -> None:
    moment = done(0.9 * WINDOW_S, busy=1.0)
    assert measured() is measured(moment) is None
    few = LEAST_MADE * NUM_MOST - 1
    assert measured(done(10.0, busy=1.0, made=few)) is None
    assert measured(done(10.0, busy=1.0, made=few), done(10.0, busy=1.0, made=1)) is not None
    assert measured(moment, moment) == pytest.approx(2 * 3000 / (2 * 0.9 * WINDOW_S))


def test_preprocessors_that_wait_for_readers_limit_nobody() -> None:
    """As where what trials read was kept; also if it was otherwise before."""
    idle = done(10.0, busy=0.9 * LEAST_BUSY, made=0)
    assert measured(done(10.0, busy=1.0), idle) is None


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """Nobody makes more than 50 of its samples per second, however fast the machine is."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.rand(1024)


def train_slowly(trial: Any) -> float:
    model = nn.Linear(1024, 1)
    model, optimizer = trial.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in trial.epochs(6):  # as many batches as it takes to know the rate
        for x in trial.batches("train", batch_size=4):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    return 0.0


def test_a_sweep_that_waits_for_data_says_so_in_its_plans(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials come until a plan is made of what was measured, however long that takes."""
    monkeypatch.setattr(pipelines, "WINDOW_S", 1.0)
    caplog.set_level(logging.DEBUG, logger="optuna")
    reasons: list[str] = []

    def stop(study: optuna.Study, trial: Any) -> None:
        reasons[:] = [r.getMessage() for r in caplog.records if "measured to give" in r.msg]
        if reasons:
            study.stop()

    # Less memory than an epoch takes: nothing is kept for the next trial.
    pipeline = SharedPipeline(train=Slow(), num_preprocessors=1, memory_bytes=1 << 17)
    study = optuna.create_study()
    with fleet_of(devices=1, policy=policies.Greedy(), pipeline=pipeline) as fleet:
        study.optimize(train_slowly, n_trials=100, executor=fleet, callbacks=[stop])
        decisions = [d.reason for d in fleet.summary.decisions]
    found = [text for text in decisions if "slowed by preprocessors" in text]
    assert found
    given_per_s = float(found[0].split("measured to give ")[1].split()[0])
    assert 0 < given_per_s < 1 / 0.02 / LEAST_BUSY
