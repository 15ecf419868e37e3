"""Whole sweeps, simulated: who starts, in which order, on how many devices, until when."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import mip
import pytest

from optuna_fleet.policies import POLICIES, FleetG, policy_of
from optuna_fleet.replay.progress import Outcome
from optuna_fleet.replay.scenarios import lower_bound_s
from optuna_fleet.replay.workload import Rules, SimulatedTrial
from tests.behaviour.allocation import LINEAR, simulated, starts, sweep

SLIDES = [  # slides 27 to 30 of FLEET's talk
    simulated("DNN 1", (100.0, 190.0, 270.0, 350.0), epochs=40),
    simulated("DNN 2", (80.0, 150.0, 220.0, 280.0), epochs=31),
    simulated("DNN 3", (80.0, 150.0, 200.0, 240.0), epochs=23),
    simulated("DNN 4", (40.0, 75.0, 105.0, 120.0), epochs=40),
]


def drawn(seed: int, *kinds: str, told: bool = False, shortest: int = 8) -> list[SimulatedTrial]:
    """Trials of unlike speed, scaling and length."""
    draw = random.Random(seed)
    trials = []
    for k in range(draw.randint(6, 14)):
        one, scaling, epochs = (
            draw.uniform(20, 180),
            draw.uniform(0.86, 0.98),
            draw.randint(shortest, shortest + 12),
        )
        rates = [one * m * scaling ** (m - 1) for m in range(1, 9)]
        factors = dict(zip(kinds, (1.0, draw.uniform(0.3, 0.9)), strict=False))
        trials.append(
            simulated(
                f"{k}",
                rates,
                epochs,
                max_epochs=epochs if told else None,
                samples_per_epoch=1000.0,
                rescale_up_s=1.0,
                rescale_down_s=1.0,
                rates_by_kind={kind: tuple(f * r for r in rates) for kind, f in factors.items()},
            )
        )
    return trials


# -- how soon --


@pytest.mark.parametrize(("seed", "told"), [(1, True), (2, False)])
def test_the_default_comes_close_to_the_bound_that_no_schedule_beats(
    seed: int, told: bool
) -> None:
    for devices, most in ((4, 1.25), (8, 1.25), ({"a": 4, "b": 4}, 1.35)):
        trials = drawn(seed, *(devices if isinstance(devices, dict) else ()), told=told)
        end_s = sweep("elastic", trials, devices).end_s
        assert 1 - 1e-6 <= end_s / lower_bound_s(trials, devices) <= most, devices
        assert end_s < sweep("baseline", trials, devices).end_s


def test_the_longest_start_first() -> None:
    lengths = [5, 9, 2, 7, 3, 8, 4, 6]
    trials = [simulated(f"{k}", LINEAR[:1], e, max_epochs=e) for k, e in enumerate(lengths)]
    begun = {k: p.begun_s for k, p in sweep("elastic", trials, 3).trials.items()}
    in_order = sorted(begun, key=lambda k: begun[k] or 0.0)
    assert {lengths[k] for k in in_order[:3]} == {9, 8, 7}
    assert [lengths[k] for k in in_order[3:]] == [6, 5, 4, 3, 2]


def test_who_is_known_to_go_on_longest_gets_most_devices_and_all_end_together() -> None:
    lengths = {0: 8, 1: 4, 2: 4}
    trials = [simulated(f"{k}", LINEAR, e, max_epochs=e) for k, e in lengths.items()]
    outcome = sweep("elastic", trials, 8)
    assert starts(outcome)[0][1] == {0: 4, 1: 2, 2: 2}
    assert outcome.end_s == pytest.approx(lower_bound_s(trials, 8))


def test_the_last_trials_are_spread_over_the_fleet() -> None:
    trials = [simulated(f"{k}", LINEAR, 6) for k in range(5)]
    used = starts(sweep("elastic", trials, 4))
    assert list(used[0][1].values()) == [1, 1, 1, 1]
    assert max(width for _, began in used for width in began.values()) > 1


def test_who_takes_turns_keeps_nobody_from_being_proposed() -> None:
    """It may be the longest: the last one starts well before the sweep's end."""
    trials = drawn(9, told=True)
    outcome = sweep("elastic", trials, 2 * len(trials) // 3, lookahead=0, movable=True)
    assert all((p.begun_s or 0.0) < 0.8 * outcome.end_s for p in outcome.trials.values())


# -- whose turn it is --


@pytest.mark.parametrize("policy", ["baseline", "elastic"])
def test_no_device_idles_while_a_trial_waits(policy: str) -> None:
    trials = [replace(t, min_devices=1 + k % 3) for k, t in enumerate(drawn(0))]
    outcome = sweep(policy, trials, 5)
    spans = outcome.spans
    times = sorted({s.start_s for s in spans} | {s.end_s for s in spans})
    for since, until in itertools.pairwise(times):
        flying = [s for s in spans if s.start_s <= since and until <= s.end_s]
        idle = 5 - sum(len(s.devices) for s in flying)
        gone = {n for n, p in outcome.trials.items() if (p.ended_s or math.inf) <= since}
        waiting = set(outcome.trials) - gone - {s.number for s in flying}
        assert all(trials[n].min_devices > idle for n in waiting), since


def order_of(outcome: Outcome) -> list[int]:
    return [number for _, began in starts(outcome) for number in began]


def test_the_baseline_gives_each_trial_one_device_for_good_in_an_order_of_the_seeds() -> None:
    trials = [simulated(f"{k}", LINEAR, 3 + 5 * k % 11) for k in range(12)]
    outcomes = [sweep("baseline", trials, 3, seed=seed) for seed in (1, 1, 2)]
    for outcome in outcomes:
        assert sorted(order_of(outcome)) == list(range(12))  # nobody twice
        assert {width for _, began in starts(outcome) for width in began.values()} == {1}
    first, again, other = map(order_of, outcomes)
    assert first == again != other
    fewer = [t for k, t in enumerate(trials) if k != first[-1]]
    assert len(order_of(sweep("baseline", fewer, 3, seed=1))) == 11


def test_homogeneous_rounds_are_of_as_many_trials_as_devices_at_one_pace() -> None:
    trials = [simulated(f"{k}", [10.0 + k], 3) for k in range(7)]
    outcome = sweep("homogeneous", trials, 3)
    assert [sorted(began.values()) for _, began in starts(outcome)] == [[1] * 3, [1] * 3, [1]]
    for time_s, began in starts(outcome):  # the fast wait for the slowest, of equal lengths
        ends = [outcome.trials[n].ended_s or 0.0 for n in began]
        slowest = min(10.0 + n for n in began)
        assert max(ends) == pytest.approx(min(ends)) == pytest.approx(time_s + 300 / slowest)


def test_fleets_flotillas_are_those_of_its_slides() -> None:
    for policy in ("fleet-g", FleetG(delta=5.0)):
        assert starts(sweep(policy, SLIDES, 4))[0] == (0.0, {0: 1, 3: 3})
    assert starts(sweep(FleetG(delta=4.0), SLIDES, 4))[0][1] == {0: 4}


def test_fleet_l_moves_nobody() -> None:
    for seed in range(3):
        order = order_of(sweep("fleet-l", drawn(seed), 4))
        assert len(order) == len(set(order))


def test_equal_split_gives_all_as_many_faster_or_not() -> None:
    trials = [simulated(f"{k}", (10.0 * (k + 1), *[9.0] * 7), 9 - 3 * k) for k in range(3)]
    began = starts(sweep("equal-split", trials, 8))
    assert began[0][1] == {0: 3, 1: 3, 2: 2}
    assert began[-1][1] == {0: 8}


@pytest.mark.parametrize("policy", POLICIES)
def test_alike_sweeps_go_alike(policy: str) -> None:
    for devices in (3, {"a": 2, "b": 2}):
        trials = drawn(5, *(devices if isinstance(devices, dict) else ()), shortest=1)
        runs = [sweep(policy, trials, devices, noise=0.2, seed=3) for _ in range(2)]
        assert starts(runs[0]) == starts(runs[1])


# -- without an answer of the solver --


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ending", ["NO_SOLUTION_FOUND", None])
def test_a_sweep_whose_solver_has_no_answer_comes_to_its_end(
    policy: str, ending: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def optimize(model: Any, **options: Any) -> Any:
        if ending is None:
            raise mip.InterfacingError("gone")
        return mip.OptimizationStatus[ending]

    monkeypatch.setattr(mip.Model, "optimize", optimize)
    for devices in (3, {"a": 2, "b": 2}):
        trials = drawn(6, *(devices if isinstance(devices, dict) else ()), shortest=1)
        outcome = sweep(policy_of(policy), trials, devices)
        assert all(p.epochs_done == p.trial.epochs for p in outcome.trials.values())


def test_trials_train_while_it_is_decided_about_them() -> None:
    """But for who can move at the end of an epoch only: there it waits, if it has a choice."""
    pair = [simulated(name, (10.0, 19.0), epochs=10) for name in "ab"]
    rules = Rules(decision_s=0.5)
    ends: dict[int, list[float]] = {2: [], 3: []}  # one device is free in the end, or none
    for devices, ended in ends.items():
        for movable in (True, False):
            ended.append(sweep("elastic", pair, devices, rules=rules, movable=movable).end_s)
    assert ends[3][0] < ends[3][1]
    assert max(ends[2]) <= 100.0 + 2 * rules.decision_s  # before anybody flies
