"""Small data sets, objectives and scripted controllers for tests with real processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna

from optuna_fleet import FleetExecutor, SharedPipeline
from optuna_fleet.checkpoints import file as checkpoint_file
from optuna_fleet.checkpoints.file import Owner, written
from optuna_fleet.checkpoints.store import Store
from optuna_fleet.events import (
    Abort,
    AnswerEpoch,
    CheckpointSaved,
    DeviceJoined,
    DeviceLost,
    Ending,
    EpochDecision,
    EpochEnded,
    Event,
    FinishTrial,
    Instruction,
    Interrupt,
    Launch,
    ProposalsExhausted,
    Propose,
    RankEnded,
    RateMeasured,
    Requeue,
    RunFailed,
    TrialProposed,
)
from optuna_fleet.trainer import checkpoint
from tests.behaviour.small import (
    Noise,
    evaluate,
    num_wrong,
    small_model,
    train,
    train_epoch,
)

__all__ = ["evaluate", "num_wrong", "small_model", "train", "train_epoch"]


def small_pipeline(**more: Any) -> SharedPipeline:
    return SharedPipeline(train=Noise(41, augment=True), val=Noise(20), **more)


def fleet_of(*, devices: int, pipeline: SharedPipeline | None = None, **options: Any) -> Any:
    return ScriptableFleet(pipeline or small_pipeline(), devices=devices, **options)


def run(fleet: Any, objective: Any, *legs: Leg) -> optuna.trial.FrozenTrial:
    """The only trial of a study, which flies by a script."""
    fleet.script = {0: legs}
    study = optuna.create_study()
    study.optimize(objective, n_trials=1, executor=fleet)
    return study.trials[0]


def await_trainers(fleet: ScriptableFleet, number: int) -> None:
    """Have that many trainers be there: where the machine is busy, some may take their time."""
    fleet.script = {device: [Leg((device,))] for device in range(number)}
    optuna.create_study().optimize(lambda trial: 0.0, n_trials=number, executor=fleet)


def write_checkpoint(path: Path, content: checkpoint.Checkpoint, owner: Owner) -> None:
    """As a trainer does that sees the folder."""
    with written(path), Store(path.parent).write(path.name) as file:
        checkpoint_file.write(file, checkpoint.captured(content).file.data, owner)


@dataclass(slots=True)
class Leg:
    """Fly on these devices until that many epochs are done in all (None: to the end).

    Or `until_asked`: see `ask_to_move`. Where it is to leave it is told that the trial goes on on
    the devices of the next leg, or those `promised`.
    """

    devices: tuple[int, ...]
    until_epoch: int | None = None
    measure: bool = False
    until_asked: bool = False
    promised: tuple[int, ...] | None = None


def ask_to_move(trial: Any, *, wait: bool = True) -> None:
    """Have the scripted controller interrupt the run; called by all ranks.

    With `wait`, the driver has done so when this returns.
    """
    session = trial._session
    if trial.rank == 0:
        session.send(RateMeasured(run_id=session.run.run_id, samples_per_s=1.0))
    if wait:
        trial.should_prune()


@dataclass
class ScriptedController:
    """Flies each trial by a script instead of deciding."""

    script: dict[int, Sequence[Leg]]
    run_ids: Any = field(default_factory=itertools.count)
    events: list[Event] = field(default_factory=list)
    most_usable: int | None = None

    def __post_init__(self) -> None:
        self._idle: set[int] = set()
        self._legs = {number: list(legs) for number, legs in self.script.items()}
        self._flying: dict[int, tuple[int, Leg]] = {}
        self._ended: dict[int, dict[int, Ending]] = {}
        self._epochs: dict[int, int] = dict.fromkeys(self.script, 0)
        self._live: set[int] = set()
        self._interrupted: set[int] = set()
        self._checkpoints: dict[int, str | None] = {}
        self._asked = 0
        self._exhausted = False

    @property
    def finished(self) -> bool:
        return self._exhausted and not self._live

    def handle(self, *events: Event) -> list[Instruction]:
        return [instruction for event in events for instruction in self._take(event)]

    def _take(self, event: Event) -> list[Instruction]:  # noqa: C901 - one arm per event
        self.events.append(event)
        match event:
            case DeviceJoined():
                self._idle.add(event.device.index)
            case TrialProposed():
                self._live.add(event.number)
                self._checkpoints[event.number] = event.checkpoint
                self._asked -= 1
            case ProposalsExhausted():
                self._exhausted = True
            case EpochEnded():
                number, leg = self._flying[event.run_id]
                self._epochs[number] += 1
                done = event.run_id in self._interrupted or self._epochs[number] == leg.until_epoch
                if not done:
                    return [AnswerEpoch(run_id=event.run_id, decision=EpochDecision.GO)]
                decision, devices = EpochDecision.YIELD, self._promised(number, leg)
                return [AnswerEpoch(run_id=event.run_id, decision=decision, devices=devices)]
            case RateMeasured(run_id=run_id) if run_id in self._flying:
                number, leg = self._flying[run_id]
                if leg.until_asked and run_id not in self._interrupted:
                    self._interrupted.add(run_id)
                    return [Interrupt(run_id=run_id, devices=self._promised(number, leg))]
            case CheckpointSaved():
                self._checkpoints[self._flying[event.run_id][0]] = event.location
            case RunFailed():
                devices = self._flying[event.run_id][1].devices
                return [Abort(run_id=event.run_id, devices=devices, lost=True)]
            case RankEnded():
                return self._rank_ended(event) + self._launches()
            case DeviceLost():
                return self._device_lost(event.device)
        proposals: list[Instruction] = []
        if not self._exhausted and not self._asked:
            self._asked = 1
            proposals = [Propose()]
        return self._launches() + proposals

    def _promised(self, number: int, leg: Leg) -> tuple[int, ...]:
        following = self._legs[number][0].devices if self._legs[number] else ()
        return following if leg.promised is None else leg.promised

    def _rank_ended(self, event: RankEnded) -> list[Instruction]:
        if not event.is_leaving:
            self._idle.add(event.device)
        number, leg = self._flying[event.run_id]
        endings = self._ended.setdefault(event.run_id, {})
        endings[event.device] = event.ending
        if len(endings) < len(leg.devices):
            return []
        del self._flying[event.run_id]
        if Ending.YIELDED in endings.values() or (
            Ending.LOST in endings.values() and self._legs[number]
        ):
            return [Requeue(number=number, run_id=event.run_id)]
        self._live.discard(number)
        return [FinishTrial(number=number, run_id=event.run_id)]

    def _device_lost(self, device: int) -> list[Instruction]:
        self._idle.discard(device)
        for run_id, (_, leg) in self._flying.items():
            if device in leg.devices and device not in self._ended.get(run_id, {}):
                ended = RankEnded(run_id=run_id, device=device, ending=Ending.LOST)
                instructions = self._rank_ended(ended)
                self._idle.discard(device)
                left = [d for d in leg.devices if d not in self._ended[run_id]]
                if run_id in self._flying and left:
                    abort = Abort(run_id=run_id, devices=tuple(left), lost=True)
                    instructions.append(abort)
                return instructions
        return []

    def _launches(self) -> list[Instruction]:
        launches: list[Instruction] = []
        flying = {number for number, _ in self._flying.values()}
        for number in sorted(self._live - flying):
            legs = self._legs[number]
            if legs and self._idle.issuperset(legs[0].devices):
                leg = legs.pop(0)
                self._idle.difference_update(leg.devices)
                run_id = next(self.run_ids)
                self._flying[run_id] = (number, leg)
                launches.append(
                    Launch(
                        run_id=run_id,
                        number=number,
                        devices=leg.devices,
                        probe=self._epochs[number] == 0,
                        measure=leg.measure,
                        round=0,
                        checkpoint=self._checkpoints[number],
                    )
                )
        return launches


class ScriptableFleet(FleetExecutor):
    """An executor whose next call may fly by a script; then `events` are what happened."""

    script: dict[int, Sequence[Leg]] | None = None
    events: list[Event]
    controller: type[ScriptedController] = ScriptedController

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"preflight": False, **kwargs})
        runner: Any = self._runner
        self._not_scripted = runner._new_controller
        runner._new_controller = self._new_controller

    def _new_controller(self, runtime: Any, findings: Any) -> Any:
        if self.script is None:
            return self._not_scripted(runtime, findings)
        script, self.script = self.script, None
        controller = self.controller(script, runtime.run_ids)
        self.events = controller.events
        return controller
