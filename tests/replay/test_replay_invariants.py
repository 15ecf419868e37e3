"""What must hold of every simulation, whatever the policy, the trials and the fleet."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import (
    Checked,
    all_join,
    check_all_ended,
    check_spans,
    comparable,
    simulate,
    trial,
)

from optuna_fleet.alloc import ElasticAllocator, EqualSplitAllocator, RateProfile
from optuna_fleet.policies import POLICIES
from optuna_fleet.replay.scenarios import EnsembleScenario, lower_bound_s
from optuna_fleet.replay.workload import FleetChange, Rules

NUM_DEVICES = 5


@st.composite
def rate_curves(draw):
    if draw(st.booleans()):
        return [float(r) for r in draw(st.lists(st.integers(5, 200), min_size=5, max_size=5))]
    profile = RateProfile(structure="s", measured={1: float(draw(st.integers(5, 200)))})
    return profile.rates(NUM_DEVICES, draw(st.floats(0.6, 1.0)))


@st.composite
def ensembles(draw):
    curves = draw(st.lists(rate_curves(), min_size=1, max_size=3))
    kinds = st.sampled_from(list(enumerate(curves)))
    costs = st.sampled_from([0.0, 1.0, 34.0])
    trials = []
    for _ in range(draw(st.integers(1, 7))):
        k, rates = draw(kinds)
        trials.append(
            trial(
                f"kind {k}",
                rates,
                epochs=draw(st.integers(1, 9)),
                samples_per_epoch=draw(st.sampled_from([100.0, 3000.0])),
                submit_s=draw(st.sampled_from([0.0, 0.0, 7.0, 90.0])),
                min_devices=draw(st.integers(1, 3)),
                rescale_up_s=draw(costs),
                rescale_down_s=draw(costs),
            )
        )
    return sorted(trials, key=lambda trial: trial.submit_s)


@st.composite
def fleet_changes(draw):
    """Devices come and go; in the end all are there."""
    changes, here = [all_join(NUM_DEVICES)], set(range(NUM_DEVICES))
    devices = st.sets(st.integers(0, NUM_DEVICES - 1), min_size=1)
    for flipped in [*draw(st.lists(devices, max_size=8)), None]:
        flipped = set(range(NUM_DEVICES)) - here if flipped is None else flipped
        time_s = changes[-1].time_s + draw(st.sampled_from([0.5, 7.0, 60.0, 400.0]))
        left, joined = tuple(sorted(flipped & here)), tuple(sorted(flipped - here))
        changes.append(FleetChange(time_s=time_s, joined=joined, left=left))
        here ^= flipped
    return changes


def allocator_of(policy):
    return Checked(POLICIES[policy]().new_allocator(3))


@pytest.mark.parametrize("policy", list(POLICIES))
@settings(max_examples=10)
@given(
    trials=ensembles(),
    changes=fleet_changes(),
    within_epochs=st.booleans(),
    cost=st.sampled_from(["stall", "old rate"]),
    noise=st.sampled_from([0.0, 0.5]),
    max_trials=st.sampled_from([None, 2]),
    made_per_s=st.sampled_from([None, 5.0, 60.0]),
)
def test_every_trial_ends_and_nothing_is_in_two_places(
    policy, trials, changes, within_epochs, cost, noise, max_trials, made_per_s
):
    rules = Rules(
        coupled=POLICIES[policy].is_coupled, cost=cost, preprocess_samples_per_s=made_per_s
    )
    outcome = simulate(
        trials,
        changes,
        allocator_of(policy),
        num_devices=NUM_DEVICES,
        noise=noise,
        policy=policy,
        rate_spread=None,
        rules=rules,
        moves_within_epochs=within_epochs,
        max_trials=max_trials,
    )
    check_spans(outcome, changes)
    check_all_ended(outcome, trials)
    assert outcome.end_s >= lower_bound_s(trials, NUM_DEVICES) * (1 - 1e-9)
    if max_trials:
        check_at_once(outcome, max_trials)


def check_at_once(outcome, most):
    steps = [(p.begun_s, 1) for p in outcome.trials.values()]
    steps += [(p.ended_s, -1) for p in outcome.trials.values()]
    assert max(itertools.accumulate(step for _, step in sorted(steps))) <= most


@pytest.mark.parametrize(
    "allocator",
    [
        ElasticAllocator(objective="scaling-efficiency"),
        EqualSplitAllocator(published=True),
    ],
    ids=repr,
)
@settings(max_examples=10)
@given(trials=ensembles(), changes=fleet_changes(), seen_at=st.sampled_from(["completions", ""]))
def test_so_it_is_with_bftrainers_rules(allocator, trials, changes, seen_at):
    ticks = (FleetChange(time_s=changes[-1].time_s + 500.0 * k) for k in itertools.count(1))
    outcome = simulate(
        trials,
        itertools.chain(changes, ticks),
        Checked(allocator),
        num_devices=NUM_DEVICES,
        rules=Rules(cost="old rate", seen_at=seen_at or "nodes-only"),
        moves_within_epochs=True,
    )
    check_spans(outcome, changes)
    if seen_at:
        check_all_ended(outcome, trials)
    assert all(p.samples == p.trial.work for p in outcome.trials.values())


@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_same_seed_gives_the_same_outcome(policy):
    trials = [trial(f"{k}", [9.0 + k, 16.0 + k, 22.0], epochs=k % 4 + 1) for k in range(7)]
    runs = [
        EnsembleScenario(trials=trials, num_devices=3, policy=policy, seed=seed, noise=0.2)
        for seed in (5, 5, 6)
    ]
    first, again, other = [comparable(run.run()) for run in runs]
    assert first == again
    assert policy == "equal-split" or first != other
