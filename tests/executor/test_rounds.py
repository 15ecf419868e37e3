"""Rounds: what a round's trials leave stays free until it is over (FLEET 4.2, Pittman)."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from optuna_fleet import FleetExecutor
from optuna_fleet.policies import POLICIES, policy_of
from optuna_fleet.replay.scenarios import EnsembleScenario
from optuna_fleet.replay.workload import SimulatedTrial
from optuna_fleet.sampler_bridge.records import flights_of
from tests.fleets import small_model, small_pipeline, train_epoch

NUM_DEVICES = 20
GLOBAL = [name for name in POLICIES if policy_of(name).rules().paradigm == "global"]


def spans(policy: str, *, probes: bool) -> list[tuple[int, float, float, int]]:
    """(trial, begin, end, width) of each run of a simulated sweep."""
    trials = [
        SimulatedTrial(
            name=f"{k}",
            rates=tuple(10.0 * m for m in range(1, NUM_DEVICES + 1)),
            epochs=2 + 5 * k % 17,
            samples_per_epoch=100.0,
        )
        for k in range(3 * NUM_DEVICES)
    ]
    scenario = EnsembleScenario(
        trials=trials, num_devices=NUM_DEVICES, policy=policy, lookahead=0 if probes else None
    )
    found = scenario.run().spans
    return [(one.number, one.start_s, one.end_s, len(one.devices)) for one in found]


@pytest.mark.parametrize("probes", [True, False])
def test_homogeneous_trials_begin_together_when_the_last_of_a_round_has_ended(
    probes: bool,
) -> None:
    flown = spans("homogeneous", probes=probes)
    assert len(flown) >= 3 * NUM_DEVICES
    begins = sorted({begin for _, begin, _, _ in flown})
    for begin in begins[1:]:
        under_way = [one for one in flown if one[1] < begin < one[2]]
        assert under_way == [], f"at {begin} s others were under way"


@pytest.mark.parametrize("policy", GLOBAL)
def test_nothing_begins_while_most_of_a_round_is_active(policy: str) -> None:
    """Whatever begins after the first round does so when fewer than `alpha` of it are active."""
    alpha = policy_of(policy).rules().alpha
    flown = spans(policy, probes=True)
    for begin in sorted({begin for _, begin, _, _ in flown if begin > 0}):
        active = sum(width for _, start, end, width in flown if start < begin < end)
        assert active < max(alpha * NUM_DEVICES, 1e-6)


def in_its_time(trial: Any, folder: Path) -> float:
    """All train until the first round has begun; then the first trial outlasts the other two."""
    model = small_model()
    model, optimizer = trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    more = 20 if trial.number == 0 else 2
    awaited = ["1", "2"] if trial.number == 0 else ["round"]
    for _ in trial.epochs(100_000):
        train_epoch(trial, model, optimizer, [], batch_size=10)
        more -= all((folder / name).exists() for name in awaited)
        if trial.sum(more) <= 0:
            break
    (folder / f"{trial.number}").touch()
    return 0.0


def test_a_real_sweep_keeps_to_its_rounds(tmp_path: Path) -> None:
    def hear(record: logging.LogRecord) -> None:
        if record.getMessage().startswith("Round 1"):
            (tmp_path / "round").touch()

    handler, logger = logging.Handler(), logging.getLogger("optuna")
    handler.emit = hear  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    study = optuna.create_study()
    options: dict[str, Any] = {"devices": 3, "device_type": "cpu", "policy": "homogeneous"}
    try:
        with FleetExecutor(small_pipeline(), preflight=False, **options) as fleet:
            objective = functools.partial(in_its_time, folder=tmp_path)
            study.optimize(objective, n_trials=5, executor=fleet)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    flights = flights_of(study)
    first_round = max(flight["end"] for number in (0, 1, 2) for flight in flights[number])
    assert all(flights[number][0]["start"] >= first_round - 0.05 for number in (3, 4))
