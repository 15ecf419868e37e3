"""What a run that has stopped within an epoch holds is handed on, or written before it is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from optuna_fleet.events import CheckpointSaved, Ending, Launch
from optuna_fleet.executor.call.calls import RunCalls
from optuna_fleet.executor.call.handovers import Handovers, Start
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.wire.messages import (
    AskStep,
    CheckpointFailed,
    Ended,
    Rehearsed,
    Release,
    StopAt,
)

SAVED = CheckpointSaved(run_id=5, epoch=2, location="there")


class Fleet:
    """Trial 1 flies on these devices, in run 5."""

    def __init__(self, *devices: int) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.interrupted: list[tuple[int, ...]] = []
        self.rehearsals: dict[int, int] = {}
        self.stops: list[tuple[int, StopAt]] = []
        self.handovers = Handovers(self.send, self.rehearse, lambda order: None)
        self.run = RunRecord(
            launch=replace(launch_on(*devices), run_id=5),
            start=0,
            saved=0,
            calls=RunCalls(world_size=2),
        )

    def send(self, device: int, message: Any) -> None:
        if isinstance(message, AskStep):
            assert self.run.launch.devices[message.rank] == device
            self.interrupted += [self.run.stays] * (message.rank == 0)
        elif isinstance(message, StopAt):
            self.stops.append((device, message))
        else:
            self.sent.append((device, message))

    def rehearse(self, launch: Launch, follows: int, answers: Any) -> None:
        assert follows == 5
        self.rehearsals[launch.devices[-1]] = launch.run_id

    def is_rehearsed(self, device: int, *, is_ready: bool = True) -> list[Start]:
        message = Rehearsed(run_id=self.rehearsals[device], device=device, is_ready=is_ready)
        return list(self.handovers.rehearsed(message))

    def stop(self, *devices: int, can_join: bool = True) -> None:
        for device in devices:
            ended = Ended(
                run_id=5,
                rank=self.run.launch.devices.index(device),
                device=device,
                time_s=0,
                ending=Ending.YIELDED,
                waits=True,
                can_join=can_join,
            )
            self.handovers.rank_ended(self.run, ended)

    def launch(self, *devices: int, number: int = 1) -> Start | None:
        return self.handovers.begin(launch_on(*devices, number=number))

    def told(self) -> dict[int, bool]:
        return {device: message.saves for device, message in self.sent}


def stopped(*devices: int) -> Fleet:
    fleet = Fleet(*devices)
    fleet.stop(*devices)
    return fleet


def launch_on(*devices: int, number: int = 1, checkpoint: str | None = None) -> Launch:
    return Launch(
        run_id=6,
        number=number,
        devices=devices,
        probe=False,
        measure=False,
        round=1,
        checkpoint=checkpoint,
    )


def test_it_goes_on_where_its_ranks_wait_in_their_order() -> None:
    fleet = stopped(3, 1, 2)
    assert fleet.launch(2, 3) == Start(launch=launch_on(3, 2), follows=5, num_stay=2, saved_at=0)
    assert fleet.sent == [(1, Release(run_id=5, saves=False))]
    assert fleet.launch(2, 3) == Start(launch=launch_on(2, 3))


def test_elsewhere_it_begins_with_what_one_of_them_writes() -> None:
    fleet = stopped(3, 1)
    assert fleet.launch(0) is None
    assert fleet.told() == {3: True, 1: False}
    saved = CheckpointSaved(run_id=6, epoch=2, location="there")
    assert list(fleet.handovers.take(SAVED)) == [
        Start(launch=launch_on(0, checkpoint="there"), saved=saved)
    ]


@pytest.mark.parametrize("is_first", [True, False])
def test_who_needs_their_devices_waits_until_it_is_written(is_first: bool) -> None:
    fleet = stopped(3, 1)
    other = launch_on(1, number=2)
    assert fleet.launch(1, number=2) == Start(launch=other)
    assert fleet.told() == {3: True, 1: False}
    if is_first:
        assert list(fleet.handovers.take(SAVED)) == []
        start = fleet.launch(3)
    else:
        assert fleet.launch(3) is None
        (start,) = fleet.handovers.take(SAVED)
    assert start is not None
    assert (start.follows, start.launch.checkpoint) == (None, "there")


@pytest.mark.parametrize("is_first_late", [True, False])
def test_a_rank_that_stops_late_leaves_as_the_others_do(is_first_late: bool) -> None:
    fleet = Fleet(3, 1)
    fleet.run.stays = (0, 1)
    early, late = (1, 3) if is_first_late else (3, 1)
    fleet.stop(early)
    assert fleet.launch(early, number=2) == Start(launch=launch_on(early, number=2))
    if not is_first_late:  # it may even be written by then
        assert list(fleet.handovers.take(SAVED)) == []
    fleet.stop(late)
    assert fleet.told() == {3: True, 1: False}
    if is_first_late:
        assert fleet.launch(0) is None
        (start,) = fleet.handovers.take(SAVED)
    else:
        start = fleet.launch(0)
    assert start is not None
    assert (start.follows, start.launch.checkpoint) == (None, "there")


@pytest.mark.parametrize("how", ["dies", "fails"])
def test_what_can_not_be_written_is_not_waited_for(how: str) -> None:
    fleet = stopped(3, 1)
    assert fleet.launch(0) is None
    failed = CheckpointFailed(run_id=5, problem="the disk is full")
    lost = fleet.handovers.device_lost(3) if how == "dies" else fleet.handovers.take(failed)
    assert list(lost) == [Start(launch=launch_on(0))]


@pytest.mark.parametrize("is_told_first", [True, False])
def test_it_is_written_before_all_who_wait_are_gone(is_told_first: bool) -> None:
    """Be it that nothing else is free, and no launch comes."""
    fleet = Fleet(3, 1, 2)
    fleet.run.stays = (0, 1)
    if is_told_first:
        fleet.handovers.leaving([3, 1, 2])
    fleet.stop(3)
    assert fleet.told() == ({3: True} if is_told_first else {})
    fleet.stop(1)
    if not is_told_first:
        fleet.handovers.leaving([2, 1])
        assert fleet.told() == {}
        fleet.handovers.leaving([3])
    assert fleet.told() == {3: True, 1: False}
    assert list(fleet.handovers.take(SAVED)) == []
    for device in (3, 1):
        assert list(fleet.handovers.device_lost(device)) == []
    start = fleet.launch(3)
    assert start is not None
    assert (start.follows, start.launch.checkpoint) == (None, "there")


def test_a_device_that_was_lost_is_not_gone_for_good() -> None:
    fleet = Fleet(3, 1)
    fleet.handovers.leaving([3])
    assert list(fleet.handovers.device_lost(3)) == []
    fleet.stop(3)
    assert fleet.told() == {}


def test_no_run_begins_where_a_trainer_is_missing() -> None:
    fleet = stopped(3, 1)
    assert fleet.launch(0) is None
    assert list(fleet.handovers.device_lost(0)) == []
    assert list(fleet.handovers.take(SAVED)) == []


def test_a_rank_that_dies_while_it_waits_is_not_counted_on() -> None:
    fleet = stopped(3, 1)
    assert list(fleet.handovers.device_lost(3)) == []
    assert fleet.launch(1) == Start(launch=launch_on(1), follows=5, num_stay=1, saved_at=0)


def test_all_leave_when_the_trial_or_the_call_is_over() -> None:
    for end in (lambda handovers: handovers.forget(1), lambda handovers: handovers.end()):
        fleet = stopped(3, 1)
        end(fleet.handovers)
        assert fleet.told() == {3: False, 1: False}


# -- who joins ------------------------------------------------------------------------------------


def test_a_run_trains_on_until_those_who_join_on_idle_devices_are_ready() -> None:
    fleet = Fleet(0, 1)
    fleet.handovers.interrupt(fleet.run, (1, 2, 3, 4), busy={0, 1, 4})
    assert fleet.rehearsals.keys() == {2, 3}
    assert fleet.is_rehearsed(3) == []
    assert not fleet.interrupted
    assert fleet.is_rehearsed(2) == []
    assert fleet.interrupted == [(1,)]
    fleet.stop(1)
    assert fleet.launch(1, 2, 3, 4) is None
    joined = launch_on(1, 2, 3, 4)
    assert fleet.is_rehearsed(4) == [Start(launch=joined, follows=5, num_stay=1, saved_at=0)]
    assert not fleet.sent


def test_all_stop_at_the_furthest_step_once_it_is_known_of_all() -> None:
    fleet = Fleet(4, 5, 6)
    fleet.handovers.interrupt(fleet.run, (5,), busy={4, 5, 6})
    fleet.handovers.at_step(fleet.run, 0, (1, 2, 7))
    fleet.handovers.at_step(fleet.run, 1, (1, 2, 9))
    assert fleet.stops == []
    fleet.stop(6)  # it has ended by itself
    assert {device for device, _ in fleet.stops} == {4, 5, 6}
    assert {order for _, order in fleet.stops} == {StopAt(run_id=5, place=(1, 2, 9), stays=(1,))}
    fleet.handovers.at_step(fleet.run, 1, (1, 3, 0))
    assert len(fleet.stops) == 3


@pytest.mark.parametrize("moves", [True, False])
def test_a_run_that_is_to_move_while_it_is_to_be_saved_moves(moves: bool) -> None:
    fleet = Fleet(4, 5)
    fleet.handovers.save(fleet.run)
    fleet.handovers.at_step(fleet.run, 0, (1, 2, 7))
    if moves:
        fleet.handovers.interrupt(fleet.run, (5,), busy={4, 5})
    fleet.handovers.at_step(fleet.run, 1, (1, 2, 8))
    stays = (1,) if moves else ()
    order = StopAt(run_id=5, place=(1, 2, 8), stays=stays, saves=not moves)
    assert fleet.stops == [(4, order), (5, order)]


@pytest.mark.parametrize("how", ["fails", "dies"])
def test_nobody_waits_for_who_can_not_join(how: str) -> None:
    fleet = Fleet(0, 1)
    fleet.handovers.interrupt(fleet.run, (1, 2), busy={0, 1})
    if how == "fails":
        fleet.is_rehearsed(2, is_ready=False)
        assert fleet.interrupted == [()]  # all leave, with a checkpoint
    else:
        list(fleet.handovers.device_lost(2))
        assert fleet.interrupted == [(1,)]


@pytest.mark.parametrize("can_join", [True, False])
def test_a_stopped_run_that_nobody_can_join_is_written(can_join: bool) -> None:
    fleet = Fleet(0, 1)
    fleet.stop(0, 1, can_join=can_join)
    assert fleet.launch(0, 1, 2) is None
    if can_join:
        fleet.is_rehearsed(2, is_ready=False)
    assert {device: message.saves for device, message in fleet.sent if device < 2} == {
        0: True,
        1: False,
    }
    (start,) = fleet.handovers.take(SAVED)
    assert start.launch == launch_on(0, 1, 2, checkpoint="there")


def test_a_rehearsal_makes_place_for_another_trial() -> None:
    fleet = Fleet(0, 1)
    fleet.handovers.interrupt(fleet.run, (1, 2, 3), busy={0, 1})
    assert fleet.launch(2, number=2) == Start(launch=launch_on(2, number=2))
    assert fleet.sent == [(2, Release(run_id=fleet.rehearsals[2], saves=False))]
    fleet.is_rehearsed(3)
    assert fleet.interrupted == [(1,)]
