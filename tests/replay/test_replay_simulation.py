"""Worked examples of the simulation, by hand."""

import pytest
from replay_cases import (
    Scripted,
    all_join,
    check_all_ended,
    simulate,
    spans_of,
    trial,
)

from optuna_fleet.alloc import ElasticAllocator, SingleDeviceAllocator
from optuna_fleet.policies import POLICIES
from optuna_fleet.replay.scenarios import EnsembleScenario, common_report, utilisation
from optuna_fleet.replay.workload import FleetChange, Rules

COST = {"rescale_up_s": 5.0, "rescale_down_s": 3.0}


def widening(time_s=10.0):
    """One device, and another that joins."""
    return [FleetChange(time_s=0.0, joined=(0,)), FleetChange(time_s=time_s, joined=(1,))]


def narrowing(time_s=10.0):
    """Two devices, of which the second leaves."""
    return [all_join(2), FleetChange(time_s=time_s, left=(1,))]


def test_a_trial_trains_at_its_rate():
    outcome = simulate([trial(epochs=3)], [all_join(2)], Scripted({0: (0, 1)}))
    assert spans_of(outcome) == [(0, (0, 1), 0.0, 15.0)]
    assert outcome.end_s == outcome.trials[0].ended_s == 15.0
    assert outcome.trials[0].rescales == 0


@pytest.mark.parametrize(
    ("cost", "end_s", "samples"),
    [
        ("stall", 10 + (200 + 5 * 20) / 20, 100.0),  # five seconds at the new rate
        ("old rate", 10 + (200 + 5 * 10) / 20, 50.0),  # five seconds at the rate before
    ],
)
def test_what_growing_costs(cost, end_s, samples):
    outcome = simulate(
        [trial(epochs=3, **COST)],
        widening(),
        Scripted({0: (0,)}, {0: (0, 1)}),
        rules=Rules(cost=cost),
        moves_within_epochs=True,
    )
    assert outcome.end_s == pytest.approx(end_s)
    assert (outcome.trials[0].rescales, outcome.trials[0].rescale_samples) == (1, samples)


@pytest.mark.parametrize(
    ("cost", "end_s", "rescaled", "preempted"),
    [
        ("stall", 10 + (100 + 3 * 10) / 10, 30.0, 0.0),
        ("old rate", 10 + (100 + 3 * 20) / 10, 0.0, 60.0),
    ],
)
def test_what_a_loss_costs_and_that_the_trial_goes_on_with_the_rest(
    cost, end_s, rescaled, preempted
):
    outcome = simulate(
        [trial(epochs=3, **COST)],
        narrowing(),
        ElasticAllocator(objective="throughput"),
        rules=Rules(cost=cost),
        moves_within_epochs=True,
    )
    assert spans_of(outcome) == [(0, (0, 1), 0.0, 10.0), (0, (0,), 10.0, pytest.approx(end_s))]
    progress = outcome.trials[0]
    assert (progress.rescale_samples, progress.preempt_samples) == (rescaled, preempted)


@pytest.mark.parametrize(("cost", "end_s"), [("stall", 30 + 25.0), ("old rate", 30 + 20 + 3.0)])
def test_what_waiting_for_a_device_costs(cost, end_s):
    changes = [
        FleetChange(time_s=0.0, joined=(0,)),
        FleetChange(time_s=10.0, left=(0,)),
        FleetChange(time_s=30.0, joined=(0,)),
    ]
    outcome = simulate(
        [trial(epochs=3, **COST)], changes, Scripted({0: (0,)}), rules=Rules(cost=cost)
    )
    assert outcome.end_s == end_s


def test_who_shares_a_ring_waits_for_the_slowest():
    trials = [trial("fast", [20.0], epochs=3), trial("slow", [10.0], epochs=2)]
    plan = {0: (0,), 1: (1,)}
    free = simulate(trials, [all_join(2)], Scripted(plan, together=True))
    assert [free.trials[n].ended_s for n in (0, 1)] == [15.0, 20.0]
    coupled = simulate(
        trials, [all_join(2)], Scripted(plan, together=True), rules=Rules(coupled=True)
    )
    # 200 samples at 10/s, until the slow one has ended; the last 100 at 20/s.
    assert [coupled.trials[n].ended_s for n in (0, 1)] == [25.0, 20.0]
    assert coupled.waited_s == pytest.approx(10.0)
    assert common_report(coupled)["waiting_s"] == pytest.approx(5.0)  # per device
    apart = simulate(trials, [all_join(2)], Scripted(plan), rules=Rules(coupled=True))
    assert [apart.trials[n].ended_s for n in (0, 1)] == [15.0, 20.0]


@pytest.mark.parametrize(("seen_at", "begun_s"), [("completions", 10.0), ("nodes-only", 15.0)])
def test_the_device_of_an_ended_trial_idles_until_that_is_seen(seen_at, begun_s):
    trials = [trial("a", [10.0]), trial("b", [5.0]), trial("c", [20.0])]
    changes = [all_join(2), *(FleetChange(time_s=t) for t in (15.0, 25.0))]
    outcome = simulate(
        trials, changes, Scripted({0: (0,), 1: (1,)}, {2: (0,)}), rules=Rules(seen_at=seen_at)
    )
    assert [outcome.trials[n].ended_s for n in range(3)] == [10.0, 20.0, begun_s + 5.0]
    assert outcome.trials[2].begun_s == begun_s


def test_trials_start_no_sooner_than_they_are_submitted():
    trials = [trial(), trial(submit_s=3.0), trial(submit_s=70.0)]
    run = EnsembleScenario(trials=trials, num_devices=2, policy="baseline")
    assert [p.begun_s for p in run.run().trials.values()] == [0.0, 3.0, 70.0]


def test_without_devices_a_simulation_says_that_trials_are_left():
    with pytest.raises(RuntimeError, match="Trials are left"):
        simulate([trial()], [all_join(1), FleetChange(time_s=5.0, left=(0,))], Scripted({0: (0,)}))


def test_a_simulation_that_is_stopped_counts_what_was_trained():
    outcome = simulate([trial(epochs=100)], [all_join(2)], Scripted({0: (0,)}), until_s=25.0)
    progress = outcome.trials[0]
    assert (outcome.end_s, progress.ended_s, progress.samples) == (25.0, None, 250.0)
    assert common_report(outcome)["idle_s"] == 12.5
    assert utilisation([progress], 2.0, 1, 25.0) == pytest.approx(0.5)


@pytest.mark.parametrize(("num_devices", "num_plans"), [(2, 3), (1, 1)])
def test_a_trial_waits_at_the_end_of_its_epochs_for_a_plan_that_may_move_it(
    num_devices, num_plans
):
    one, devices = [trial(rates=[10.0], epochs=3)], [all_join(num_devices)]
    rules = Rules(decision_s=1.0)
    outcome = simulate(one, devices, ElasticAllocator(), num_devices=num_devices, rules=rules)
    assert outcome.end_s == 30.0 + num_plans  # before its start, and after two epochs


@pytest.mark.parametrize(("own", "end_s"), [(None, 200 / 8), (1, 200 / 4)])
def test_trials_advance_no_faster_than_their_data_are_made(own, end_s):
    """All share what eight samples per second are; or each of two devices has half of it."""
    outcome = simulate(
        [trial(epochs=2), trial(epochs=2)],
        [all_join(2)],
        SingleDeviceAllocator(),
        num_devices=2,
        policy="baseline",
        rules=Rules(preprocess_samples_per_s=8.0),
        own_preprocessors=own,
    )
    assert [p.ended_s for p in outcome.trials.values()] == [pytest.approx(end_s)] * 2
    assert outcome.waited_s == pytest.approx(2 * (end_s - 20))


def widths_of(outcome):
    return [len(devices) for _, devices, _, _ in spans_of(outcome)]


@pytest.mark.parametrize("policy", ["elastic", "greedy", "mip", "fleet-g", "equal-split"])
def test_nobody_is_widened_who_waits_for_data(policy):
    """What was measured keeps a trial where it is as a device joins, unless one is told more."""

    def simulated(rules, changes=None, **more):
        allocator = POLICIES[policy]().new_allocator(0)
        trials = [trial(epochs=8, max_epochs=8)]
        changes = changes or widening(30.0)
        return simulate(trials, changes, allocator, policy=policy, rules=rules, **more)

    slow = Rules(preprocess_samples_per_s=8.0)
    assert widths_of(simulated(Rules())) == [1, 2]
    limited = simulated(slow)
    assert widths_of(limited) == [1]
    assert limited.end_s == pytest.approx(800 / 8)  # no sooner with two devices
    assert widths_of(simulated(slow, preprocess_samples_per_s=100.0)) == [1, 2]
    assert widths_of(simulated(slow, [all_join(2)])) == [2]  # nor is anything taken from it


@pytest.mark.parametrize("policy", list(POLICIES))
def test_what_was_measured_keeps_nobody_from_flying(policy):
    """However slow the preprocessors, and unlike the rates: all begin when they would anyway."""
    trials = [trial(f"{k}", [3.0**k], epochs=1 + k % 3) for k in range(8)]

    def simulated(**more):
        rules, allocator = Rules(preprocess_samples_per_s=0.5), POLICIES[policy]().new_allocator(0)
        more["rate_spread"] = 2.0
        return simulate(trials, [all_join(4)], allocator, policy=policy, rules=rules, **more)

    unmeasured = simulated(looks_ahead=False)
    check_all_ended(unmeasured, trials)
    assert spans_of(simulated()) == spans_of(unmeasured)


# -- pre-flight checks: a unit of work, as in a real sweep -----------------------------------


def widened(*, traits=frozenset({"net"}), check_s=7.0):
    """A trial on one of two devices, which would be given both from the start."""
    allocator = ElasticAllocator(objective="throughput")
    trials = [trial(epochs=20, traits=traits)]
    return simulate(trials, [all_join(2)], allocator, rules=Rules(check_s=check_s))


@pytest.mark.parametrize("check_s", [1.0, 30.0])
def test_what_is_not_checked_yet_flies_on_one_device_until_it_is(check_s):
    outcome = widened(check_s=check_s)
    assert outcome.checked == [{"net"}]
    (_, first, *_), (_, others, begun_s, _) = spans_of(outcome)
    assert (len(first), len(others)) == (1, 2)
    assert begun_s >= check_s


def test_what_asks_for_its_devices_has_them_at_once():
    outcome = widened(traits=frozenset())
    assert outcome.checked == []
    assert spans_of(outcome)[0][1] == (0, 1)
