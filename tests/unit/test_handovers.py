"""What a run leaves its trial, in memory or in a file, is what the trial goes on with."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from optuna_fleet.events import CheckpointSaved, Ending, Event, Launch
from optuna_fleet.executor.call import launches
from optuna_fleet.executor.call.ranks import RunCalls
from optuna_fleet.executor.call.runs import RunRecord, TrialRecord
from optuna_fleet.wire.messages import CheckpointFailed, Ended


def launch_on(
    *devices: int, run_id: int, number: int = 1, checkpoint: str | None = None
) -> Launch:
    return Launch(
        run_id=run_id,
        number=number,
        devices=devices,
        probe=False,
        measure=False,
        round=1,
        checkpoint=checkpoint,
    )


def run_on(*devices: int, run_id: int = 5) -> RunRecord:
    calls = RunCalls(world_size=len(devices), send=lambda *_: None)
    return RunRecord(launch=launch_on(*devices, run_id=run_id), start=0, calls=calls)


def saved(run_id: int, location: str = "there") -> CheckpointSaved:
    return CheckpointSaved(run_id=run_id, epoch=2, location=location)


FAILED = CheckpointFailed(run_id=5, problem="the disk is full")


class Sweep:
    """Trial 1 has left devices 3 and 1, where it was in run 5. Nothing can be sent to anybody."""

    def __init__(self, *, is_told: bool = False) -> None:
        self.runs: dict[int, RunRecord] = {}
        self.trials: dict[int, TrialRecord] = {}
        self.waiting: list[RunRecord] = []
        self.has_launched = False
        self.job = None
        self.retention = Namespace(
            drop=lambda number: None, folder=Namespace(saved=lambda location: None)
        )
        self.runtime = Namespace(
            rendezvous=Namespace(open=lambda: None, store=None),
            trainers=Namespace(process_on=lambda device: None),
        )
        self.begun: list[RunRecord] = []
        self.watch = self.begun.append
        self.fly(run_on(3, 1))
        self.land(5, is_told=is_told)

    def fly(self, run: RunRecord) -> None:
        number = run.launch.number
        run.trial = self.trials.setdefault(number, TrialRecord())
        self.runs[run.launch.run_id] = run

    def land(self, run_id: int, *, is_told: bool, holds: bool = True) -> None:
        """The run tells of a checkpoint, leaves, perhaps tells of another one, and ends."""
        run = self.runs[run_id]
        self.take(saved(run_id, "an old one"))
        run.has_told = False  # it leaves
        if is_told:
            self.take(saved(run_id))
        for rank, device in reversed([*enumerate(run.launch.devices)]):
            launches.rank_ended(
                run,
                Ended(
                    run_id=run_id,
                    rank=rank,
                    device=device,
                    time_s=0,
                    ending=Ending.YIELDED,
                    holds=holds and rank == 0,
                ),
            )
        del self.runs[run_id]

    def take(self, message: CheckpointSaved | CheckpointFailed) -> Start | list[Event]:
        """What begins, or else what the controller hears."""
        sweep: Any = self
        return self._started(launches.checkpoint_told(sweep, message))

    def lose(self, device: int) -> Start | list[Event]:
        sweep: Any = self
        return self._started(launches.device_lost(sweep, device))

    def launch(
        self, *devices: int, run_id: int = 6, number: int = 1, checkpoint: str | None = None
    ) -> Start | list[Event]:
        self.fly(run := run_on(*devices, run_id=run_id))
        run.launch = launch_on(*devices, run_id=run_id, number=number, checkpoint=checkpoint)
        run.trial = self.trials.setdefault(number, TrialRecord())
        sweep: Any = self
        return self._started(launches.begin(sweep, run))

    def _started(self, news: list[Event]) -> Start | list[Event]:
        if not self.begun:
            return news
        (run,) = self.begun
        self.begun.clear()
        (heard,) = news or [None]
        return Start(launch=run.launch, held=run.held, saved=heard)


@dataclass(frozen=True)
class Start:
    """A run has begun: on which devices, with what, and what the controller hears of that."""

    launch: Launch
    held: int | None = None
    saved: Event | None = None


# -- who goes on where it was ---------------------------------------------------------------------


@pytest.mark.parametrize("is_told", [True, False])
def test_the_device_that_holds_the_state_is_rank_0_at_once(is_told: bool) -> None:
    sweep = Sweep(is_told=is_told)
    assert sweep.launch(2, 3, 0) == Start(launch=launch_on(3, 2, 0, run_id=6), held=5)


def test_the_controller_hears_of_the_checkpoint_as_of_the_run_that_goes_on() -> None:
    sweep = Sweep()
    sweep.launch(3)
    assert sweep.take(saved(5)) == [saved(6)]
    del sweep.runs[6]  # it is lost
    assert sweep.launch(3, run_id=7) == Start(launch=launch_on(3, run_id=7))


def test_or_when_that_begins_if_it_was_written_before() -> None:
    sweep = Sweep()
    assert sweep.take(saved(5)) == []
    launch = launch_on(3, run_id=6, checkpoint="there")
    assert sweep.launch(3) == Start(launch=launch, held=5, saved=saved(6))
    del sweep.runs[6]  # it is lost
    assert sweep.launch(3, run_id=7) == Start(launch=launch_on(3, run_id=7))


def test_who_has_written_a_newer_one_needs_no_word_of_the_older() -> None:
    sweep = Sweep()
    sweep.launch(3)
    assert sweep.take(saved(6, "newer")) == [saved(6, "newer")]
    assert sweep.take(saved(5)) == []
    del sweep.runs[6]  # it is lost
    again = sweep.launch(2, run_id=7, checkpoint="newer")
    assert again == Start(launch=launch_on(2, run_id=7, checkpoint="newer"))


@pytest.mark.parametrize("is_early", [True, False])
def test_if_that_is_lost_before_the_next_run_goes_on_with_the_checkpoint(is_early: bool) -> None:
    sweep = Sweep()
    sweep.launch(3, 2)
    del sweep.runs[6]  # with device 2: a thread on device 3 still writes
    early = sweep.take(saved(5)) if is_early else None
    begun = sweep.launch(3, run_id=7)  # what it held has gone to the run that was lost
    late = None if is_early else sweep.take(saved(5))
    launch = launch_on(3, run_id=7, checkpoint="there")
    start = Start(launch=launch, saved=saved(7))
    assert (early, begun, late) == (([], start, None) if is_early else (None, [], start))


# -- who goes on elsewhere ------------------------------------------------------------------------


def test_elsewhere_it_waits_for_the_checkpoint() -> None:
    sweep = Sweep()
    assert sweep.launch(0, 1) == []
    launch = launch_on(0, 1, run_id=6, checkpoint="there")
    assert sweep.take(saved(5)) == Start(launch=launch, saved=saved(6))
    assert sweep.lose(3) == []


def test_it_does_not_wait_for_what_was_told_before_the_run_ended() -> None:
    sweep = Sweep(is_told=True)
    start = Start(launch=launch_on(0, run_id=6, checkpoint="there"))
    assert sweep.launch(0, checkpoint="there") == start


def test_what_it_is_told_while_ranks_still_end_the_controller_hears_itself() -> None:
    sweep = Sweep()
    sweep.fly(run_on(3, 1))
    assert sweep.take(saved(5)) == [saved(5)]
    del sweep.runs[5]
    start = Start(launch=launch_on(0, run_id=6, checkpoint="there"))
    assert sweep.launch(0, checkpoint="there") == start


@pytest.mark.parametrize("how", ["dies", "fails"])
def test_what_is_never_written_is_not_waited_for(how: str) -> None:
    sweep = Sweep()
    assert sweep.launch(0, checkpoint="an old one") == []
    begun = sweep.lose(3) if how == "dies" else sweep.take(FAILED)
    assert begun == Start(launch=launch_on(0, run_id=6, checkpoint="an old one"))


def test_a_device_that_died_holds_nothing() -> None:
    sweep = Sweep()
    assert sweep.lose(3) == []
    assert sweep.launch(3) == Start(launch=launch_on(3, run_id=6))


def test_a_process_that_ran_another_trial_holds_nothing_but_is_still_writing() -> None:
    sweep = Sweep()
    other = launch_on(3, run_id=6, number=2)
    assert sweep.launch(3, number=2) == Start(launch=other)
    assert sweep.launch(3, run_id=7) == []
    start = sweep.take(saved(5))
    assert isinstance(start, Start)
    assert (start.held, start.launch.checkpoint) == (None, "there")


def test_no_run_begins_where_a_trainer_is_missing() -> None:
    sweep = Sweep()
    assert sweep.launch(0) == []
    assert sweep.lose(0) == []
    assert sweep.take(saved(5)) == []
    del sweep.runs[6]
    launch = launch_on(3, run_id=7, checkpoint="there")
    assert sweep.launch(3, run_id=7) == Start(launch=launch, held=5, saved=saved(7))
