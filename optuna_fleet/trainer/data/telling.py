"""What the driver is told of a trial: what it trains on, on how many devices, and how fast."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch

from optuna_fleet.accelerator import accelerator_of
from optuna_fleet.alloc.rates import PROFILE_BATCHES, rate_of
from optuna_fleet.events import DataRequested, Model, RateMeasured
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.run_parts import Asked, Parts
from optuna_fleet.trainer.saving import Leaving
from optuna_fleet.trainer.session import Yielded
from optuna_fleet.trainer.training_state import TrainingState
from optuna_fleet.wire.messages import Trained

_LONG_S = 120.0
# FLEET's 48 batches are an upper limit; slow models stop as soon as enough were timed.
_ENOUGH = ((24, 0.25), (12, 1.0), (6, 5.0))
_NOT_CHECKED = (
    "It is not checked whether it gives the same on several devices, as it has asked for them "
    "(min_devices, trial.pipeline). See docs/objective.md."
)
_MOVABLE = (
    "An epoch took {seconds:.0f} s, and a trial moves to other devices at the end of one only. "
    'trial.batches("train", ..., movable=True) lets it do so between two batches, trial.steps(n, '
    "every=...) cuts epochs. See docs/objective.md."
)


class Telling:
    """By rank 0; all call it alike.

    Attributes:
        reached_after_s: When the objective first asked for data; None before.
        stopwatch: Measures the rate.
    """

    def __init__(self, parts: Parts, kept: TrainingState, leaving: Leaving) -> None:
        self.reached_after_s: float | None = None
        self.stopwatch = Stopwatch(parts.run.measure, parts.device)
        self._parts = parts
        self._session = parts.session
        self._run = parts.run
        self._kept = kept
        self._leaving = leaving
        self._reached: Model | None = None  # as told last
        self._samples_per_epoch = 0
        self._trained_loop: int | None = None  # the last, of which these are; None before
        self._epoch_began = time.perf_counter()
        self._timed_pass: int | None = None
        self._has_trained = False

    def reach(self, asked: Asked, samples: int, *, trains: bool, movable: bool) -> None:
        """A pass begins over a data set of so many samples, on which the trial trains, or not.

        Tells what it trains on; if it evaluates first, once more when it trains. And in each
        further loop how long that goes on, and how long its epochs are.
        """
        position, batch_size = self._parts.position, asked.batch_size
        periods = position.periods
        max_epochs = position.num_epochs if position.is_inside else None
        is_news = self._reached is None or (trains and self._trained_loop is None)
        if is_news or (trains and position.loop != self._trained_loop):
            self._samples_per_epoch = (
                samples if periods is None else periods.every * min(batch_size, samples)
            )
        if trains:
            self._trained_loop = position.loop
        if not is_news:
            if max_epochs is not None:
                assert self._reached is not None
                self._tell_reached(
                    replace(
                        self._reached,
                        resumable=True,
                        max_epochs=max_epochs,
                        samples_per_epoch=self._samples_per_epoch,
                    )
                )
            return
        if self._reached is None:
            self.reached_after_s = time.perf_counter() - self._session.began
        bounds = replace(
            self._parts.widths.bounds,
            samples_per_epoch=self._samples_per_epoch,
            max_epochs=max_epochs,
        )
        self._tell_reached(
            Model(
                structure=self._structure(asked.name, batch_size),
                resumable=position.is_inside,
                min_devices=bounds.min_devices,
                max_devices=bounds.most_for(batch_size),
                spans_types=bounds.spans_types,
                **bounds.facts(),
                movable=movable,
                traits=self._traits(movable=movable),
            )
        )
        if position.is_inside and bounds.min_devices > self._run.world_size:
            self._session.unwind(Yielded)  # nothing is trained on fewer; it is told of now
        if batch_size > samples:
            self._session.warn(
                f"batch_size={batch_size} is larger than data set '{asked.name}' with its "
                f"{samples} samples: each epoch is one batch of {samples}."
            )

    def need(self, num_devices: int) -> NoReturn:
        """Leave the objective, which is to begin anew on no fewer devices.

        Raises:
            FleetConfigError: It reads no batches, and so can have no more devices.
        """
        self._parts.widths.bounds = replace(self._parts.widths.bounds, min_devices=num_devices)
        if self._reached is not None:
            most = self._parts.widths.bounds.most_for(self._reached.max_devices)
            self._tell_reached(replace(self._reached, min_devices=num_devices, max_devices=most))
            self._session.unwind(Yielded)
        raise FleetConfigError(
            f"The model does not fit on {self._run.world_size} devices, but on {num_devices}. A "
            "trial can have several only if its batches come from trial.batches()."
        )

    def _tell_reached(self, reached: Model) -> None:
        if reached != self._reached:
            self._reached = reached
            self._tell(DataRequested(run_id=self._run.run_id, model=reached))

    def _traits(self, *, movable: bool) -> frozenset[str]:
        if not self._kept.modules:  # it stays on one device
            return frozenset()
        in_periods = self._parts.position.periods is not None
        reads = "periods" if in_periods else "movable epochs" if movable else "epochs"
        traits = self._kept.traits(f"reads {reads}")
        if not traits and self._run.num_of_all_types > 1:
            self._session.remark(["not checked"], _NOT_CHECKED)
        return traits

    def _structure(self, name: str, batch_size: int) -> str:
        """What decides the rate on devices of one type: parameter shapes, batch size, data."""
        digest = hashlib.sha256(f"{name}|{batch_size}".encode())
        for module in self._kept.modules:
            digest.update(type(module).__qualname__.encode())
            for key, parameter in module.named_parameters():
                digest.update(f"{key}{tuple(parameter.shape)}{parameter.dtype}".encode())
        return digest.hexdigest()[:16]

    def begin_pass(self, number: int) -> None:
        """The pass of that number trains; the first one is timed."""
        if self._timed_pass is None:
            self._timed_pass = number
            self.stopwatch.start()

    def end_pass(self, number: int) -> None:
        """It is over."""
        if self._timed_pass == number:
            self._timed_pass = None

    def trained(self, number: int, samples: int) -> None:
        """A batch of the pass of that number was trained on."""
        if not self._has_trained:
            self._has_trained = True
            self._tell(Trained(run_id=self._run.run_id))
        if self.stopwatch.active and number == self._timed_pass:
            if (rate := self.stopwatch.stop(samples)) is not None:
                self._tell_rate(rate)
            self.stopwatch.start()

    def end_epoch(self) -> None:
        """An epoch without a training batch has a pace too: others wait for its rate."""
        now = time.perf_counter()
        seconds, self._epoch_began = now - self._epoch_began, now
        if seconds >= _LONG_S and not self._leaving.is_movable and self._run.num_devices > 1:
            self._session.remark(["long epochs"], _MOVABLE.format(seconds=seconds))
        if self.stopwatch.active and self.stopwatch.is_unused and self._samples_per_epoch:
            self.stopwatch.active = False
            self._tell_rate(self._samples_per_epoch / max(seconds, 1e-9))

    def _tell_rate(self, samples_per_s: float) -> None:
        self._tell(RateMeasured(run_id=self._run.run_id, samples_per_s=samples_per_s))

    def _tell(self, message: DataRequested | Trained | RateMeasured) -> None:
        if self._run.rank == 0:
            self._session.send(message)


class _HostMark:
    """A moment, with what is used of `torch.Event`."""

    def __init__(self) -> None:
        self.time_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _HostMark, /) -> float:
        return 1e3 * (end.time_s - self.time_s)


def _gpu_mark(device: torch.device) -> Any:
    event = accelerator_of(device.type).module.Event(enable_timing=True)
    event.record()
    return event


def _duration_s(marks: list[Any]) -> float:
    """Of a batch, by the marks of its beginning, the waits in it (each has two) and its end.

    Waiting for data says nothing about the model.
    """
    began, *waits, ended = marks
    waited_ms = sum(a.elapsed_time(b) for a, b in zip(waits[::2], waits[1::2], strict=True))
    trained_ms: float = began.elapsed_time(ended) - waited_ms
    return max(1e-9, trained_ms / 1e3)


class Stopwatch:
    """Times batches until their rate is known (FLEET B.3), by the clock of who trains them.

    To wait for a GPU after each batch would cost what it gains by working behind the host, and
    what the host waits for need not keep the GPU waiting. So only marks are left in its stream; at
    most once, at the end, it is waited for.
    """

    def __init__(self, active: bool, device: torch.device) -> None:
        self.active = active
        self.total_s = 0.0
        of_gpu = partial(_gpu_mark, device)
        self._new_mark: Callable[[], Any] = _HostMark if device.type == "cpu" else of_gpu
        self._marks: list[Any] = []  # of the batch under way
        self._batches: list[tuple[list[Any], int]] = []  # marks and samples
        self._durations_s: list[float] = []  # of those that the device is done with

    @property
    def is_unused(self) -> bool:
        """Whether nothing was timed yet."""
        return not self._batches

    def start(self) -> None:
        """A batch is about to be asked for."""
        self._marks = [self._new_mark()] if self.active else []

    def wait(self) -> None:
        """The host begins, or ends, to wait for data."""
        if self._marks:
            self._marks.append(self._new_mark())

    def stop(self, samples: int) -> float | None:
        """Count a trained batch of `samples` samples; return the rate (samples/s) once known."""
        marks = [*self._marks, self._new_mark()]
        self._batches.append((marks, samples))
        self._marks = []
        if len(self._batches) >= PROFILE_BATCHES:
            marks[-1].synchronize()
        for marks, _ in self._batches[len(self._durations_s) :]:
            if not all(mark.query() for mark in marks):
                break
            self._durations_s.append(_duration_s(marks))
            self.total_s += self._durations_s[-1]
        if not self._is_enough():
            return None
        self.active = False
        timed = self._batches[: len(self._durations_s)]
        return rate_of(self._durations_s, [samples for _, samples in timed])

    def _is_enough(self) -> bool:
        timed = len(self._durations_s)
        return timed >= PROFILE_BATCHES or any(
            timed >= batches and self.total_s >= seconds for batches, seconds in _ENOUGH
        )
