"""Measures a trial's training rate over its first batches (FLEET B.3), while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from optuna_fleet.accelerator import accelerator_of
from optuna_fleet.alloc.rates import PROFILE_BATCHES, rate_of

# FLEET's 48 batches are an upper limit; slow models stop as soon as enough were timed.
_ENOUGH = ((24, 0.25), (12, 1.0), (6, 5.0))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """One batch: its beginning, the waits in it (each has two ends), its end."""

    marks: tuple[Any, ...]  # of one kind
    samples: int

    @property
    def is_over(self) -> bool:
        return all(mark.query() for mark in self.marks)

    @property
    def duration_s(self) -> float:
        """Waiting for data says nothing about the model."""
        began, *waits, ended = self.marks
        waited_ms = sum(a.elapsed_time(b) for a, b in zip(waits[::2], waits[1::2], strict=True))
        trained_ms: float = began.elapsed_time(ended) - waited_ms
        return max(1e-9, trained_ms / 1e3)


class Stopwatch:
    """Times batches until their rate is known, by the clock of the device that trains them.

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
        self._batches: list[_Batch] = []
        self._durations_s: list[float] = []  # of those that the device is done with

    def give_up(self) -> None:
        """Time no batch any more."""
        self.active = False

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
        ended = self._new_mark()
        self._batches.append(_Batch(marks=(*self._marks, ended), samples=samples))
        self._marks = []
        if len(self._batches) >= PROFILE_BATCHES:
            ended.synchronize()
        for batch in self._batches[len(self._durations_s) :]:
            if not batch.is_over:
                break
            self._durations_s.append(batch.duration_s)
            self.total_s += batch.duration_s
        if not self._is_enough():
            return None
        self.active = False
        timed = self._batches[: len(self._durations_s)]
        return rate_of(self._durations_s, [batch.samples for batch in timed])

    def _is_enough(self) -> bool:
        timed = len(self._durations_s)
        return timed >= PROFILE_BATCHES or any(
            timed >= batches and self.total_s >= seconds for batches, seconds in _ENOUGH
        )
