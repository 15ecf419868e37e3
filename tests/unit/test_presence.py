"""The controller on nodes that join, leave and join again."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_fleet.alloc import GreedyAllocator
from optuna_fleet.events import (
    Allocate,
    AnswerEpoch,
    DeviceGone,
    DeviceLeaving,
    DeviceLost,
    Ending,
    EpochDecision,
    Event,
    FinishTrial,
    GiveUp,
    Interrupt,
    Launch,
    PlanDecided,
    ProposalsExhausted,
    RankEnded,
    Requeue,
    ReturnToQueue,
    TrialProposed,
)
from optuna_fleet.executor.deciding.controller import Controller
from optuna_fleet.executor.deciding.state import PolicyRules, Presence
from optuna_fleet.resources import Device
from tests.unit.world import World, epoch_ended, joined, launches, rate, reached


def device(index: int, *, node: int = 0, kind: str = "cpu") -> Device:
    return Device(index=index, node=node, kind=kind)


def node_leaves(*devices: int) -> list[Event]:
    return [DeviceGone(device=device) for device in devices]


def sweep_of(trials: int, **policy: Any) -> World:
    """Without devices yet; plans are made at once."""
    return World(trials=trials, devices=(), at_once=True, **policy)


# -- who is there ---------------------------------------------------------------------------------


def test_kinds_and_the_widest_width_follow_who_is_there() -> None:
    presence = Presence()
    assert (presence.kinds, presence.widest, len(presence)) == ((), 0, 0)
    for joins in (device(7, node=3), device(2, node=9, kind="a100"), device(5, node=9)):
        presence.join(joins)
    assert (presence.kinds, presence.widest, len(presence)) == (("a100", "cpu"), 2, 3)
    presence.join(device(5, node=9))  # the trainer's successor
    assert (presence.widest, len(presence)) == (2, 3)
    assert presence.leave(2)
    assert not presence.leave(2)
    assert (presence.kinds, len(presence), 2 in presence) == (("cpu",), 2, False)
    assert (presence[2].node, presence[2].kind) == (9, "a100")  # of runs that were there
    presence.join(device(2, node=1))  # another machine by that number
    assert (presence[2], presence.widest) == (device(2, node=1), 3)


def test_a_problem_is_about_the_devices_that_are_there_node_by_node() -> None:
    sweep = sweep_of(trials=1, paradigm="elastic")
    sweep.tell(joined(6, node=8), joined(3, node=8), joined(4, node=2), joined(9, node=2))
    sweep.tell(*node_leaves(4, 9), joined(1, node=2))
    (run_id,) = sweep.controller._state.runs
    sweep.tell(reached(run_id, "s"), rate(run_id, 10.0))
    sweep.tell(RankEnded(run_id=run_id, device=3, ending=Ending.YIELDED))
    assert sweep.problems[-1].nodes == ((1,), (3, 6))
    assert sweep.problems[-1].candidates[0].widest == 3


# -- who is lost with a node ----------------------------------------------------------------------


def two_ranks(**policy: Any) -> tuple[World, int]:
    """Trial 0 on devices 0, 1 of node 0 and device 2 of node 1."""
    sweep = sweep_of(trials=1, **policy)
    sweep.tell(joined(0), joined(1), joined(2, node=1))
    sweep.tell(reached(0, "s"), rate(0, 10.0))
    (launch,) = [
        i
        for i in sweep.tell(RankEnded(run_id=0, device=0, ending=Ending.YIELDED))
        if isinstance(i, Launch)
    ]
    assert launch.devices == (0, 1, 2)
    return sweep, launch.run_id


@pytest.mark.parametrize(
    "lost",
    [
        node_leaves(0),
        [DeviceLost(device=0, with_node=True)],
        [DeviceLost(device=0), *node_leaves(0)],
    ],
)
def test_nodes_that_leave_never_count_against_a_trial(lost: list[Event]) -> None:
    sweep = sweep_of(trials=1, max_restarts=0)
    for run_id in range(5):
        sweep.tell(joined(0))
        assert sweep.tell(*lost) == [Requeue(number=0, run_id=run_id)]
    sweep.tell(joined(0))
    assert sweep.tell(DeviceLost(device=0)) == [GiveUp(number=0, run_id=5, restarts=1)]


def test_peers_of_who_left_with_its_node_do_not_count_either() -> None:
    sweep, run_id = two_ranks(max_restarts=0)
    sweep.tell(RankEnded(run_id=run_id, device=0, ending=Ending.DISCONNECTED))
    sweep.tell(*node_leaves(2))
    instructions = sweep.tell(DeviceLost(device=1, by_order=True))
    assert Requeue(number=0, run_id=run_id) in instructions


def test_who_was_launched_and_lost_with_its_node_is_not_given_back_as_new() -> None:
    controller = Controller(PolicyRules())
    controller.handle(joined(0))
    controller.handle(TrialProposed(number=0))
    controller.handle(*node_leaves(0))
    assert controller.handle(ProposalsExhausted()) == []
    assert launches(controller.handle(joined(0))) == [(0, (0,))]
    untouched = Controller(PolicyRules(lookahead=1))
    untouched.handle()
    untouched.handle(TrialProposed(number=0))
    assert untouched.handle(ProposalsExhausted()) == [ReturnToQueue(number=0)]


# -- who needs more than there are ----------------------------------------------------------------


def wide(run_id: int, least: int) -> list[Event]:
    """The probe of a trial that needs so many devices."""
    return [
        reached(run_id, "s", min_devices=least),
        RankEnded(run_id=run_id, device=0, ending=Ending.YIELDED),
    ]


def test_who_needs_more_devices_than_there_are_waits_for_them() -> None:
    sweep = sweep_of(trials=1, more_may_join=True)
    sweep.tell(joined(0))
    assert launches(sweep.tell(*wide(0, 3))) == []
    assert launches(sweep.tell(joined(1, node=4))) == []
    assert launches(sweep.tell(joined(5, node=6))) == [(0, (0, 1, 5))]


def test_who_waits_for_more_devices_leaves_those_there_to_others_up_to_a_point() -> None:
    sweep = sweep_of(trials=9, more_may_join=True)
    sweep.tell(joined(0))
    assert launches(sweep.tell(*wide(0, 2))) == [(1, (0,))]
    assert launches(sweep.tell(*wide(1, 2))) == []  # the sampler should know of some values first
    assert sorted(launches(sweep.tell(joined(1)))) == [(0, (0, 1))]
    finished = [
        i
        for rank in (0, 1)
        for i in sweep.tell(RankEnded(run_id=2, device=rank, ending=Ending.RETURNED))
    ]
    assert FinishTrial(number=0, run_id=2) in finished
    assert launches(finished) == [(1, (0, 1))]


# -- who is known to leave ------------------------------------------------------------------------


@pytest.mark.parametrize("paradigm", ["global", "local", "elastic"])
def test_who_is_on_a_device_that_leaves_goes_elsewhere_before(paradigm: Any) -> None:
    sweep = sweep_of(trials=1, paradigm=paradigm)
    sweep.tell(joined(0))
    sweep.tell(reached(0, "s", resumable=True), rate(0, 10.0))
    assert sweep.tell(DeviceLeaving(device=0)) == []
    answer = AnswerEpoch(run_id=0, decision=EpochDecision.YIELD)
    assert sweep.tell(epoch_ended(0)) == [answer]
    yielded = sweep.tell(RankEnded(run_id=0, device=0, ending=Ending.YIELDED))
    assert yielded == [Requeue(number=0, run_id=0)]  # it waits: nothing else is there
    assert launches(sweep.tell(joined(5, node=1))) == [(0, (5,))]
    sweep.tell(*node_leaves(0))
    sweep.tell(joined(0))
    assert 0 in sweep.controller._state.idle


@pytest.mark.parametrize("within_epochs", [True, False])
def test_who_loses_a_device_stays_on_the_others(within_epochs: bool) -> None:
    sweep = sweep_of(trials=1, paradigm="elastic", moves_within_epochs=within_epochs)
    sweep.tell(*(joined(index, node=index) for index in range(4)))
    sweep.tell(reached(0, "s", resumable=True, movable=True))
    sweep.tell(rate(0, 10.0))
    ((_, devices),) = launches(sweep.tell(RankEnded(run_id=0, device=0, ending=Ending.YIELDED)))
    gone, *rest = devices
    assert rest
    told = sweep.tell(DeviceLeaving(device=gone))
    if within_epochs:
        assert told == [Interrupt(run_id=1, devices=tuple(rest))]
    told = sweep.tell(epoch_ended(1))
    decision = EpochDecision.YIELD
    assert told == [AnswerEpoch(run_id=1, decision=decision, devices=tuple(rest))]
    ended = [RankEnded(run_id=1, device=device, ending=Ending.YIELDED) for device in devices]
    assert [set(devices) >= set(rest) for _, devices in launches(sweep.tell(*ended))] == [True]
    assert set(sweep.problems[-1].candidates[0].devices) == set(rest)


def test_a_plan_that_did_not_know_of_a_leave_is_not_carried_out_there() -> None:
    controller = Controller(PolicyRules(paradigm="elastic"))
    controller.handle(joined(0), joined(1))
    controller.handle(TrialProposed(number=0))
    controller.handle(ProposalsExhausted())
    controller.handle(reached(0, "s", resumable=True), rate(0, 1.0))
    asked = controller.handle(epoch_ended(0))
    (problem,) = [i.problem for i in asked if isinstance(i, Allocate)]
    plan = GreedyAllocator().allocate(problem)
    assert plan.assignments[0].devices == (0, 1)
    controller.handle(DeviceLeaving(device=1))
    controller.handle(PlanDecided(plan=plan))
    assert launches(controller.handle(RankEnded(run_id=0, device=0, ending=Ending.YIELDED))) == []


def test_what_its_trials_could_use_is_known_once_no_more_are_proposed() -> None:
    sweep = sweep_of(trials=2)
    sweep.tell(joined(0))
    assert sweep.controller.most_usable is None
    sweep.tell(joined(1), joined(2))  # it asks for a third trial
    assert sweep.controller.most_usable == 2
    sweep.tell(reached(0, "s", max_devices=8))
    assert sweep.controller.most_usable == 9
    sweep.tell(RankEnded(run_id=0, device=0, ending=Ending.RETURNED))
    assert sweep.controller.most_usable == 1
