"""Fleets of several device types, for an allocator of the user's that knows of one."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings

from optuna_fleet.alloc import SEVERAL, ByKind, validate
from optuna_fleet.alloc.assembly import plan_of
from tests.behaviour.allocation import mixed_problems, placed, problem_of, ruled_problems, trial


@dataclass(frozen=True)
class FirstCome:
    """Trials keep what they have; others get their fewest devices. It knows of no types."""

    name: str = "first-come"

    def allocate(self, problem):
        assert not problem.kinds
        assert not any(c.rates_by_kind for c in problem.candidates)
        trials = problem.by_number.values()
        given = {n: problem.by_number[n].devices for n in problem.pinned}
        for kept in (True, False):
            for c in trials:
                free = [d for d in problem.devices if d not in sum(given.values(), ())]
                if c.number in given:
                    continue
                if kept and problem.kept_width(c) and set(c.devices) <= set(free):
                    given[c.number] = c.devices
                elif not kept and c.min_devices <= len(free):
                    given[c.number] = tuple(free[: c.min_devices])
        alone = [[number] for number in given]
        return plan_of(problem, given, groups=alone, allocator=self.name)


OWN = ByKind(inner=FirstCome())


@settings(max_examples=80)
@given(problem=mixed_problems())
def test_its_plan_can_be_flown_and_whoever_flies_stays_on_its_type(problem):
    problem = replace(problem, preprocess_samples_per_s=None)
    plan = OWN.allocate(problem)
    validate(problem, plan)
    assert plan.allocator == "first-come"
    assert plan.reason
    for number, a in plan.assignments.items():
        candidate = problem.by_number[number]
        home = problem.kind_now(candidate)
        if problem.kept_width(candidate):
            assert problem.kind_of(a.devices) == home


@settings(max_examples=25)
@given(problem=ruled_problems())
def test_with_one_type_the_plan_is_its_own(problem):
    plan = FirstCome().allocate(problem)
    assert OWN.allocate(problem) == plan
    same = replace(problem, kinds=("a",) * len(problem.nodes), preprocess_samples_per_s=None)
    assert placed(OWN.allocate(same)) == placed(plan)


def test_trials_that_wait_are_shared_out_by_what_there_is_to_do():
    trials = [trial(n, {"fast": (300.0,), "slow": (100.0,)}) for n in range(10)]
    problem = problem_of(*trials, nodes=((0, 1), (2,)), kinds=("fast", "slow"))
    assert sorted(map(len, placed(OWN.allocate(problem)).values())) == [1, 1, 1]


@pytest.mark.parametrize("devices", [(), (0, 2)])
def test_who_needs_several_types_or_has_them_comes_first(devices):
    rates = {"a": (20.0, 40.0, 60.0), "b": (10.0, 20.0, 30.0), SEVERAL: (15.0, 30.0, 45.0)}
    large = trial(1, rates, at=SEVERAL if devices else "a", devices=devices, min_devices=3)
    kept = replace(large, min_devices=2 if devices else 3)
    problem = problem_of(kept, trial(0, rates), nodes=((0, 1), (2,)), kinds=("a", "b"))
    found = placed(OWN.allocate(problem))
    assert found[1] == (set(devices) or {0, 1, 2})
    assert (0 in found) is bool(devices)
