"""The controller alone: events in, instructions out, no process."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_fleet.alloc import RateProfile
from optuna_fleet.events import (
    Abort,
    Allocate,
    CheckpointSaved,
    DeviceGone,
    DeviceLost,
    Ending,
    EpochDecision,
    FinishTrial,
    Interrupt,
    Launch,
    MoveMeasured,
    MoveRefused,
    ProposalDelayed,
    Propose,
    RankEnded,
    Requeue,
    StartRound,
    TrialProposed,
)
from optuna_fleet.executor.deciding.controller import Controller
from optuna_fleet.executor.deciding.state import PARADIGMS, PolicyRules, Run
from tests.unit.world import (
    World,
    epoch_ended,
    goes_on,
    joined,
    launches,
    plan_of,
    rate,
    reached,
    yields,
)


def test_the_first_round_waits_for_all_rates() -> None:
    world = World(num_devices=2, trials=2)
    for run_id in (0, 1):
        world.tell(reached(run_id, f"s{run_id}"))
    assert world.tell(rate(0, 10.0)) == []
    (allocate,) = world.tell(rate(1, 20.0))
    assert [c.rates[0] for c in allocate.problem.candidates] == [10.0, 20.0]
    assert [c.devices for c in allocate.problem.candidates] == [(0,), (1,)]


def test_a_trial_that_the_plan_moves_yields_at_its_next_epoch_and_flies_on_elsewhere() -> None:
    world = World(num_devices=2, trials=2)
    world.settle_all()
    world.end(0)  # no proposal is left: the other trial may have both devices
    instructions = world.decide()
    assert [type(i) for i in instructions] == [StartRound]
    assert world.tell(epoch_ended(1)) == [yields(1, 0, 1)]
    instructions = world.end(1, Ending.YIELDED)
    assert [type(i) for i in instructions] == [Requeue, Launch]
    assert launches(instructions) == [(1, (0, 1))]
    assert not instructions[1].probe


@pytest.mark.parametrize(
    ("moves", "expected"),
    [({}, 2.0), ({1: 30.0}, 30.0), ({1: 0.5}, 0.5), ({0: 0.5, 2: 9.0}, 4.75)],
)
def test_a_move_costs_what_the_trials_last_one_did_or_else_the_median_of_all(
    moves: dict[int, float], expected: float
) -> None:
    world = World(num_devices=4, trials=3, paradigm="elastic", rescale_s=2.0)
    world.settle_all()
    for run_id, seconds in moves.items():
        world.tell(MoveMeasured(run_id=run_id, seconds=seconds))
    world.tell(MoveMeasured(run_id=9, seconds=99.0))  # of a run that is over
    (allocate,) = world.tell(epoch_ended(1))
    candidate = allocate.problem.by_number[1]
    assert (candidate.rescale_up_s, candidate.rescale_down_s) == (expected, expected)


def test_a_trial_that_goes_on_elsewhere_asks_for_data_again_which_is_no_reason_to_decide() -> None:
    world = World(num_devices=2, trials=1, paradigm="elastic", moves_within_epochs=True)
    world.tell(reached(0, "s", movable=True), rate(0))
    world.tell(plan_of({0: (1,)}))
    world.end(0, Ending.YIELDED)
    ((run_id, launch),) = world.runs.items()
    assert launch.devices == (1,)
    assert world.tell(reached(run_id, "s", movable=True)) == []
    (allocate,) = world.tell(reached(run_id, "another", movable=True), rate(run_id))
    assert isinstance(allocate, Allocate)


@pytest.mark.parametrize(("ended", "decides"), [(1, False), (2, False), (3, True)])
def test_a_round_ends_when_fewer_than_alpha_of_its_devices_are_active(
    ended: int, decides: bool
) -> None:
    world = World(num_devices=10, trials=10, alpha=0.8)
    world.settle_all()
    before = world.controller.round
    for run_id in range(ended):
        world.end(run_id)
    assert bool(world.unanswered) is decides
    assert world.controller.round == before


def four_of_which_trial_0_gets_two() -> World:
    """Trial 0 is to have devices 0 and 1, trial 1 has to leave; 2 and 3 stay."""
    world = World(num_devices=4, trials=4)
    world.tell(*[e for run in range(4) for e in (reached(run, "s"), rate(run))])
    world.unanswered.clear()
    world.tell(plan_of({0: (0, 1), 2: (2,), 3: (3,)}))
    return world


def test_while_one_is_slow_to_leave_the_others_are_planned_for() -> None:
    world = four_of_which_trial_0_gets_two()
    assert world.tell(epoch_ended(1)) == [yields(1)]
    assert [type(i) for i in world.end(1, Ending.YIELDED)] == [Requeue]
    *_, allocate = world.end(3)
    assert [c.number for c in allocate.problem.candidates] == [1, 2]
    assert allocate.problem.devices == (2, 3)  # trial 0 has been promised 0 and 1
    assert launches(world.tell(plan_of({1: (3,), 2: (2,)}))) == [(1, (3,))]
    world.tell(epoch_ended(0))
    assert launches(world.end(0, Ending.YIELDED)) == [(0, (0, 1))]


def test_a_refused_move_costs_one_decision() -> None:
    world = four_of_which_trial_0_gets_two()
    assert world.tell(epoch_ended(0)) == [yields(0, 0, 1)]
    (allocate,) = world.tell(MoveRefused(run_id=0))
    assert [c.number for c in allocate.problem.candidates] == [1, 2, 3]
    assert allocate.problem.devices == (1, 2, 3)
    for run_id in range(4):  # trial 1 need not leave any more, and nobody asks trial 0 again
        assert world.tell(epoch_ended(run_id)) == [goes_on(run_id)]
    assert [type(i) for i in world.tell(plan_of({1: (1,), 2: (2,), 3: (3,)}))] == [StartRound]
    assert world.tell(MoveRefused(run_id=0)) == []


def test_the_local_paradigm_refills_but_never_moves() -> None:
    world = World(num_devices=2, trials=4, paradigm="local")
    world.settle_all()
    assert launches(world.end(0)) == [(2, (0,))]
    world.settle_all()
    assert launches(world.end(1)) == [(3, (1,))]
    world.settle_all()
    world.end(2)
    assert not world.unanswered
    assert world.tell(epoch_ended(3)) == [goes_on(3)]


def test_a_rate_far_below_the_plan_makes_a_new_one() -> None:
    world = World(num_devices=2, trials=1)
    world.settle_all()
    world.tell(epoch_ended(0))
    world.end(0, Ending.YIELDED)
    (run_id,) = world.runs
    assert world.runs[run_id].devices == (0, 1)
    world.tell(reached(run_id, "s0"))
    (allocate,) = world.tell(rate(run_id, 60.0))
    assert allocate.problem.candidates[0].rates == (100.0, 60.0)
    world.decide()
    (answer,) = world.tell(epoch_ended(run_id))
    assert answer.decision is EpochDecision.YIELD


def test_a_trial_goes_on_where_its_last_checkpoint_is() -> None:
    world = World(num_devices=1, trials=1)
    assert world.runs[0].checkpoint is None
    world.lose(0)
    ((run_id, launch),) = world.runs.items()
    assert launch.checkpoint is None
    world.settle_all()
    for epoch in (1, 2, 3):
        if epoch < 3:
            world.tell(CheckpointSaved(run_id=run_id, epoch=epoch, location=f"after {epoch}"))
        world.tell(epoch_ended(run_id, epochs_done=epoch))
    world.lose(run_id)
    world.tell(CheckpointSaved(run_id=run_id, epoch=9, location="too late"))
    (allocate,) = world.unanswered
    assert allocate.problem.by_number[0].epochs_done == 2
    world.decide()
    (launch,) = world.runs.values()
    assert launch.checkpoint == "after 2"


def test_an_error_on_one_rank_is_the_trials_error_although_its_peer_had_to_be_killed() -> None:
    world = World(num_devices=2, trials=1)
    world.settle_all()
    world.tell(epoch_ended(0))
    world.end(0, Ending.YIELDED)
    (run_id,) = world.runs
    (cut,) = world.tell(RankEnded(run_id=run_id, device=1, ending=Ending.RAISED))
    assert cut == Abort(run_id=run_id, devices=(0,), lost=False)
    assert FinishTrial(number=0, run_id=run_id) in world.tell(DeviceLost(device=0, by_order=True))


def test_a_kill_that_came_late_does_not_fail_the_next_trial_there() -> None:
    world = World(num_devices=1, trials=2)
    world.end(0)
    (run_id,) = world.runs
    assert Requeue(number=1, run_id=run_id) in world.tell(DeviceLost(device=0, by_order=True))


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_who_needs_more_devices_than_are_left_is_launched_to_say_so(paradigm: Any) -> None:
    """Else it would wait for ever."""
    world = World(num_devices=2, trials=1, paradigm=paradigm)
    world.tell(reached(0, "a", min_devices=2), DeviceLost(device=1))
    world.end(0, Ending.YIELDED)
    world.decide()
    assert not world.runs
    world.tell(DeviceGone(device=1))
    world.tell(DeviceGone(device=1))  # no news
    world.decide()
    (run,) = world.runs.values()
    assert (run.devices, world.unanswered) == ((0,), [])


def test_known_profiles_spare_the_measurement() -> None:
    profiles = {"s on cpu": RateProfile(structure="s", measured={1: 5.0}, kind="cpu")}
    controller = Controller(PolicyRules(), profiles=profiles)
    controller.handle(joined(0))
    controller.handle(TrialProposed(number=0))
    instructions = controller.handle(reached(0, "s"))
    assert [type(i) for i in instructions] == [Allocate]


@pytest.mark.parametrize("movable", [True, False])
def test_only_trials_that_say_so_move_within_an_epoch(movable: bool) -> None:
    world = World(2, 1, paradigm="elastic", moves_within_epochs=True)
    (run_id,) = world.runs
    world.tell(reached(run_id, "s", movable=movable), rate(run_id))
    if not movable:
        assert not world.unanswered
        world.tell(epoch_ended(run_id))
    told = world.tell(plan_of({0: (0, 1)}))
    assert (Interrupt(run_id=run_id, devices=(0, 1)) in told) is movable
    assert (yields(run_id, 0, 1) in told) is not movable


def problem_at_the_first_epochs_end(*, told: int, delayed: bool = False, **policy: Any) -> Any:
    """The problem of two trials on two of four devices, told how many trials are to come."""
    controller = Controller(PolicyRules(paradigm="elastic", **policy))
    for k in (2, 3):  # whose trainers are to come again
        assert controller.handle(joined(k), DeviceLost(device=k)) == []
    for k in range(2):
        assert controller.handle(joined(k)) == [Propose()]
        (launch,) = controller.handle(TrialProposed(number=k, num_to_come=told - k))
        assert isinstance(launch, Launch)
        controller.handle(reached(k, f"s{k}"), rate(k))
    if delayed:
        controller.handle(joined(2))
        controller.handle(ProposalDelayed())
    (asked,) = controller.handle(epoch_ended(0), epoch_ended(1))  # one alone has no choice
    assert isinstance(asked, Allocate)
    return asked.problem


def test_trials_to_come_want_no_devices_that_max_trials_keeps_from_them() -> None:
    assert problem_at_the_first_epochs_end(told=7, max_trials=2).num_to_come == 0
    assert problem_at_the_first_epochs_end(told=7, max_trials=3).num_to_come == 1
    assert problem_at_the_first_epochs_end(told=7, max_trials=4).num_to_come == 6


# -- what is derived ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endings", "is_lost", "surviving"),
    [
        ("returned returned", False, (0, 1)),
        ("lost", True, (1,)),
        ("aborted", True, (0, 1)),
        ("raised killed", False, (0,)),  # because of the error, and no restart is counted
        ("disconnected", False, (0, 1)),  # it may turn out why
        ("disconnected raised", False, (0, 1)),
        ("disconnected disconnected", True, (0, 1)),
        ("disconnected killed", True, (0,)),
    ],
)
def test_whether_a_run_was_lost_and_what_is_left_of_its_devices(
    endings: str, is_lost: bool, surviving: tuple[int, ...]
) -> None:
    run = Run(run_id=0, number=0, devices=(0, 1), measured=True)
    run.endings.update(enumerate(map(Ending, endings.split())))
    assert (run.is_lost, run.surviving) == (is_lost, surviving)
    assert run.remaining == run.devices[len(run.endings) :]
