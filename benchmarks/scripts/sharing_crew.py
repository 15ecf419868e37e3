"""Trials in processes of their own that read every byte of their batches and nothing more.

A script `sharing_*.py` is asked line by line (`pairing.Served`): first to set up, then to go, then
to tidy up; what it costs is measured from "go" to the answer.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

PATIENCE_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one trial does.

    Attributes:
        batch_size: Samples per batch.
        epochs: How many it reads.
        sleep_s: What it computes per sample.
        seconds: When it stops at the latest; None for never.
    """

    batch_size: int = 32
    epochs: int = 1
    sleep_s: float = 0.0
    seconds: float | None = None


@dataclass(slots=True, kw_only=True)
class Report:
    """What a trial has read.

    Attributes:
        samples: How many samples.
        reading_s: Seconds from its first to its last batch.
        samples_after_first: Samples that came in those seconds.
        missed: Samples that never came in an epoch that was read to its end.
        repeated: Samples that came again in the same epoch.
        orders: A digest of the order of each epoch that was read to its end.
    """

    samples: int = 0
    reading_s: float = 0.0
    samples_after_first: int = 0
    missed: int = 0
    repeated: int = 0
    orders: list[str] = field(default_factory=list)


Epochs = Callable[[Trial], AbstractContextManager[Iterable[Iterable[Any]]]]
"""Opens what a trial reads from: an iterable of epochs, each an iterable of batches."""


def read_all(trial: Trial, epochs: Iterable[Iterable[Any]], num_samples: int) -> Report:
    """Be the trial."""
    report, began = Report(), time.perf_counter()
    first = None
    for epoch in epochs:
        indices: list[int] = []
        complete = True
        for images, numbers in epoch:
            _read_every_byte(images)
            indices += numbers.tolist()
            now = time.perf_counter()
            first = first or now
            report.samples_after_first += len(numbers) if now > first else 0
            report.reading_s = now - first
            time.sleep(trial.sleep_s * len(numbers))
            if trial.seconds is not None and now - began > trial.seconds:
                complete = False
                break
        _check(report, indices, num_samples, complete)
        if not complete:
            break
    return report


def _read_every_byte(images: torch.Tensor) -> None:
    images.numpy().reshape(-1).view(np.int64).sum()


def _check(report: Report, indices: list[int], num_samples: int, complete: bool) -> None:
    counts = Counter(indices)
    report.samples += len(indices)
    report.repeated += len(indices) - len(counts)
    if complete:
        report.missed += num_samples - len(counts)
        report.orders.append(hashlib.sha256(json.dumps(indices).encode()).hexdigest()[:16])


class Crew:
    """Trials that begin when they are told to, `slots` at a time."""

    def __init__(
        self, trials: Iterable[Trial], epochs: Epochs, *, num_samples: int, slots: int
    ) -> None:
        self._epochs = epochs
        self._num_samples = num_samples
        self._waiting = deque(trials)
        self._begun: list[tuple[int, Connection]] = []
        for _ in range(min(slots, len(self._waiting))):
            self._begin()
        for _, pipe in self._begun:
            pipe.recv()

    def go(self) -> list[Report]:
        """Let them read to the end; a trial that ends makes room for the next."""
        for _, pipe in self._begun:
            pipe.send("go")
        reports = []
        while self._begun:
            for pipe in wait([pipe for _, pipe in self._begun]):
                (ended,) = [entry for entry in self._begun if entry[1] is pipe]
                self._begun.remove(ended)
                reports.append(ended[1].recv())
                os.waitpid(ended[0], 0)
                if self._waiting:
                    self._begin()
                    self._begun[-1][1].recv()
                    self._begun[-1][1].send("go")
        return reports

    def _begin(self) -> None:
        trial = self._waiting.popleft()
        ours, theirs = multiprocessing.Pipe()
        pid = os.fork()
        if pid == 0:
            ours.close()
            try:
                self._run(trial, theirs)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        self._begun.append((pid, ours))

    def _run(self, trial: Trial, pipe: Connection) -> None:
        torch.set_num_threads(1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(PATIENCE_S)
        with self._epochs(trial) as epochs:
            pipe.send("ready")
            pipe.recv()
            pipe.send(read_all(trial, epochs, self._num_samples))


Setup = Callable[[dict[str, Any]], AbstractContextManager[tuple[Epochs, Callable[[], Any]]]]
"""Starts a system for a request: yields where trials read, and what tells of its work."""


def serve(setup: Setup) -> None:
    """Answer requests: each is one setting, then "go", then "end"."""
    torch.set_num_threads(1)
    # What libraries print must not get among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what tidies up
    lines = iter(sys.stdin)
    for line in lines:
        request = json.loads(line)
        with setup(request) as (epochs, told):
            trials = [Trial(**trial) for trial in request["trials"]]
            slots = request.get("slots") or len(trials)
            crew = Crew(trials, epochs, num_samples=request["samples"], slots=slots)
            answer("ready")
            next(lines)
            answer([asdict(report) for report in crew.go()])
            next(lines)
            counts = told()
        answer(counts)


def endless(make: Callable[[int], Iterable[Any]], num_epochs: int) -> Iterator[Iterable[Any]]:
    """The epochs, each made when it is its turn."""
    return (make(epoch) for epoch in range(num_epochs))
