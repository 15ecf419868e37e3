"""Simulations in small: trials, fleets, and what must hold of every outcome."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from optuna_fleet.alloc import AllocationProblem, Plan, validate
from optuna_fleet.alloc.problem import Allocator
from optuna_fleet.executor.deciding.state import PolicyRules
from optuna_fleet.policies import POLICIES
from optuna_fleet.replay.progress import Outcome
from optuna_fleet.replay.simulation import Simulation
from optuna_fleet.replay.workload import FleetChange, Rules, SimulatedTrial, believed_profiles
from optuna_fleet.resources import Device, Fleet
from tests.placed_plans import placed_plan

KIND = "test"
LINEAR = tuple(10.0 * m for m in range(1, 9))


def trial(name: str = "a", rates: Sequence[float] = LINEAR, **more: Any) -> SimulatedTrial:
    more = {"epochs": 1, "samples_per_epoch": 100.0, **more}
    return SimulatedTrial(name=name, rates=tuple(rates), **more)


class Scripted:
    """Plans by a script of {number: devices}, one per decision; the last one goes on."""

    name = "scripted"

    def __init__(self, *script: dict[int, tuple[int, ...]], together: bool = False) -> None:
        self.script = list(script)
        self.together = together

    def allocate(self, problem: AllocationProblem) -> Plan:
        wanted = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        placed = {n: d for n, d in wanted.items() if n in problem.by_number}
        groups = [list(placed)] if self.together else [[n] for n in placed]
        return placed_plan(problem, placed, [g for g in groups if g])


class Checked:
    """An allocator whose every plan is validated."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.name = allocator.name

    def allocate(self, problem: AllocationProblem) -> Plan:
        plan = self.allocator.allocate(problem)
        validate(problem, plan)
        return plan


def simulate(
    trials: Sequence[SimulatedTrial],
    changes: Iterable[FleetChange],
    allocator: Allocator,
    *,
    num_devices: int = 4,
    until_s: float | None = None,
    noise: float = 0.0,
    widest: int | None = None,
    policy: str = "elastic",
    rules: Rules | None = None,
    **more: Any,
) -> Outcome:
    more = {"moves_within_epochs": False, **more}
    more = {"max_restarts": 2**31, "lookahead": len(trials), "rate_spread": math.inf, **more}
    more = {name: value for name, value in more.items() if value is not None}
    simulation = Simulation(
        fleet_of(num_devices),
        trials,
        replace(POLICIES[policy]().rules(), **more) if policy else PolicyRules(**more),
        allocator,
        believed_profiles(trials, (KIND,), noise=noise, widest=widest),
        rules or Rules(),
    )
    return simulation.run(iter(changes), until_s)


def fleet_of(num_devices: int) -> Fleet:
    return Fleet(
        devices=tuple(Device(index=i, node=i // 4, kind=KIND) for i in range(num_devices))
    )


def all_join(num_devices: int) -> FleetChange:
    return FleetChange(time_s=0.0, joined=tuple(range(num_devices)))


def spans_of(outcome: Outcome) -> list[tuple[int, tuple[int, ...], float, float]]:
    """(trial, devices, start, end) of each run, by start."""
    spans = [(s.start_s, s.number, s.devices, s.end_s) for s in outcome.spans]
    return [(number, devices, start, end) for start, number, devices, end in sorted(spans)]


def comparable(outcome: Outcome) -> tuple[Any, ...]:
    """All of an outcome but for wall times."""
    sums = (outcome.busy_s, outcome.present_s, outcome.waited_s, len(outcome.solve_s))
    return outcome.end_s, outcome.trials, sums, outcome.spans


def check_spans(outcome: Outcome, changes: Sequence[FleetChange]) -> None:
    """No device and no trial has two runs at once, and no device one while it is absent."""
    on_device: dict[int, list[tuple[float, float]]] = defaultdict(list)
    of_trial: dict[int, list[tuple[float, float]]] = defaultdict(list)
    present = presence(changes)
    for number, devices, start_s, end_s in spans_of(outcome):
        assert start_s <= end_s
        assert len(set(devices)) == len(devices) >= outcome.trials[number].trial.min_devices
        of_trial[number].append((start_s, end_s))
        for device in devices:
            on_device[device].append((start_s, end_s))
            assert any(a <= start_s and end_s <= b for a, b in present[device])
    for spans in (*on_device.values(), *of_trial.values()):
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans)))


def presence(changes: Sequence[FleetChange]) -> dict[int, list[tuple[float, float]]]:
    """Device -> when it was there."""
    spells: dict[int, list[tuple[float, float]]] = defaultdict(list)
    since: dict[int, float] = {}
    for change in changes:
        for device in change.left:
            spells[device].append((since.pop(device), change.time_s))
        since.update(dict.fromkeys(change.joined, change.time_s))
    for device, joined_s in since.items():
        spells[device].append((joined_s, math.inf))
    return spells


def check_all_ended(outcome: Outcome, trials: Sequence[SimulatedTrial]) -> None:
    """Every trial ended once, with exactly its epochs, not before it was submitted."""
    assert sorted(outcome.trials) == list(range(len(trials)))
    for number, progress in outcome.trials.items():
        spans = [s for s in outcome.spans if s.number == number]
        last = max(spans, key=lambda span: (span.end_s, span.start_s))
        assert [s for s in spans if s.has_returned] == [last]
        assert progress.ended_s == last.end_s <= outcome.end_s
        assert progress.epochs_done == progress.trial.epochs
        assert progress.samples == progress.trial.work
        assert sum(s.samples for s in spans) == pytest.approx(progress.trial.work)
        assert progress.begun_s == min(s.start_s for s in spans)
        assert progress.begun_s >= progress.trial.submit_s
