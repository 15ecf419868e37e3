"""Who may have several devices, or be moved, by what checks have found: the controller alone."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_fleet.events import (
    AnswerEpoch,
    BeginCheck,
    CheckAffordable,
    CheckEnded,
    DeviceJoined,
    DeviceLost,
    EpochDecision,
    Model,
    StartRound,
)
from optuna_fleet.executor.deciding.clearance import Clearance
from optuna_fleet.executor.deciding.state import Trial
from optuna_fleet.preflight.verdict import Finding
from tests.unit.world import World, epoch_ended, rate, reached


def flies(world: World, run_id: int, *traits: str, max_devices: int = 32) -> None:
    """A run trains, and its rate is known; all decisions are made."""
    world.tell(reached(run_id, f"s{run_id}", max_devices=max_devices, traits=frozenset(traits)))
    world.tell(rate(run_id))
    world.decide_all()


def moves(world: World, run_id: int = 0, epochs_done: int = 1) -> bool:
    """Whether a run is told to go on elsewhere at the end of an epoch."""
    asked = world.tell(epoch_ended(run_id, epochs_done=epochs_done)) + world.decide_all()
    (answer,) = [one for one in asked if isinstance(one, AnswerEpoch)]
    return answer.decision is EpochDecision.YIELD


def checks(world: World) -> list[BeginCheck]:
    return [one for one in world.log if isinstance(one, BeginCheck)]


def one_trial(*traits: str, **more: Any) -> World:
    """On one of three devices; at the end of its first epoch it would be given all."""
    world = World(num_devices=3, trials=1, paradigm="elastic")
    flies(world, 0, *traits, **more)
    world.tell(epoch_ended(0))
    world.decide_all()
    return world


def test_a_plan_that_would_widen_an_unchecked_kind_has_it_checked_on_a_free_device() -> None:
    world = one_trial("net", "sgd")
    (check,) = checks(world)
    assert (check.number, check.traits) == (0, {"net", "sgd"})
    assert check.device not in world.runs[0].devices
    assert not any(isinstance(one, StartRound) for one in world.log)
    assert not moves(world, epochs_done=2)


def test_what_passes_is_widened() -> None:
    world = one_trial("net")
    world.checked()
    assert moves(world, epochs_done=2)


def test_what_fails_on_several_devices_stays_on_one() -> None:
    world = one_trial("net")
    world.checked(widens=False)
    assert not any(moves(world, epochs_done=n) for n in (2, 3))
    world.tell(CheckAffordable())
    assert len(checks(world)) == 1


def test_what_asks_for_its_devices_is_not_checked() -> None:
    world = one_trial()
    assert checks(world) == []
    assert world.yielding == {0}


def several(*kinds: str) -> World:
    """Each trial has the traits that are the letters of its kind, and uses two devices."""
    world = World(num_devices=2 * len(kinds) + 1, trials=len(kinds))
    for run_id, traits in enumerate(kinds):
        told = reached(run_id, f"s{run_id}", traits=frozenset(traits), max_devices=2)
        world.tell(told)
    for run_id in range(len(kinds)):
        world.tell(rate(run_id))
    world.decide_all()
    return world


def goes_on_checking(world: World) -> None:
    """The check under way has passed, and another one may be made."""
    world.checked()
    world.tell(CheckAffordable())
    world.decide_all()


def test_trials_whose_traits_have_all_passed_are_not_checked_again() -> None:
    world = several("ab", "cd", "ad")
    for _ in range(2):
        goes_on_checking(world)
    assert {check.traits for check in checks(world)} == {frozenset("ab"), frozenset("cd")}
    assert world.check is None


def test_a_kind_that_has_failed_stays_confined_though_others_with_its_traits_have_passed() -> None:
    passed = [Finding(traits=frozenset(kind), widens=True, moves=True) for kind in ("ab", "cd")]
    failed = Finding(traits=frozenset("ad"), widens=False, moves=False)
    clearance = Clearance([failed, *passed])

    def trial(kind: str) -> Trial:
        traits = frozenset(kind)
        return Trial(
            number=0, model=Model(structure="", resumable=True, max_devices=4, traits=traits)
        )

    assert clearance.may_widen(trial("ac"))
    assert not clearance.may_widen(trial("ad"))
    assert not clearance.may_move(trial("ad"))


def test_of_several_kinds_the_one_with_most_new_traits_is_checked() -> None:
    assert [check.number for check in checks(several("ab", "cde"))] == [1]


def busy(**policy: Any) -> World:
    """As many trials as devices train, and others wait to be proposed."""
    world = World(num_devices=2, trials=6, **policy)
    for run_id in (0, 1):
        flies(world, run_id, f"kind {run_id}", max_devices=1)
    return world


def test_kinds_are_checked_ahead_once_that_is_no_more_than_its_share() -> None:
    """On the next device that falls free, before the next trial."""
    world = busy()
    world.end(0)
    assert checks(world) == []
    flies(world, 2, "kind 2", max_devices=1)
    world.tell(CheckAffordable())
    world.end(2)
    (check,) = checks(world)
    assert check.traits in ({"kind 1"}, {"kind 2"})


@pytest.mark.parametrize("policy", [{"looks_ahead": False}])
def test_nothing_is_checked_ahead_by_a_policy_that_never_widens(policy: Any) -> None:
    world = busy(**policy)
    world.tell(CheckAffordable())
    world.end(0)
    assert checks(world) == []


def test_a_check_that_is_lost_is_made_again() -> None:
    world = several("a")
    world.check = None
    world.tell(CheckEnded(finding=None))
    world.decide_all()
    assert len(checks(world)) == 2


def test_a_device_that_is_lost_meanwhile_is_given_to_nobody_until_it_joins() -> None:
    world = one_trial("net")
    (check,) = checks(world)
    world.tell(DeviceLost(device=check.device))
    world.checked()
    world.decide_all()
    assert all(check.device not in p.devices for p in world.controller._state.pending.values())
    world.tell(DeviceJoined(device=world.devices[check.device]))
    assert check.device in world.controller._state.idle


def test_a_trial_that_ends_before_a_device_falls_free_is_not_checked() -> None:
    clearance, (ended, other) = Clearance(), (Trial(number=0), Trial(number=1))
    clearance.wanted = ended
    clearance.forget_ended([other])
    assert clearance.take([other], looks_ahead=False) is None
