"""Trials in processes of their own that read every byte of their batches and nothing more.

As `sharing.py` asks, line by line (`pairing.Served`): first to set up, then to go, then to tidy
up; what it costs is measured from "go" to the answer. What they read comes from a DataLoader of
one worker in each, or from one `SharedPipeline`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from sharing_photos import CROP_PX, NUM_ELEMENTWISE, Photographs
from torch.utils.data import DataLoader, TensorDataset

from optuna_fleet import SharedPipeline, take_apart

PATIENCE_S = 600
BATCH_SIZE = 32
NUM_PREPROCESSORS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one trial does: `sleep_s` is for each sample, `seconds` when it stops at the latest."""

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
        wrong: Samples that came again in the same epoch, or never in one that was read to its end.
    """

    samples: int = 0
    reading_s: float = 0.0
    samples_after_first: int = 0
    wrong: int = 0


Opened = AbstractContextManager[Callable[[int], Iterable[Any]]]
"""Yields what has the batches of an epoch."""


# -- the two sides --------------------------------------------------------------------------------


@contextmanager
def dataloaders(request: dict[str, Any]) -> Iterator[tuple[Callable[[Trial], Opened], Any]]:
    dataset = photographs(request)

    @contextmanager
    def opened(trial: Trial) -> Iterator[Callable[[int], Iterable[Any]]]:
        loader = DataLoader(
            dataset, BATCH_SIZE, shuffle=True, num_workers=1, persistent_workers=True
        )
        yield lambda epoch: loader

    yield opened, lambda: None


@contextmanager
def ours(request: dict[str, Any]) -> Iterator[tuple[Callable[[Trial], Opened], Any]]:
    dataset = photographs(request)
    pipeline = SharedPipeline(
        **(in_parts(dataset) if request["in_parts"] else {"train": dataset}),
        warm=TensorDataset(torch.zeros(64, 3, CROP_PX, CROP_PX, dtype=torch.uint8)),
        shuffled=["train"],
        num_preprocessors=NUM_PREPROCESSORS,
        **request.get("options", {}),
    )

    @contextmanager
    def opened(trial: Trial) -> Iterator[Callable[[int], Iterable[Any]]]:
        with handle.connect() as reader:
            yield lambda epoch: reader.batches(
                "train", batch_size=BATCH_SIZE, epoch=epoch, continues=epoch + 1 < trial.epochs
            )

    with pipeline:
        handle = pipeline.handle()
        with handle.connect() as reader:  # starts the preprocessors
            for _ in reader.batches("warm", batch_size=32, epoch=0):
                pass
        before = pipeline.stats().preprocessed
        yield opened, lambda: pipeline.stats().preprocessed - before


def in_parts(dataset: Photographs) -> dict[str, Any]:
    """The data set in parts, of which the decoded photographs are kept."""
    num_steps = len(dataset.transform.transforms)
    train, augment, finish = take_apart(dataset, augment=0, finish=num_steps - NUM_ELEMENTWISE)
    return {"train": train, "augment": {"train": augment}, "finish": {"train": finish}}


def photographs(request: dict[str, Any]) -> Photographs:
    return Photographs(request["folder"], size=request["samples"], our_crop=request["our_crop"])


# -- trials ---------------------------------------------------------------------------------------


def read_all(trial: Trial, epoch_of: Callable[[int], Iterable[Any]], num_samples: int) -> Report:
    """Be the trial."""
    report, began, first = Report(), time.perf_counter(), None
    for epoch in range(trial.epochs):
        seen: Counter[int] = Counter()
        for images, numbers in epoch_of(epoch):
            images.numpy().reshape(-1).view(np.int64).sum()  # reads every byte
            seen.update(numbers.tolist())
            now = time.perf_counter()
            first = first or now
            report.samples_after_first += len(numbers) if now > first else 0
            report.reading_s = now - first
            time.sleep(trial.sleep_s * len(numbers))
            if trial.seconds is not None and now - began > trial.seconds:
                report.samples += seen.total()
                report.wrong += seen.total() - len(seen)
                return report
        report.samples += seen.total()
        report.wrong += seen.total() - len(seen) + num_samples - len(seen)
    return report


class Crew:
    """Trials that begin when they are told to, `slots` at a time."""

    def __init__(
        self,
        trials: Iterable[Trial],
        opened: Callable[[Trial], Opened],
        *,
        num_samples: int,
        slots: int,
    ) -> None:
        self._opened = opened
        self._num_samples = num_samples
        self._waiting = deque(trials)
        self._begun: dict[Connection, int] = {}
        for _ in range(min(slots, len(self._waiting))):
            self._begin()
        for pipe in self._begun:
            pipe.recv()

    def go(self) -> list[Report]:
        """Let them read to the end; a trial that ends makes room for the next."""
        for pipe in self._begun:
            pipe.send("go")
        reports = []
        while self._begun:
            for pipe in wait(list(self._begun)):
                assert isinstance(pipe, Connection)
                reports.append(pipe.recv())
                os.waitpid(self._begun.pop(pipe), 0)
                if self._waiting:
                    follower = self._begin()
                    follower.recv()
                    follower.send("go")
        return reports

    def _begin(self) -> Connection:
        trial = self._waiting.popleft()
        pipe, theirs = multiprocessing.Pipe()
        pid = os.fork()
        if pid == 0:
            pipe.close()
            try:
                self._run(trial, theirs)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        self._begun[pipe] = pid
        return pipe

    def _run(self, trial: Trial, pipe: Connection) -> None:
        torch.set_num_threads(1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(PATIENCE_S)
        with self._opened(trial) as epoch_of:
            pipe.send("ready")
            pipe.recv()
            pipe.send(read_all(trial, epoch_of, self._num_samples))


def main() -> None:
    """Answer requests: each is one setting, then "go", then "end"."""
    torch.set_num_threads(1)
    side = {"dataloaders": dataloaders, "ours": ours}[sys.argv[1]]
    # What libraries print must not get among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what tidies up
    lines = iter(sys.stdin)
    for line in lines:
        request = json.loads(line)
        with side(request) as (opened, preprocessed):
            trials = [Trial(**trial) for trial in request["trials"]]
            slots = request.get("slots") or len(trials)
            crew = Crew(trials, opened, num_samples=request["samples"], slots=slots)
            answer("ready")
            next(lines)
            answer([asdict(report) for report in crew.go()])
            next(lines)
            made = preprocessed()
        answer(made)


if __name__ == "__main__":
    main()
