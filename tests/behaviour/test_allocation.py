"""What every plan keeps to, whichever policy makes it: who flies, who stays, what moves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc import SEVERAL, AllocationFailed, AllocationProblem, Candidate, Plan
from optuna_fleet.policies import Elastic
from tests.behaviour.allocation import (
    ALL_POLICIES,
    EFFICIENCY,
    LINEAR,
    THROUGHPUT,
    asked,
    flown,
    mixed_problems,
    placed,
    problem_of,
    problems,
    ruled_problems,
    trial,
    widths,
)

AT_EVENTS = {n: p for n, p in ALL_POLICIES.items() if p.paradigm == "elastic"}
"""They decide again and again, so nothing is to move for nothing."""

AS_PUBLISHED = ("fleet-g", "fleet-l")
"""Who does not keep the pace of a flotilla waits, though devices are idle."""


# -- what holds of every plan --


@settings(max_examples=25)
@given(problem=ruled_problems() | mixed_problems(), order=st.randoms())
def test_every_plan_can_be_flown_says_why_and_heeds_no_order(
    problem: AllocationProblem, order: Any
) -> None:
    shuffled = list(problem.candidates)
    order.shuffle(shuffled)
    for name, policy in ALL_POLICIES.items():
        plan = asked(policy, problem)
        assert_can_be_flown(problem, plan)
        assert plan.flotillas or not is_anybody_able_to_fly(problem), name
        assert plan.reason, name
        assert plan.status in ("optimal", "feasible", "trivial", "heuristic"), name
        assert plan.gap is None or plan.gap >= 0, name
        assert asked(policy, replace(problem, candidates=tuple(shuffled))) == plan, name


def assert_can_be_flown(problem: AllocationProblem, plan: Plan) -> None:
    """What `validate` looks at too, in other words."""
    everything = [a for flotilla in plan.flotillas for a in flotilla.assignments]
    used = [device for a in everything for device in a.devices]
    assert len(used) == len(set(used) & set(problem.devices))
    assert len(plan.assignments) == len(everything)
    for a in everything:
        candidate = problem.by_number[a.number]
        kinds = problem.kinds_of(a.devices)
        assert len(kinds) <= 1 or SEVERAL in candidate.rates_by_kind
        rates = candidate.rates_by_kind.get("".join(kinds[:1]), candidate.rates)
        rates = candidate.rates_by_kind[SEVERAL] if len(kinds) > 1 else rates
        assert a.rate == rates[len(a.devices) - 1]
        is_wide_enough = candidate.min_devices <= len(a.devices)
        is_too_wide = len(a.devices) > (candidate.max_devices or math.inf)
        assert a.number in problem.pinned or (is_wide_enough and not is_too_wide)
    for number in problem.pinned:
        assert plan.assignments[number].devices == problem.by_number[number].devices
    for flotilla in plan.flotillas:
        rates_in_it = [a.rate for a in flotilla.assignments]
        assert max(rates_in_it) <= min(rates_in_it) * problem.rate_spread * (1 + 1e-9)
        phases = {problem.by_number[a.number].epochs_done for a in flotilla.assignments}
        assert len(phases) == 1 or not problem.phases


def is_anybody_able_to_fly(problem: AllocationProblem) -> bool:
    most = max(problem.num_by_kind.values(), default=0)
    return any(
        c.min_devices <= (problem.num_devices if c.spans_types else most)
        for c in problem.candidates
    )


@settings(max_examples=30)
@given(problem=problems())
def test_no_device_idles_while_a_trial_waits_that_could_use_it(problem: AllocationProblem) -> None:
    movable = [replace(c, movable=True) for c in problem.candidates]
    for name, policy in ALL_POLICIES.items():
        if name in AS_PUBLISHED:
            continue
        if isinstance(policy, Elastic) and policy.objective != "makespan":
            problem = replace(problem, candidates=tuple(movable))  # or it waits for who leaves
        plan = asked(policy, problem)
        idle = problem.num_devices - sum(widths(plan).values())
        waiting = [c for c in problem.candidates if c.number not in plan.assignments]
        assert all(c.min_devices > idle for c in waiting), name


@pytest.mark.parametrize("policy", ALL_POLICIES.values(), ids=ALL_POLICIES.keys())
def test_without_devices_all_wait_and_the_plan_says_so(policy: Any) -> None:
    plan = asked(policy, problem_of(trial(1), nodes=((), ())))
    assert plan.flotillas == ()
    assert "trial 1 waits: it needs 1 devices, there are 0" in plan.reason
    assert asked(policy, problem_of()).flotillas == ()


def test_what_the_preprocessors_can_not_serve_waits_and_the_slowest_always_flies() -> None:
    rates = {1: (90.0,), 2: (20.0, 38.0)}
    for name, policy in ALL_POLICIES.items():
        for capacity, most in ((115.0, 115.0), (30.0, 38.0), (1.0, 20.0)):
            problem = problem_of(
                *(trial(n, r) for n, r in rates.items()), preprocess_samples_per_s=capacity
            )
            plan = asked(policy, problem)
            drawn = sum(max(a.rate for a in f.assignments) for f in plan.flotillas)
            assert 0 < drawn <= most, (name, capacity)


@pytest.mark.parametrize("policy", ALL_POLICIES.values(), ids=ALL_POLICIES.keys())
def test_a_hard_decision_is_made_within_its_time(policy: Any) -> None:
    """In seconds of its own process: on a busy machine others may take any time."""
    import time

    hard = problem_of(
        *(
            trial(n, tuple((20.0 + 3.7 * n) * m**0.9 for m in range(1, 13)), epochs_done=n % 5)
            for n in range(50)
        ),
        nodes=tuple(tuple(range(n, n + 4)) for n in range(0, 32, 4)),
        rate_spread=2.0,
        phases=True,
        preprocess_samples_per_s=700.0,
        time_limit_s=0.3,
    )
    started = time.process_time()
    with suppress(AllocationFailed):  # the fallback's turn
        assert asked(policy, hard).assignments
    assert time.process_time() - started < 0.3 + 3


# -- who moves --


@settings(max_examples=25)
@given(problem=problems(pinning=False))
def test_a_settled_fleet_stays_as_it_is(problem: AllocationProblem) -> None:
    """Asked again, nobody moves: of trials that each further device helps less, for free."""
    problem = replace(problem, candidates=tuple(map(concave, problem.candidates)))
    for name, policy in ALL_POLICIES.items():
        plan = asked(policy, problem)
        assert placed(asked(policy, flown(problem, plan))) == placed(plan), name


def concave(candidate: Candidate) -> Candidate:
    gains = sorted((abs(b - a) + 1e-3 for a, b in pairwise((0.0, *candidate.rates))), reverse=True)
    return replace(candidate, rates=tuple(accumulate(gains)), rescale_up_s=0.0)


@settings(max_examples=30)
@given(problem=problems(pinning=False), ages=st.permutations(range(13)))
def test_who_moves_keeps_what_it_has_and_young_devices_go_first(
    problem: AllocationProblem, ages: list[int]
) -> None:
    joined = {device: ages[device] for device in problem.devices}
    problem = replace(problem, joined=joined)
    for name, policy in AT_EVENTS.items():
        for number, devices in placed(asked(policy, problem)).items():
            before = set(problem.by_number[number].devices)
            assert before <= devices or devices < before, name
            oldest_given_up = min((joined[d] for d in before - devices), default=math.inf)
            youngest_kept = max((joined[d] for d in before & devices), default=-1)
            assert youngest_kept < oldest_given_up, name


def test_who_grows_does_so_where_it_is() -> None:
    grows, starts = trial(1, LINEAR[:3], devices=(5,)), trial(2, LINEAR[:1])
    for name, policy in AT_EVENTS.items():
        plan = asked(policy, problem_of(grows, starts, nodes=((0, 1, 2), (4, 5, 6))))
        assert placed(plan)[1] == {4, 5, 6}, name


def test_devices_for_a_trial_that_grows_later_serve_who_waits_until_then() -> None:
    stuck, waiting = known(1, 500, devices=(0,), movable=False), known(2, 1)
    plan = asked("elastic", problem_of(stuck, waiting, nodes=((0, 1, 2),), **LENGTHS))
    assert widths(plan).keys() == {1, 2}


def test_a_trial_that_would_end_later_for_its_move_stays() -> None:
    # 16 epochs of 100 samples at 10/s are 160 s; twice the rate would save 80 s.
    for cost_s, width in ((200.0, 1), (10.0, 2)):
        lone = trial(1, devices=(0,), samples_per_epoch=100.0, rescale_up_s=cost_s, max_epochs=16)
        problem = problem_of(lone, nodes=((0, 1),), finished_epochs=(16,) * 8)
        assert widths(asked("elastic", problem)) == {1: width}


def test_a_published_flotilla_of_freed_devices_leaves_those_that_fly_alone() -> None:
    flying = trial(7, (10.0, 19.0), devices=(2, 3), movable=False)
    waiting = [trial(1, (100.0, 190.0)), trial(4, (40.0, 75.0, 105.0))]
    plan = asked("fleet-l", problem_of(flying, *waiting, nodes=((0, 1, 2, 3), (4, 5))))
    assert widths(plan) == {1: 1, 4: 3, 7: 2}
    assert sorted(sorted(a.number for a in f.assignments) for f in plan.flotillas) == [[1, 4], [7]]


# -- to get most done --


@settings(max_examples=40)
@given(
    problem=problems(pinning=False, max_candidates=3, max_devices=6),
    up_s=st.sampled_from([0.0, 30.0, 500.0]),
    down_s=st.sampled_from([0.0, 20.0]),
)
@pytest.mark.parametrize("policy", [THROUGHPUT, EFFICIENCY], ids=["throughput", "efficiency"])
def test_no_widths_are_worth_more(
    policy: Any, problem: AllocationProblem, up_s: float, down_s: float
) -> None:
    """BFTrainer, Eq. 16, by brute force."""
    costly = [replace(c, rescale_up_s=up_s, rescale_down_s=down_s) for c in problem.candidates]
    problem = replace(problem, candidates=tuple(costly))

    def worth(candidate: Candidate, m: int) -> float:
        rates = [0.0, *candidate.rates]
        unit = candidate.rates[0] if policy.objective == "scaling-efficiency" else 1.0
        now = len(candidate.devices)
        if not candidate.min_devices <= now <= candidate.widest:
            now = 0  # it has to leave them, so that costs nothing
        cost_s = up_s if m > now else down_s if m < now else 0.0
        return float((policy.forward_looking_s * rates[m] - rates[now] * cost_s) / unit)

    def total(counts: Iterable[int]) -> float:
        return sum(worth(c, m) for c, m in zip(problem.candidates, counts, strict=True))

    options = [(0, *range(c.min_devices, c.widest + 1)) for c in problem.candidates]
    best = max(total(w) for w in product(*options) if sum(w) <= problem.num_devices)
    planned = widths(asked(policy, problem))
    assert total(planned.get(c.number, 0) for c in problem.candidates) == pytest.approx(
        best, rel=1e-6, abs=1e-6
    )


# -- to be done soon --


def known(number: int, epochs: int, rates: Any = LINEAR, **more: Any) -> Candidate:
    return trial(number, rates, max_epochs=epochs, predicted_epochs=float(epochs), **more)


LENGTHS: Any = {"finished_epochs": (16,) * 8}


def test_who_has_come_furthest_gets_least() -> None:
    ahead = known(1, 20, epochs_done=16)
    problem = problem_of(ahead, known(2, 20), known(3, 20), nodes=((0, 1, 2, 3, 4),), **LENGTHS)
    assert widths(asked("elastic", problem)) == {1: 1, 2: 2, 3: 2}


def test_nobody_is_widened_with_what_trials_to_come_will_need() -> None:
    problem = problem_of(trial(1, devices=(0, 1, 2, 3)))
    assert widths(asked("elastic", problem)) == {1: 4}
    assert widths(asked("elastic", replace(problem, num_to_come=10))) == {1: 1}


@pytest.mark.parametrize("is_within_epoch", [True, False])
def test_trials_do_not_take_turns_within_an_epoch(is_within_epoch: bool) -> None:
    flying = [
        trial(k, devices=(k,), epochs_done=8, max_epochs=10, is_within_epoch=is_within_epoch)
        for k in range(4)
    ]
    waiting = [trial(4 + k, max_epochs=10) for k in range(2)]
    plan = asked("elastic", problem_of(*flying, *waiting))
    assert (widths(plan) == dict.fromkeys(range(4), 1)) is is_within_epoch


# -- device types --

AT_RANDOM = ("baseline", "homogeneous")
LOOK_AT_RATES = [name for name in ALL_POLICIES if name not in (*AT_RANDOM, *AS_PUBLISHED)]
A2_B2: Any = {"nodes": ((0, 1), (2, 3)), "kinds": ("a", "b")}
A2_B1: Any = {"nodes": ((0, 1), (2,)), "kinds": ("a", "b")}


def alike(number: int, *, fast: float = 20.0, slow: float = 10.0, **more: Any) -> Candidate:
    """It scales perfectly, on one type at a time."""
    by_kind = {"a": fast, "b": slow}
    return trial(number, {k: [r * m for m in (1, 2, 3, 4)] for k, r in by_kind.items()}, **more)


def spanning(number: int, *, at: str = "a", **more: Any) -> Candidate:
    """The same on both at once."""
    by_kind = {"a": 20.0, "b": 10.0, SEVERAL: 15.0}
    rates = {k: [r * m for m in (1, 2, 3, 4)] for k, r in by_kind.items()}
    return trial(number, rates, at=at, **more)


@pytest.mark.parametrize("policy", LOOK_AT_RATES)
def test_the_fast_devices_go_to_those_who_gain_most_by_them(policy: str) -> None:
    gains = {1: 1.2, 2: 3.0, 3: 2.5, 4: 1.1}
    trials = [trial(n, {"a": (100.0 * gain,), "b": (100.0,)}) for n, gain in gains.items()]
    plan = asked(ALL_POLICIES[policy], problem_of(*trials, **A2_B2))
    fast = {n for n, a in plan.assignments.items() if set(a.devices) <= {0, 1}}
    assert fast == {2, 3}


@pytest.mark.parametrize("name", [n for n in AT_EVENTS if n != "equal-split"])
def test_a_change_of_type_must_pay_for_its_move(name: str) -> None:
    # In 120 s it trains 50 % more there: as much as 60 s at its rate, as with all it has left.
    of_three_minutes = {"max_epochs": 1, "samples_per_epoch": 18_000.0}
    for cost_s, device in ((0.0, 2), (50.0, 2), (70.0, 0)):
        rates = {"a": (100.0,), "b": (150.0,)}
        mover = trial(1, rates, at="a", devices=(0,), rescale_up_s=cost_s, **of_three_minutes)
        plan = asked(ALL_POLICIES[name], problem_of(mover, **A2_B2))
        assert placed(plan)[1] == ({2} if device == 2 else {0})
        stuck = replace(mover, movable=False)
        assert placed(asked(ALL_POLICIES[name], problem_of(stuck, **A2_B2))) == {1: {0}}


def test_who_needs_more_devices_than_there_are_of_any_type_gets_a_mixture() -> None:
    for name, policy in ALL_POLICIES.items():
        plan = asked(policy, problem_of(spanning(1, min_devices=3), **A2_B1))
        assert placed(plan) == {1: {0, 1, 2}}, name
        too_many = spanning(1, min_devices=4)
        plan = asked(policy, problem_of(too_many, alike(2), **A2_B1))
        assert plan.assignments.keys() == {2}, name
        assert "trial 1 waits: it needs 4 devices" in plan.reason, name


def test_devices_that_would_be_idle_widen_a_trial_that_spans_types_if_it_ends_sooner() -> None:
    flying = spanning(1, devices=(0, 1))
    assert widths(asked("elastic", problem_of(flying, **A2_B2))) == {1: 4}
    costly = replace(flying, rescale_up_s=1e9)
    assert placed(asked("elastic", problem_of(costly, **A2_B2))) == {1: {0, 1}}
    slower = {**flying.rates_by_kind, SEVERAL: (10.0, 20.0, 30.0, 39.0)}
    slowed = replace(flying, devices=(), rates_by_kind=slower)
    assert placed(asked("elastic", problem_of(slowed, **A2_B2))) == {1: {0, 1}}


@pytest.mark.parametrize("policy", ["elastic", "mip", "greedy", "throughput"])
def test_uneven_nodes_of_either_type_are_used_to_the_last_device(policy: str) -> None:
    rates = {"a": [20.0 * m for m in range(1, 9)], "b": LINEAR}
    nodes, kinds = ((0, 1, 2, 3), (4,), (5, 6, 7), (8, 9)), ("a", "b", "b", "a")
    problem = problem_of(*(trial(n, rates) for n in range(5)), nodes=nodes, kinds=kinds)
    assert sum(widths(asked(ALL_POLICIES[policy], problem)).values()) == 10
