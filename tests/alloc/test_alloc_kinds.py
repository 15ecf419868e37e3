"""Fleets of several device types: who flies on which, around every allocator."""

import itertools
import math
from dataclasses import replace

import pytest
from alloc_cases import ruled_problems
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc import (
    AllocationFailed,
    AllocationProblem,
    Assignment,
    ByKind,
    Candidate,
    ElasticAllocator,
    EqualSplitAllocator,
    FleetAllocator,
    Flotilla,
    GreedyAllocator,
    HomogeneousAllocator,
    MipAllocator,
    Plan,
    SingleDeviceAllocator,
    validate,
)
from optuna_fleet.alloc.fluid import fluid_optimum, fluid_seconds
from optuna_fleet.alloc.problem import SEVERAL
from tests.behaviour.allocation import mixed_problems

ALLOCATORS = [
    ByKind(inner=ElasticAllocator()),
    ByKind(inner=ElasticAllocator(objective="throughput"), forward_looking_s=1.0),
    ByKind(inner=EqualSplitAllocator()),
    ByKind(inner=FleetAllocator()),
    ByKind(inner=GreedyAllocator()),
    ByKind(inner=GreedyAllocator(keep_flying=True), cautious=True),
    ByKind(inner=HomogeneousAllocator(seed=7)),
    ByKind(inner=MipAllocator()),
    ByKind(inner=SingleDeviceAllocator()),
]
every_allocator = pytest.mark.parametrize("allocator", ALLOCATORS, ids=repr)


@every_allocator
@settings(max_examples=30)
@given(problem=mixed_problems())
def test_plans_of_mixed_fleets_can_be_flown_and_say_why(allocator, problem):
    plan = allocator.allocate(problem)
    validate(problem, plan)
    assert plan.allocator == allocator.inner.name
    assert plan.reason
    assert plan.status
    kind_of = {d: k for k, node in zip(problem.kinds, problem.nodes, strict=True) for d in node}
    for a in plan.assignments.values():
        kinds = {kind_of[d] for d in a.devices}
        rates = problem.by_number[a.number].rates_by_kind
        assert a.rate == rates[SEVERAL if len(kinds) > 1 else kinds.pop()][len(a.devices) - 1]


@every_allocator
@settings(max_examples=15)
@given(problem=mixed_problems(pinning=False))
def test_something_flies_in_a_mixed_fleet(allocator, problem):
    most = max(problem.num_by_kind.values(), default=0)
    fits = any(
        c.min_devices <= (problem.num_devices if c.spans_types else most)
        for c in problem.candidates
    )
    assert bool(allocator.allocate(problem).flotillas) or not fits


@every_allocator
@settings(max_examples=15)
@given(problem=mixed_problems(), order=st.randoms())
def test_plans_of_mixed_fleets_do_not_depend_on_the_order_of_candidates(allocator, problem, order):
    shuffled = list(problem.candidates)
    order.shuffle(shuffled)
    again = allocator.allocate(replace(problem, candidates=tuple(shuffled)))
    assert again == allocator.allocate(problem)


@every_allocator
@settings(max_examples=15)
@given(problem=ruled_problems())
def test_with_one_type_the_plan_is_that_of_the_inner_allocator(allocator, problem):
    plan = allocator.inner.allocate(problem)
    assert allocator.allocate(problem) == plan
    same = replace(problem, kinds=("a",) * len(problem.nodes))
    assert allocator.allocate(same) == plan


@settings(max_examples=40)
@given(problem=mixed_problems())
def test_a_cautious_plan_changes_no_trials_type(problem):
    plan = ByKind(inner=GreedyAllocator(), cautious=True).allocate(problem)
    for number, a in plan.assignments.items():
        candidate = problem.by_number[number]
        if (problem.kept_width(candidate) or 0) >= candidate.min_devices:
            now = problem.kind_now(candidate)
            assert now in (problem.kind_of(a.devices), SEVERAL)


def test_a_trial_whose_devices_a_mixture_takes_does_not_change_its_type_in_a_cautious_plan():
    kinds = {
        k: tuple(r * m for m in range(1, 6)) for k, r in {"a": 5.0, "b": 8.0, "c": 6.0}.items()
    }
    large = Candidate(
        number=0,
        rates=kinds["b"],
        rates_by_kind={**kinds, SEVERAL: kinds["c"]},
        min_devices=5,
        samples_per_epoch=1.0,
    )
    flying = [
        Candidate(
            number=n, rates=kinds["c"], rates_by_kind=kinds, devices=(n,), samples_per_epoch=1.0
        )
        for n in (6, 7)
    ]
    problem = AllocationProblem(
        candidates=(large, *flying),
        nodes=((0, 1), (2, 3, 4, 5), (6, 7)),
        kinds=("a", "b", "c"),
        rate_spread=10.0,
    )
    plan = ByKind(inner=GreedyAllocator(), cautious=True).allocate(problem)
    validate(problem, plan)
    given = {n: problem.kind_of(a.devices) for n, a in plan.assignments.items()}
    assert given.pop(0) == SEVERAL
    assert set(given.values()) <= {"c"}


def test_a_cautious_plan_serves_somebody_where_only_a_change_of_type_would_do_with_less():
    on_a = tuple(10.0 * m for m in range(1, 5))
    flying = Candidate(
        number=0,
        rates=on_a,
        rates_by_kind={"a": on_a, "b": tuple(r / 2 for r in on_a)},
        devices=(3,),
        samples_per_epoch=1.0,
    )
    waiting = Candidate(
        number=1, rates=(5.5,), rates_by_kind={"a": (5.5,), "b": (5.5,)}, samples_per_epoch=1.0
    )
    problem = AllocationProblem(
        candidates=(flying, waiting),
        nodes=((0, 1, 2), (3,)),
        kinds=("b", "a"),
        preprocess_samples_per_s=5.0,  # what trial 0 would draw on type b
    )
    plan = ByKind(inner=GreedyAllocator(), cautious=True).allocate(problem)
    validate(problem, plan)
    assert plan.assignments.keys() == {1}


# -- who flies on which ------------------------------------------------------------------------


class Recording(GreedyAllocator):
    """Notes what it is asked, by the devices that may be used."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "problems", {})

    def allocate(self, problem):
        self.problems[problem.devices] = problem
        return super().allocate(problem)

    @property
    def seen(self):
        return {d: {c.number for c in p.candidates} for d, p in self.problems.items()}


def worth(problem, candidate, kind, n, forward_looking_s):
    """As `ByKind` says it, written anew."""
    best = max(rates[0] for rates in candidate.rates_by_kind.values())
    now, home = len(candidate.devices), problem.kind_now(candidate)
    value = forward_looking_s * candidate.rates_by_kind[kind][n - 1] / best if n else 0.0
    if now and (n, kind) != (now, home):
        is_down = n == 0 or (kind == home and n < now)
        cost_s = candidate.rescale_down_s if is_down else candidate.rescale_up_s
        value -= candidate.rates_by_kind[home][now - 1] / best * cost_s
    return value


@st.composite
def small_mixed_problems(draw):
    candidates = []
    free = {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}
    for number in range(draw(st.integers(1, 4))):
        rates = {
            kind: tuple(float(r) for r in sorted(draw(st.sets(st.integers(1, 99), min_size=4))))[
                :4
            ]
            for kind in "ab"
        }
        home = draw(st.sampled_from(["", "a", "b"]))
        m = min(draw(st.integers(1, 2)), len(free[home])) if home else 0
        candidates.append(
            Candidate(
                number=number,
                rates=rates[home if m else "a"],
                rates_by_kind=rates,
                devices=tuple(free[home].pop() for _ in range(m)),
                rescale_up_s=draw(st.sampled_from([0.0, 20.0, 80.0])),
                rescale_down_s=draw(st.sampled_from([0.0, 20.0])),
            )
        )
    nodes = ((0, 1, 2), (3,), (4, 5), (6, 7))
    return AllocationProblem(
        candidates=tuple(candidates), nodes=nodes, kinds=("a", "a", "b", "b"), rate_spread=math.inf
    )


@settings(max_examples=60)
@given(problem=small_mixed_problems(), forward_looking_s=st.sampled_from([10.0, 100.0]))
def test_types_are_those_of_the_widths_worth_most(problem, forward_looking_s):
    options = [(k, n) for k in "ab" for n in range(5)]
    values = [
        {(k, n): worth(problem, c, k, n, forward_looking_s) for k, n in options}
        for c in problem.candidates
    ]
    best = max(
        sum(v[o] for v, o in zip(values, choice, strict=True))
        for choice in itertools.product(options, repeat=len(values))
        if all(sum(n for k, n in choice if k == kind) <= 4 for kind in "ab")
    )
    allocator = ByKind(inner=GreedyAllocator(), forward_looking_s=forward_looking_s)
    kinds = allocator._decided(problem, {})
    reached = max(
        sum(v[kinds[i], n] for i, (v, n) in enumerate(zip(values, widths, strict=True)))
        for widths in itertools.product(range(5), repeat=len(values))
        if all(sum(n for i, n in enumerate(widths) if kinds[i] == kind) <= 4 for kind in "ab")
    )
    assert reached == pytest.approx(best)


@settings(max_examples=60)
@given(problem=small_mixed_problems(), allocator=st.sampled_from(ALLOCATORS[:1] + ALLOCATORS[4:5]))
def test_nobody_loses_by_changing_its_type_unless_the_inner_allocator_insists(problem, allocator):
    first = allocator._decided(problem, {})
    plan = allocator._planned(problem, first, {}, math.inf)
    regretted = allocator._regretted(problem, first, plan)
    for number, kind in first.items():
        c = problem.by_number[number]
        home = problem.kind_now(c)
        a = plan.assignments.get(number)
        if home not in ("", kind):
            there = worth(problem, c, kind, len(a.devices) if a else 0, 120.0)
            here = worth(problem, c, home, len(c.devices), 120.0)
            if there != pytest.approx(here):  # of what is worth the same, rounding decides
                assert (there < here) == (regretted.get(number) == home)


def mover(rescale_up_s, **more):
    slow, fast = (100.0,), (150.0,)
    return Candidate(
        number=1,
        rates=slow,
        rates_by_kind={"slow": slow, "fast": fast},
        devices=(0,),
        rescale_up_s=rescale_up_s,
        **more,
    )


@pytest.mark.parametrize(("cost_s", "device"), [(0.0, 1), (50.0, 1), (70.0, 0)])
def test_a_trial_moves_to_a_faster_type_only_if_that_pays(cost_s, device):
    # In 120 s it trains 50 % more there: as much as 60 s at its rate.
    problem = AllocationProblem(
        candidates=(mover(cost_s),), nodes=((0,), (1,)), kinds=("slow", "fast")
    )
    plan = ByKind(inner=ElasticAllocator()).allocate(problem)
    assert plan.assignments[1].devices == (device,)
    assert plan.assignments[1].rate == (150.0 if device else 100.0)


def test_a_trial_that_can_not_move_keeps_its_type():
    problem = AllocationProblem(
        candidates=(mover(0.0, movable=False),), nodes=((0,), (1,)), kinds=("slow", "fast")
    )
    plan = ByKind(inner=ElasticAllocator()).allocate(problem)
    assert plan.assignments[1].devices == (0,)


def test_a_trial_that_changes_its_type_starts_anew_there():
    problem = AllocationProblem(
        candidates=(mover(0.0),), nodes=((0,), (1,)), kinds=("slow", "fast")
    )
    recording = Recording()
    ByKind(inner=recording).allocate(problem)
    (candidate,) = recording.problems[(1,)].candidates
    assert candidate == Candidate(number=1, rates=(150.0,))


def test_a_trial_keeps_its_type_if_it_would_get_too_little_of_the_better_one():
    rates = {"slow": (100.0, 101.0), "fast": (90.0, 300.0)}
    candidate = Candidate(number=1, rates=rates["slow"], rates_by_kind=rates, devices=(0,))
    problem = AllocationProblem(
        candidates=(candidate,), nodes=((0,), (1, 2)), kinds=("slow", "fast")
    )
    generous, stingy = ByKind(inner=GreedyAllocator()), ByKind(inner=SingleDeviceAllocator())
    assert generous.allocate(problem).assignments[1].devices == (1, 2)
    assert stingy.allocate(problem).assignments[1].devices == (0,)


def test_devices_of_trials_that_can_not_move_are_nobody_elses():
    rates = {"slow": (100.0,), "fast": (150.0,)}
    waiting = Candidate(number=2, rates=rates["fast"], rates_by_kind=rates)
    stays = Candidate(
        number=1, rates=rates["fast"], rates_by_kind=rates, devices=(1,), movable=False
    )
    problem = AllocationProblem(
        candidates=(stays, waiting), nodes=((0,), (1,)), kinds=("slow", "fast")
    )
    plan = ByKind(inner=ElasticAllocator()).allocate(problem)
    assert {t: a.devices for t, a in plan.assignments.items()} == {1: (1,), 2: (0,)}


def test_the_fast_devices_go_to_those_who_gain_most_by_them():
    gains = {1: 1.2, 2: 3.0, 3: 2.5, 4: 1.1}
    candidates = tuple(
        Candidate(
            number=t,
            rates=(100.0 * gain,),
            rates_by_kind={"a100": (100.0 * gain,), "v100": (100.0,)},
        )
        for t, gain in gains.items()
    )
    problem = AllocationProblem(
        candidates=candidates, nodes=((0, 1), (2, 3)), kinds=("v100", "a100")
    )
    recording = Recording()
    plan = ByKind(inner=recording).allocate(problem)
    assert recording.seen == {(0, 1): {1, 4}, (2, 3): {2, 3}}
    assert plan.reason.startswith("a100: 2 of 2 trials on 2 of 2 devices")
    assert "v100: 2 of 2 trials" in plan.reason
    assert plan.status == "heuristic"


def test_trials_that_wait_are_shared_out_by_what_there_is_to_do():
    rates = {"fast": (300.0,), "slow": (100.0,)}
    candidates = tuple(
        Candidate(number=t, rates=rates["fast"], rates_by_kind=rates) for t in range(10)
    )
    problem = AllocationProblem(
        candidates=candidates, nodes=((0,), (1, 2)), kinds=("fast", "slow")
    )
    recording = Recording()
    ByKind(inner=recording).allocate(problem)
    assert {d: len(seen) for d, seen in recording.seen.items()} == {(0,): 6, (1, 2): 4}


def test_uneven_nodes_of_either_type_are_used_to_the_last_device():
    linear = tuple(100.0 * m for m in range(1, 9))
    rates = {"a": tuple(2 * r for r in linear), "b": linear}
    candidates = tuple(
        Candidate(number=t, rates=rates["a"], rates_by_kind=rates) for t in range(5)
    )
    nodes = ((0, 1, 2, 3), (4,), (5, 6, 7), (8, 9))
    problem = AllocationProblem(candidates=candidates, nodes=nodes, kinds=("a", "b", "b", "a"))
    for allocator in (ElasticAllocator(), MipAllocator(), GreedyAllocator()):
        plan = ByKind(inner=allocator).allocate(problem)
        validate(problem, plan)
        assert sum(f.num_devices for f in plan.flotillas) == 10


def test_large_fleets_are_decided_by_mip_and_without_one_greedily(monkeypatch):
    candidates = tuple(
        Candidate(
            number=t,
            rates=tuple((300.0 + t) * m**0.9 for m in range(1, 300)),
            rates_by_kind={
                k: tuple((100.0 * (i + 2) + t) * m**0.9 for m in range(1, 300))
                for i, k in enumerate("bac")
            },
        )
        for t in range(20)
    )
    nodes = (tuple(range(300)), tuple(range(300, 600)), tuple(range(600, 900)))
    problem = AllocationProblem(candidates=candidates, nodes=nodes, kinds=("a", "b", "c"))
    allocator = ByKind(inner=EqualSplitAllocator())
    validate(problem, allocator.allocate(problem))

    def fail(*_):
        raise AllocationFailed("it does not work")

    monkeypatch.setattr("optuna_fleet.alloc.kinds.solve_by_mip", fail)
    plan = allocator.allocate(problem)
    validate(problem, plan)
    assert sum(f.num_devices for f in plan.flotillas) > 850


# -- devices of several types at once ----------------------------------------------------------

A2_B1 = {"nodes": ((0, 1), (2,)), "kinds": ("a", "b")}
A2_B2 = {"nodes": ((0, 1), (2, 3)), "kinds": ("a", "b")}


def spanning(number, *, fast=20.0, slow=10.0, at="", **more):
    """It scales perfectly, and on a mixture as half of it would on each type."""
    by_kind = {"a": fast, "b": slow, SEVERAL: (fast + slow) / 2}
    rates = {kind: tuple(r * m for m in (1, 2, 3, 4)) for kind, r in by_kind.items()}
    return Candidate(number=number, rates=rates[at or "a"], rates_by_kind=rates, **more)


def alike(number, **more):
    """As `spanning`, but on one type at a time."""
    both = spanning(number, **more)
    return replace(both, rates_by_kind={kind: both.rates_by_kind[kind] for kind in "ab"})


def devices_of(allocator, *candidates, **fleet):
    problem = AllocationProblem(candidates=candidates, **fleet)
    plan = allocator.allocate(problem)
    validate(problem, plan)
    return {t: a.devices for t, a in plan.assignments.items()}, plan.reason


@every_allocator
def test_who_needs_more_devices_than_there_are_of_any_type_gets_several_types(allocator):
    placed, reason = devices_of(allocator, spanning(1, min_devices=3), **A2_B1)
    assert placed == {1: (0, 1, 2)}
    assert reason.startswith("several types: 1 of 1 trials on 3 of 3 devices")
    assert "0 of 0" not in reason  # of types of which nothing is left


@every_allocator
def test_who_needs_more_devices_than_there_are_at_all_waits_and_the_others_fly(allocator):
    placed, reason = devices_of(allocator, spanning(1, min_devices=4), alike(2), **A2_B1)
    assert placed.keys() == {2}
    assert "several types: 0 of 1 trials" in reason
    assert "trial 1 waits: it needs 4 devices" in reason


@every_allocator
def test_who_can_not_span_types_does_not(allocator):
    placed, _ = devices_of(allocator, alike(1, min_devices=3), spanning(2), **A2_B1)
    assert placed.keys() == {2}


@every_allocator
def test_who_is_on_several_types_stays_there_if_it_can_not_move(allocator):
    stays = spanning(1, at=SEVERAL, devices=(1, 2), movable=False)
    placed, _ = devices_of(allocator, stays, alike(2), alike(3), **A2_B2)
    assert placed.pop(1) == (1, 2)
    assert {d for devices in placed.values() for d in devices} <= {0, 3}


@every_allocator
def test_who_is_on_several_types_and_lost_one_of_its_devices_gets_as_many_as_it_needs(allocator):
    lost = spanning(1, at=SEVERAL, devices=(1, 2, 9), min_devices=3, movable=False)
    placed, _ = devices_of(allocator, lost, **A2_B2)
    assert len(placed[1]) >= 3


def test_devices_that_would_be_idle_widen_a_trial_that_spans_types():
    flying = spanning(1, devices=(0, 1))
    elastic = ByKind(inner=ElasticAllocator())
    assert devices_of(elastic, flying, **A2_B2)[0] == {1: (0, 1, 2, 3)}
    assert devices_of(elastic, replace(flying, rescale_up_s=1e9), **A2_B2)[0] == {1: (0, 1)}
    cautious = ByKind(inner=GreedyAllocator(keep_flying=True), cautious=True)
    assert devices_of(cautious, flying, **A2_B2)[0] == {1: (0, 1)}
    baseline = ByKind(inner=SingleDeviceAllocator())
    assert devices_of(baseline, flying, **A2_B2)[0] == {1: (0, 1)}


@pytest.mark.parametrize("inner", [ElasticAllocator(), MipAllocator(), GreedyAllocator()])
def test_a_mixture_has_the_fast_devices_first(inner):
    fleet = {"nodes": ((0, 1), (2, 3)), "kinds": ("b", "a")}
    large = spanning(1, min_devices=3, max_devices=3)
    placed, _ = devices_of(ByKind(inner=inner), large, **fleet)
    assert {2, 3} < set(placed[1])


@every_allocator
def test_a_mixture_flies_alone_where_nothing_can_be_served(allocator):
    large = spanning(1, min_devices=3)
    placed, _ = devices_of(allocator, large, **A2_B1, preprocess_samples_per_s=5.0)
    assert placed == {1: (0, 1, 2)}


@pytest.mark.parametrize(("capacity", "numbers"), [(95.0, {1, 2, 3}), (65.0, {2, 3})])
def test_a_mixture_waits_if_it_can_not_be_served_beside_those_that_stay(capacity, numbers):
    fleet = {"nodes": ((0, 1, 2), (3, 4, 5)), "kinds": ("a", "b"), "rate_spread": math.inf}
    large = spanning(1, min_devices=4)  # draws 60 samples/s; the others 20 and 10
    stay = [
        spanning(2, at="a", devices=(0,), movable=False),
        spanning(3, at="b", devices=(3,), movable=False),
    ]
    allocator = ByKind(inner=GreedyAllocator())
    placed, _ = devices_of(allocator, large, *stay, **fleet, preprocess_samples_per_s=capacity)
    assert placed.keys() == numbers


def test_a_mixture_that_is_slower_than_the_fast_type_alone_is_not_taken():
    slow = spanning(1, fast=30.0, slow=1.0)
    slow = replace(slow, rates_by_kind={**slow.rates_by_kind, SEVERAL: (15.0, 30.0, 45.0, 59.0)})
    placed, _ = devices_of(ByKind(inner=ElasticAllocator()), slow, **A2_B2)
    assert placed == {1: (0, 1)}


def test_who_leaves_a_mixture_for_less_is_on_one_type_again():
    wide = spanning(1, at=SEVERAL, devices=(0, 1, 2, 3))
    placed, _ = devices_of(ByKind(inner=ElasticAllocator()), wide, spanning(2), **A2_B2)
    assert sorted(placed.values()) == [(0, 1), (2, 3)]


# -- problems and plans ------------------------------------------------------------------------


def assigned(devices, rate):
    a = Assignment(number=1, devices=devices, rate=rate)
    return Plan(flotillas=(Flotilla(assignments=(a,)),), allocator="x", reason="y", status="z")


@pytest.mark.parametrize(
    ("devices", "rate", "message"),
    [
        ((0, 2), 20.0, r"trial 1 has devices of types \['a', 'b'\]"),
        ((0,), 30.0, "trial 1 has rate 30.0, not 10.0"),
        ((2, 3), 20.0, "trial 1 has rate 20.0, not 60.0"),
    ],
)
def test_a_trial_flies_on_one_type_at_the_rate_it_has_there(devices, rate, message):
    rates = {"a": (10.0, 20.0), "b": (30.0, 60.0)}
    candidate = Candidate(number=1, rates=rates["a"], rates_by_kind=rates)
    problem = AllocationProblem(candidates=(candidate,), nodes=((0, 1), (2, 3)), kinds=("a", "b"))
    validate(problem, assigned((2, 3), 60.0))
    with pytest.raises(ValueError, match=message):
        validate(problem, assigned(devices, rate))


# -- the lower bound ---------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.floats(10, 400), st.floats(0.8, 1), st.floats(1e3, 1e6)), min_size=1),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_types_that_are_alike_have_the_bound_of_one(trials, few, more):
    total = few + more
    rates = [tuple(r * m * f ** (m - 1) for m in range(1, total + 1)) for r, f, _ in trials]
    work = [w for _, _, w in trials]
    exact_s, _ = fluid_optimum(rates, work, total)
    one_s = fluid_seconds([{"a": r} for r in rates], work, {"a": total})
    assert one_s <= exact_s <= one_s * 1.0001
    two_s = fluid_seconds([{"a": r, "b": r} for r in rates], work, {"a": few, "b": more})
    assert two_s >= one_s * 0.9999  # nobody flies on both at once


def test_the_bound_of_unlike_types_shares_trials_out_by_what_suits_them():
    rates = [{"a": (300.0,), "b": (100.0,)}, {"a": (100.0,), "b": (100.0,)}]
    bound_s = fluid_seconds(rates, [900.0, 300.0], {"a": 1, "b": 1})
    assert bound_s == pytest.approx(3.0, rel=1e-4)


def test_each_type_counts_on_its_share_of_the_trials_to_come():
    slow, fast = (10.0, 20.0, 30.0), (20.0, 40.0, 60.0)
    rates = {"slow": slow, "fast": fast}
    problem = AllocationProblem(
        candidates=(
            Candidate(number=1, rates=slow, devices=(0,), rates_by_kind=rates),
            Candidate(number=2, rates=fast, devices=(3,), rates_by_kind=rates),
        ),
        nodes=((0, 1, 2), (3, 4, 5)),
        kinds=("slow", "fast"),
    )
    seen = []

    class Seeing(ElasticAllocator):
        def allocate(self, problem):
            seen.append(problem.num_to_come)
            return super().allocate(problem)

    ByKind(inner=Seeing()).allocate(replace(problem, num_to_come=5))
    assert set(seen) == {3}
