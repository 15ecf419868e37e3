"""Real sweeps: they start what is simulated, and no trouble with the solver ends them."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from optuna_fleet import FleetExecutor, SharedPipeline
from optuna_fleet.alloc import RateProfile
from optuna_fleet.policies import Own, Policy, policy_of
from optuna_fleet.replay.progress import Outcome
from optuna_fleet.replay.workload import Rules
from tests.behaviour.allocation import simulated, starts, sweep
from tests.behaviour.allocators import Told, Troubled

NUM_DEVICES, SAMPLES, BATCH = 3, 156, 3
PATIENCE_S = 120.0
"""For what never happens if the executor starts something else than is simulated."""

TRIALS = [
    simulated(
        f"{k}",
        RateProfile(structure="", measured={1: rate}).rates(NUM_DEVICES, 0.95),
        epochs,
        samples_per_epoch=float(SAMPLES),
        max_epochs=epochs,
    )
    for k, (rate, epochs) in enumerate(
        [(8.8, 2), (8.2, 2), (5.5, 2), (15.2, 4), (20.0, 3), (14.6, 4)]
    )
]

Event = tuple[str, int, int]
"""What happened, to which trial, for the how-manieth time."""


def times_of(outcome: Outcome) -> dict[Event, float]:
    """When each trial starts or goes on elsewhere, and when each of its epochs ends."""
    times: dict[Event, float] = {}
    for number, trial in enumerate(TRIALS):
        spans = [s for s in outcome.spans if s.number == number and s.end_s > s.start_s]
        spans.sort(key=lambda span: span.start_s)
        assert all(a.end_s == b.start_s for a, b in itertools.pairwise(spans)), "it waits"
        epochs = 0
        for nth, span in enumerate(spans):
            times["start", number, nth] = span.start_s
            epoch_s = SAMPLES / trial.rates[len(span.devices) - 1]
            for k in range(1, 1 + round((span.end_s - span.start_s) / epoch_s)):
                epochs += 1
                times["epoch", number, epochs] = span.start_s + k * epoch_s
        assert epochs == trial.epochs
    ends = sorted(time_s for (what, _, _), time_s in times.items() if what == "epoch")
    assert all(b - a > 1e-3 for a, b in itertools.pairwise(ends)), "two at once, in any order"
    return times


def note(log: Path, *event: Any) -> None:
    with log.open("a") as file:
        file.write(" ".join(map(str, event)) + "\n")


def noted(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines()]


def prepared(trial: Any) -> Any:
    model = torch.nn.Linear(1, 1)
    return trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))


def train_epoch(trial: Any, model: Any, optimizer: Any) -> None:
    for (x,) in trial.batches("train", batch_size=BATCH):
        model(x).square().mean().backward()
        optimizer.step()


def rehearsed(trial: Any, log: Path, times: Mapping[Event, float]) -> float:
    """Each epoch goes on until all has happened that has, simulated, before its end."""
    model, optimizer = prepared(trial)
    number, is_first = trial.number, trial.rank == 0
    if is_first:
        nth = sum(event[:2] == ["start", str(number)] for event in noted(log))
        note(log, "start", number, nth, trial.world_size)
    for epoch in trial.epochs(TRIALS[number].epochs):
        if epoch and is_first:
            note(log, "epoch", number, epoch)
        train_epoch(trial, model, optimizer)
        end_s = times["epoch", number, epoch + 1]
        before = {" ".join(map(str, e)) for e, time_s in times.items() if time_s < end_s - 1e-6}
        deadline = time.monotonic() + PATIENCE_S
        while missing := before - {" ".join(event[:3]) for event in noted(log)}:
            assert time.monotonic() < deadline, f"these did not happen: {missing}"
            time.sleep(0.01)
    return 0.0


def fleet_of(devices: int, policy: Policy) -> FleetExecutor:
    data = torch.utils.data.TensorDataset(torch.ones(SAMPLES, 1))
    pipeline = SharedPipeline(train=data, num_preprocessors=1)
    options: dict[str, Any] = {"device_type": "cpu", "preflight": False}
    return FleetExecutor(pipeline, devices=devices, policy=policy, **options)


def told_rates(policy: Policy) -> Policy:
    """The same policy, on rates and costs of moves that no busy machine changes."""
    options = {field.name: getattr(policy, field.name) for field in fields(Policy)}
    allocator = Told(policy.new_allocator(0), tuple(trial.rates for trial in TRIALS))
    return Own(allocator=allocator, **options)


@pytest.mark.parametrize("name", ["homogeneous", "elastic"])
def test_a_sweep_starts_what_is_simulated_in_the_same_order_as_wide(
    name: str, tmp_path: Path
) -> None:
    policy = replace(policy_of(name), rate_spread=float("inf"), time_limit_s=60.0)
    outcome = sweep(policy, TRIALS, NUM_DEVICES, lookahead=0, rules=Rules())  # as it proposes
    log = tmp_path / "log"
    log.touch()
    study = optuna.create_study()
    with fleet_of(NUM_DEVICES, told_rates(policy)) as fleet:
        study.optimize(
            functools.partial(rehearsed, log=log, times=times_of(outcome)),
            n_trials=len(TRIALS),
            executor=fleet,
            callbacks=[lambda _, t: note(log, "epoch", t.number, TRIALS[t.number].epochs)],
        )
    began = [(int(e[1]), int(e[3])) for e in noted(log) if e[0] == "start"]
    for _, expected in starts(outcome):  # those at one moment in any order
        assert dict(sorted(began[: len(expected)])) == expected
        del began[: len(expected)]
    assert began == []


TROUBLE = {
    "fails": "solver failed with AllocationFailed: no incumbent",
    "crashes": "solver failed with ZeroDivisionError: oh",
    "talks nonsense": "solver failed with 17",
    "lies": "solver's answer was refused: The plan of greedy can't be flown",
    "hangs": "solver process exceeded its time and was killed",
    "is killed": "solver process ended with signal SIGKILL",
}


def brief(trial: Any) -> int:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(3):
        train_epoch(trial, model, optimizer)
    return int(trial.number)


def test_a_solver_in_any_trouble_ends_no_sweep_and_the_summary_tells(tmp_path: Path) -> None:
    script = tuple(itertools.chain.from_iterable(("well", how) for how in TROUBLE))
    policy = Own(allocator=Troubled(script, tmp_path), alpha=1.0, time_limit_s=2.0)
    study = optuna.create_study()

    def stop_after_all(study: optuna.Study, trial: Any) -> None:
        if len(list(tmp_path.iterdir())) > len(script):
            study.stop()

    with fleet_of(2, policy) as fleet:
        study.optimize(brief, n_trials=100, callbacks=[stop_after_all], executor=fleet)
        assert fleet.summary is not None
        decisions = fleet.summary.decisions
    assert [trial.value for trial in study.trials] == list(range(len(study.trials)))
    for cause in TROUBLE.values():
        told = [d for d in decisions if d.status.startswith(f"fallback: {cause}")]
        assert told, cause
        assert all(d.reason.startswith(d.status) and d.allocator == "greedy" for d in told)
    assert {d.status for d in decisions if d.allocator == "troubled"} == {"heuristic"}
