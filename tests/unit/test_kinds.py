"""The controller on a fleet of two device types, and a simulated sweep on one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from optuna_fleet.alloc import GreedyAllocator
from optuna_fleet.events import Allocate, Ending, Launch
from optuna_fleet.policies import POLICIES
from optuna_fleet.replay.progress import Outcome
from optuna_fleet.replay.scenarios import EnsembleScenario, lower_bound_s
from optuna_fleet.replay.workload import SimulatedTrial
from optuna_fleet.resources import Device
from tests.unit.world import World, rate, reached


def devices_of(*kinds: str) -> list[Device]:
    return [Device(index=i, node=0, kind=kind) for i, kind in enumerate(kinds)]


class MixedWorld(World):
    """A world with devices of several types; only trials that span types may be on two of them."""

    def __init__(self, *kinds: str, trials: int, **policy: Any) -> None:
        super().__init__(trials=trials, devices=devices_of(*kinds), **policy)
        self.allocator = GreedyAllocator()

    def _carry_out(self, instruction: Any) -> Any:
        if isinstance(instruction, Launch):
            model = self.controller._state.trials[instruction.number].model
            kinds = {self.devices[d].kind for d in instruction.devices}
            assert len(kinds) == 1 or (model is not None and model.spans_types)
        return super()._carry_out(instruction)


# -- problems and plans ---------------------------------------------------------------------------


def first_problem(world: World) -> Any:
    for run_id in list(world.runs):
        world.tell(reached(run_id, "same"))
        world.tell(rate(run_id, 100.0 * (1 + run_id)))
    (allocate,) = [i for i in world.log if isinstance(i, Allocate)]
    return allocate.problem


def test_a_problem_says_which_devices_and_rates_are_of_which_type() -> None:
    problem = first_problem(MixedWorld("v100", "a100", trials=2))
    assert (problem.nodes, problem.kinds) == (((1,), (0,)), ("a100", "v100"))
    slow, fast = (c.rates_by_kind for c in problem.candidates)
    assert slow == fast
    assert {kind: rates[0] for kind, rates in slow.items()} == {"v100": 100.0, "a100": 200.0}
    assert [c.rates for c in problem.candidates] == [slow["v100"], slow["a100"]]


def test_a_trial_without_devices_has_the_rates_of_the_fastest_type() -> None:
    world = MixedWorld("v100", "a100", trials=3, lookahead=1)
    world.settle_all()
    world.end(0)
    world.settle_all()
    problems = [i.problem for i in world.log if isinstance(i, Allocate)]
    for candidate in [c for p in problems for c in p.candidates if not c.devices]:
        assert candidate.rates == max(candidate.rates_by_kind.values())


def test_with_one_type_a_problem_knows_no_types() -> None:
    problem = first_problem(World(num_devices=2, trials=2))
    assert problem.kinds == ()
    assert all(c.rates_by_kind == {} for c in problem.candidates)


def test_who_needs_several_types_gets_them_when_the_others_have_ended() -> None:
    world = MixedWorld("v100", "v100", "a100", trials=3)
    world.tell(reached(0, "large", min_devices=3, spans_types=True))
    world.end(0, Ending.YIELDED)  # nothing is trained on fewer
    for run_id in (1, 2):
        world.tell(reached(run_id, "small"))
        world.tell(rate(run_id, 100.0))
    world.decide_all()
    assert [launch.number for launch in world.runs.values()] == [1, 2]
    world.end(1)
    world.end(2)
    world.decide_all()
    (launch,) = world.runs.values()
    assert (launch.number, sorted(launch.devices)) == (0, [0, 1, 2])
    assert launch.measure


@pytest.mark.parametrize(
    ("kinds", "waits"), [(("v100", "a100"), True), (("v100", "a100", "a100"), False)]
)
def test_who_needs_more_than_there_are_of_all_types_waits_for_more(
    kinds: tuple[str, ...], waits: bool
) -> None:
    world = MixedWorld(*kinds, trials=1, more_may_join=True)
    world.tell(reached(0, "large", min_devices=3, spans_types=True))
    world.end(0, Ending.YIELDED)
    world.decide_all()
    assert bool(world.runs) != waits


# -- simulated sweeps -----------------------------------------------------------------------------


def trial(name: str, slow: float, fast: float, *, epochs: int = 10, **more: Any) -> SimulatedTrial:
    rates = {k: tuple(r * m**0.9 for m in (1, 2)) for k, r in (("v", slow), ("a", fast))}
    return SimulatedTrial(
        name=name,
        rates=rates["a"],
        rates_by_kind=rates,
        epochs=epochs,
        samples_per_epoch=100.0,
        **more,
    )


def simulated(trials: list[SimulatedTrial], **num_devices: int) -> Outcome:
    return EnsembleScenario(trials=trials, num_devices=num_devices).run()


def test_a_simulated_trial_has_the_rate_of_the_type_it_flies_on() -> None:
    assert simulated([trial("x", 10.0, 50.0)], v=1).end_s == pytest.approx(100.0)
    assert simulated([trial("x", 10.0, 50.0)], a=1).end_s == pytest.approx(20.0)
    assert simulated([trial("x", 10.0, 50.0)], v=1, a=1).end_s == pytest.approx(20.0)


def test_the_fast_device_goes_to_the_one_it_suits_and_then_to_the_other() -> None:
    trials = [
        trial("x", 10.0, 50.0, epochs=9, max_epochs=9),
        trial("y", 10.0, 20.0, epochs=5, max_epochs=5, rescale_up_s=3.0),
    ]
    outcome = simulated(trials, v=1, a=1)
    # Device a is free after 18 s; after 20 s y has trained two epochs on v and can move. That
    # costs 3 s, and the rest takes 15 s.
    assert outcome.end_s == pytest.approx(20.0 + 3.0 + 15.0)
    assert outcome.trials[1].rescales == 1
    assert outcome.trials[1].rescale_samples == pytest.approx(60.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_in_every_policy_trials_that_need_several_types_come_to_their_turn(policy: str) -> None:
    rates = {k: tuple(r * m**0.9 for m in (1, 2, 3)) for k, r in (("v", 10.0), ("a", 20.0))}
    large = SimulatedTrial(
        name="large",
        rates=rates["a"],
        rates_by_kind=rates,
        epochs=3,
        samples_per_epoch=100.0,
        min_devices=3,
        spans_types=True,
    )
    small = [trial(f"t{k}", 10.0, 20.0 + k, epochs=2 + k) for k in range(4)]
    trials = [*small[:2], large, *small[2:], large]
    run = EnsembleScenario(trials=trials, num_devices={"v": 2, "a": 1}, policy=policy, lookahead=0)
    outcome = run.run()
    assert all(p.ended_s is not None for p in outcome.trials.values())
    assert outcome.end_s >= lower_bound_s(trials, {"v": 2, "a": 1})
    widths = {span.number: len(span.devices) for span in outcome.spans}
    assert [widths[number] for number in (2, 5)] == [3, 3]
    rate = large.rate_on({"v": 2, "a": 1})
    assert rate == pytest.approx((2 * 10.0 + 20.0) * 3**0.9 / 3)


def test_a_trial_that_spans_types_is_faster_for_it_and_bounded_by_all_devices() -> None:
    rates = {k: tuple(r * m for m in (1, 2, 3)) for k, r in (("v", 10.0), ("a", 20.0))}
    alone = SimulatedTrial(
        name="x", rates=rates["a"], rates_by_kind=rates, epochs=30, samples_per_epoch=40.0
    )
    spans = replace(alone, spans_types=True)
    assert simulated([alone], v=2, a=1).end_s == pytest.approx(60.0)
    assert simulated([spans], v=2, a=1).end_s < 33.0  # it starts on one
    assert lower_bound_s([spans], {"v": 2, "a": 1}) == pytest.approx(30.0, rel=1e-4)
