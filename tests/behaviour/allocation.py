"""Who is to have which devices: problems, plans and simulated sweeps, by public names only."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from optuna_fleet.alloc import (
    SEVERAL,
    AllocationProblem,
    Candidate,
    Plan,
    RateProfile,
    validate,
)
from optuna_fleet.policies import POLICIES, Elastic, Policy, policy_of
from optuna_fleet.replay.progress import Outcome
from optuna_fleet.replay.scenarios import EnsembleScenario
from optuna_fleet.replay.workload import SimulatedTrial


def epochs_per_s(candidate: Candidate, m: int) -> float:
    """An objective of a user's own."""
    return candidate.rate(m) / candidate.samples_per_epoch


THROUGHPUT = Elastic(objective="throughput")
EFFICIENCY = Elastic(objective="scaling-efficiency")
ALL_POLICIES: dict[str, Policy] = {
    **{name: policy_of(name) for name in POLICIES},
    "throughput": THROUGHPUT,
    "scaling-efficiency": EFFICIENCY,
    "an objective of the user's": Elastic(objective=epochs_per_s),
}

LINEAR = tuple(10.0 * m for m in range(1, 9))


def asked(policy: str | Policy, problem: AllocationProblem, *, seed: int = 7) -> Plan:
    """The policy's plan, which is one that can be flown."""
    plan = policy_of(policy).new_allocator(seed).allocate(problem)
    validate(problem, plan)
    return plan


def trial(number: int, rates: Any = LINEAR, devices: tuple[int, ...] = (), **more: Any) -> Any:
    """A candidate; of rates by device type it has those of the type it flies on, or any."""
    if isinstance(rates, dict):
        rates = {kind: tuple(r) for kind, r in rates.items()}
        own = rates[more.pop("at", next(iter(rates)))]
        return Candidate(number=number, rates=own, rates_by_kind=rates, devices=devices, **more)
    return Candidate(number=number, rates=tuple(rates), devices=devices, **more)


def problem_of(*trials: Candidate, nodes: Any = ((0, 1, 2, 3),), **more: Any) -> AllocationProblem:
    more = {"rate_spread": math.inf, "time_limit_s": 20.0, **more}
    return AllocationProblem(candidates=trials, nodes=nodes, **more)


def widths(plan: Plan) -> dict[int, int]:
    return {number: len(a.devices) for number, a in sorted(plan.assignments.items())}


def placed(plan: Plan) -> dict[int, set[int]]:
    return {number: set(a.devices) for number, a in sorted(plan.assignments.items())}


def flown(problem: AllocationProblem, plan: Plan) -> AllocationProblem:
    """The same problem, once the plan is flown."""

    def now(candidate: Candidate) -> Candidate:
        assignment = plan.assignments.get(candidate.number)
        devices = assignment.devices if assignment else ()
        kind = problem.kind_of(devices)
        rates = candidate.rates_on(kind) if kind else candidate.rates
        return replace(candidate, devices=devices, rates=rates)

    return replace(problem, candidates=tuple(map(now, problem.candidates)))


# -- problems at random --


@st.composite
def nodes_strategy(draw: Any, max_devices: int) -> tuple[tuple[int, ...], ...]:
    sizes = draw(st.lists(st.sampled_from([4, 3, 2, 1, 0]), min_size=2, max_size=4))
    total = min(sum(sizes), max_devices)
    indices = iter(draw(st.permutations(range(total + 3)))[:total])
    return tuple(tuple(itertools.islice(indices, size)) for size in sizes)


@st.composite
def rate_curves(draw: Any, max_devices: int) -> tuple[float, ...]:
    if draw(st.booleans()):  # anything goes
        rates = draw(st.lists(st.integers(10, 400), min_size=1, max_size=max_devices))
        return tuple(map(float, rates))
    profile = RateProfile(structure="s", measured={1: float(draw(st.integers(10, 400)))})
    return profile.rates(max_devices, draw(st.floats(0.7, 1.0)))


@st.composite
def problems(
    draw: Any, max_candidates: int = 6, max_devices: int = 10, pinning: bool = True
) -> AllocationProblem:
    nodes = draw(nodes_strategy(max_devices))
    free = [device for node in nodes for device in node]
    candidates = []
    for number in draw(
        st.lists(st.integers(0, 40), min_size=2, max_size=max_candidates, unique=True)
    ):
        rates = draw(rate_curves(max_devices))
        min_devices = draw(st.integers(1, min(2, len(rates))))
        flying = draw(st.integers(0, min(3, len(rates), len(free))))  # maybe too few, or too many
        candidates.append(
            Candidate(
                number=number,
                rates=rates,
                devices=tuple(free.pop() for _ in range(flying)),
                min_devices=min_devices,
                max_devices=draw(st.none() | st.integers(min_devices, 8)),
                waited_rounds=draw(st.integers(0, 3)),
                epochs_done=draw(st.integers(0, 2)),
                movable=not (pinning and flying and draw(st.booleans())),
                is_within_epoch=flying > 0 and draw(st.booleans()),
                rescale_up_s=draw(st.sampled_from([0.0, 1.0, 50.0])),
                samples_per_epoch=draw(st.sampled_from([1.0, 1000.0])),
            )
        )
    spread = draw(st.sampled_from([1.0, 1.3, 2.0, 8.0, math.inf]))
    return AllocationProblem(
        candidates=tuple(candidates), nodes=nodes, rate_spread=spread, time_limit_s=20.0
    )


@st.composite
def ruled_problems(draw: Any, **limits: Any) -> AllocationProblem:
    """Problems with phases, a capacity that binds or is too small, and lost devices."""
    problem = draw(problems(**limits))
    lost = draw(st.sets(st.sampled_from(problem.devices), max_size=2)) if problem.devices else ()
    return replace(
        problem,
        nodes=tuple(tuple(d for d in node if d not in lost) for node in problem.nodes),
        phases=draw(st.booleans()),
        preprocess_samples_per_s=draw(st.none() | st.integers(5, 900).map(float)),
    )


@st.composite
def mixed_problems(draw: Any, **limits: Any) -> AllocationProblem:
    """Problems whose nodes are of up to three types; some trials can fly on several at once."""
    problem = draw(ruled_problems(**limits))
    kinds = tuple(draw(st.sampled_from("abc")) for _ in problem.nodes)
    kind_of = {d: k for k, node in zip(kinds, problem.nodes, strict=True) for d in node}
    costs = st.sampled_from([0.0, 1.0, 50.0])
    candidates = []
    for c in problem.candidates:
        factors = {k: draw(st.sampled_from([0.5, 1.0, 3.0])) for k in "abc"}
        rates = {k: tuple(f * r for r in c.rates) for k, f in factors.items()}
        here = [kind_of[d] for d in c.devices if d in kind_of]
        least, devices = c.min_devices, c.devices
        if draw(st.booleans()):
            rates[SEVERAL] = tuple(1.5 * r for r in c.rates)
            least = draw(st.integers(least, c.widest))
            devices = devices if len(devices) >= least else ()
        else:
            devices = tuple(d for d in devices if kind_of.get(d) in (None, *here[:1]))
        now = {kind_of[d] for d in devices if d in kind_of}
        candidates.append(
            replace(
                c,
                rates=rates[SEVERAL if len(now) > 1 else min(now, default="a")],
                rates_by_kind=rates,
                devices=devices,
                min_devices=least,
                movable=c.movable or not devices,
                rescale_up_s=draw(costs),
                rescale_down_s=draw(costs),
            )
        )
    return replace(problem, candidates=tuple(candidates), kinds=kinds)


# -- simulated sweeps --


def simulated(name: str, rates: Any, epochs: int = 1, **more: Any) -> SimulatedTrial:
    more = {"samples_per_epoch": 100.0, **more}
    return SimulatedTrial(name=name, rates=tuple(rates), epochs=epochs, **more)


def sweep(policy: str | Policy, trials: Any, devices: Any, **more: Any) -> Outcome:
    named: Any = policy  # `simulate` takes a name or an object, as the executor does
    run = EnsembleScenario(trials=trials, num_devices=devices, policy=named, **more)
    return run.run()


def starts(outcome: Outcome) -> list[tuple[float, dict[int, int]]]:
    """Who starts or goes on, on how many devices, at each time at which somebody does."""
    found: dict[float, dict[int, int]] = {}
    for span in outcome.spans:
        if span.end_s > span.start_s:
            found.setdefault(span.start_s, {})[span.number] = len(span.devices)
    return [(time_s, dict(sorted(found[time_s].items()))) for time_s in sorted(found)]
