"""Where a trial goes on that was lost: on another node, as long as one has room."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_fleet.events import (
    DeviceGone,
    DeviceJoined,
    DeviceLost,
    Ending,
    GiveUp,
    RankEnded,
)
from optuna_fleet.resources import Device
from tests.unit.world import (
    World,
    epoch_ended,
    launches,
    plan_of,
    rate,
    reached,
)

A, B = 0, 1
"""Two nodes, and their only devices."""

JOINED = {node: DeviceJoined(device=Device(index=node, node=node, kind="cpu")) for node in (A, B)}


def two_nodes(**more: Any) -> World:
    """Trial 0 flies on node A, trial 1 on node B."""
    return World(devices=[event.device for event in JOINED.values()], **more)


def fly_on(world: World) -> None:
    """Both are known by now, and the first plan leaves them where they are."""
    world.tell(*(event for run in (0, 1) for event in (reached(run, "s"), rate(run))))
    world.unanswered.clear()
    world.tell(plan_of({0: (A,), 1: (B,)}))


def lose(world: World, run_id: int) -> list[Any]:
    """The trainer of a run dies, and has no successor yet."""
    (device,) = world.runs[run_id].devices
    return world.tell(DeviceLost(device=device))


def ended(run_id: int, node: int) -> RankEnded:
    return RankEnded(run_id=run_id, device=node, ending=Ending.RETURNED)


def test_a_probe_goes_on_on_another_node_if_there_is_room() -> None:
    world = two_nodes(trials=3, max_trials=2)
    lose(world, 0)
    assert launches(world.controller.handle(JOINED[A], ended(1, B))) == [(0, (B,))]


def test_one_that_needs_several_devices_goes_on_on_another_node_with_as_much_room() -> None:
    world = World(
        devices=[Device(index=d, node=d // 2, kind="cpu") for d in range(4)],
        trials=1,
        at_once=True,
        max_restarts=1,
    )
    world.tell(reached(0, "s", min_devices=2, max_devices=2), rate(0))
    world.end(0, Ending.YIELDED)
    ((run_id, launch),) = world.runs.items()
    assert launch.devices == (0, 1)
    world.lose(run_id)
    assert launches(world.log)[-1] == (0, (2, 3))


@pytest.mark.parametrize("is_known", [False, True])
def test_with_its_last_restart_it_waits_for_another_node_and_others_come_first(
    is_known: bool,
) -> None:
    world = two_nodes(trials=3, max_restarts=1, paradigm="local")
    if is_known:
        fly_on(world)
    lose(world, 0)
    assert launches(world.tell(JOINED[A])) == [(2, (A,))]
    world.end(1)
    world.decide_all()
    assert launches(world.log)[-1] == (0, (B,))


def test_without_another_node_it_takes_its_last_restart() -> None:
    world = two_nodes(trials=2, max_restarts=1)
    lose(world, 0)
    assert launches(world.tell(JOINED[A])) == []
    assert launches(world.tell(DeviceGone(device=B))) == [(0, (A,))]


@pytest.mark.parametrize(
    ("before", "after", "counts"), [(0, 0, True), (0, 1, False), (2, 2, True), (2, 3, False)]
)
def test_losses_do_not_count_once_it_gets_on_elsewhere(
    before: int, after: int, counts: bool
) -> None:
    world = two_nodes(trials=2, max_restarts=1)
    fly_on(world)
    for epoch in range(before):
        world.tell(epoch_ended(0, epochs_done=epoch + 1))
    lose(world, 0)
    world.end(1)
    world.decide_all()
    (run,) = world.runs
    for epoch in range(after):
        world.tell(epoch_ended(run, epochs_done=epoch + 1))
    assert any(isinstance(i, GiveUp) for i in lose(world, run)) is counts


@pytest.mark.parametrize(
    ("epochs", "is_failed"),
    [
        ([100, 200, 300, 400, 500], False),  # what it had done before each loss it need not again
        ([0, 1, 2], False),
        ([0, 0], True),
        ([3, 3], True),  # it comes as far each time, and no further
        ([3, 2], True),
        ([3, 4, 4], True),
    ],
)
def test_losses_do_not_count_once_it_gets_on_where_it_was(
    epochs: list[int], is_failed: bool
) -> None:
    world = World(devices=[JOINED[A].device], trials=1, max_restarts=1)
    world.tell(reached(0, "s"), rate(0))
    has_failed = []
    for furthest in epochs:
        world.decide_all()
        (run,) = world.runs
        for epoch in range(furthest):
            world.tell(epoch_ended(run, epochs_done=epoch + 1))
        has_failed.append(any(isinstance(i, GiveUp) for i in lose(world, run)))
        world.tell(JOINED[A])
    assert has_failed == [False] * (len(epochs) - 1) + [is_failed]
