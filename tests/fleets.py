"""Small data sets, objectives and scripted controllers for tests with real processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import torch
import torch.nn.functional as F
from torch import nn

from optuna_fleet import FleetExecutor, SharedPipeline
from optuna_fleet.checkpoints.file import Owner, replacing, written
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
from optuna_fleet.trainer.checkpoints import checkpoint


class Noise(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Float64 images with labels, augmented by noise drawn from torch's generator."""

    def __init__(self, size: int, *, augment: bool = False) -> None:
        generator = torch.Generator().manual_seed(size)
        self.images = torch.randn(size, 1, 6, 6, generator=generator, dtype=torch.float64)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index]
        if self.augment:
            image = image + 0.1 * torch.randn(image.shape, dtype=image.dtype)
        return image, index % 3


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


def small_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).double()


def train_epoch(
    trial: Any,
    model: Any,
    optimizer: Any,
    losses: list[float],
    *,
    batch_size: int,
    movable: bool = False,
    after_step: Callable[[int], Any] = lambda step: None,
) -> None:
    """One epoch, whose losses are added to `losses`."""
    model.train()
    batches = trial.batches("train", batch_size=batch_size, movable=movable)
    for step, (images, labels) in enumerate(batches):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(trial.mean(loss.item(), weight=trial.shard_size))
        after_step(step)


def evaluate(trial: Any, model: Any, measure: Callable[[Any, Any], Any]) -> float:
    """The sum of `measure`, of outputs and labels, over the validation data."""
    model.eval()
    with torch.no_grad():
        batches = trial.batches("val", batch_size=8)
        total = sum(float(measure(model(images), labels)) for images, labels in batches)
    return float(trial.sum(total))


def num_wrong(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) != labels).sum()


def train(trial: Any, *, epochs: int = 6, batch_size: int = 10) -> float:
    """Train with BatchNorm and momentum; the losses of all steps go into a user attribute."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, scheduler = trial.prepare(model, optimizer, scheduler)
    losses = trial.state.setdefault("losses", [])
    for epoch in trial.epochs(epochs):
        train_epoch(trial, model, optimizer, losses, batch_size=batch_size)
        scheduler.step()
        torch.rand(())  # moves the generator on, alike on every rank
        trial.report(evaluate(trial, model, num_wrong) / 20, epoch)
        if trial.should_prune():
            raise AssertionError("nothing prunes here")
    trial.set_user_attr("losses", losses)
    trial.set_user_attr("noise", torch.rand(3).tolist())
    return losses[-1]


def write_checkpoint(path: Path, content: checkpoint.Checkpoint, owner: Owner) -> None:
    """As a trainer does that sees the folder."""
    with written(path), replacing(path) as file:
        checkpoint.write(file, checkpoint.snapshot(content), owner)


@dataclass(slots=True)
class Leg:
    """Fly on these devices until that many epochs are done in all (None: to the end).

    Or `until_asked`: see `ask_to_move`. It is told then that the trial goes on on the devices of
    the next leg, or those `promised`.
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
                decision = EpochDecision.YIELD if done else EpochDecision.GO
                return [AnswerEpoch(run_id=event.run_id, decision=decision)]
            case RateMeasured(run_id=run_id) if run_id in self._flying:
                number, leg = self._flying[run_id]
                if leg.until_asked and run_id not in self._interrupted:
                    self._interrupted.add(run_id)
                    following = self._legs[number][0].devices if self._legs[number] else ()
                    devices = following if leg.promised is None else leg.promised
                    return [Interrupt(run_id=run_id, devices=devices)]
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        runner: Any = self._runner
        self._not_scripted = runner._new_controller
        runner._new_controller = self._new_controller

    def _new_controller(self, runtime: Any) -> Any:
        if self.script is None:
            return self._not_scripted(runtime)
        script, self.script = self.script, None
        controller = ScriptedController(script, runtime.run_ids)
        self.events = controller.events
        return controller
