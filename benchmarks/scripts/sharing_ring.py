"""The yardstick of `sharing.py`: the least that can share samples, a ring that all trials map.

Preprocessors write each sample into its slot, trials read their batches where they lie; all pages
are mapped before it starts. It knows one data set, one order and one batch size; the slowest trial
holds up the others, one that dies holds them up for ever, and nothing is kept for later.
"""

from __future__ import annotations

import mmap
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sharing_crew import Epochs, Trial, serve
from sharing_photos import dataset_of

SLOTS = 1024
POLL_S = 0.5e-3
ENDED = 1 << 62
MADV_POPULATE_WRITE = 23  # Linux 5.14


class Ring:
    """The slots; who has filled them up to where, and up to where each trial has read."""

    def __init__(self, dataset: Any, *, workers: int, trials: int) -> None:
        image = dataset[0][0]
        self._memory = mmap.mmap(-1, SLOTS * image.nbytes)
        self.images = torch.frombuffer(self._memory, dtype=image.dtype).view(SLOTS, *image.shape)
        self.numbers, self.filled, self.read = (
            np.frombuffer(mmap.mmap(-1, 8 * size), dtype=np.int64)
            for size in (SLOTS, workers, trials)
        )
        self.read[:] = -SLOTS  # nobody has begun
        self.filled[:] = -workers
        self._dataset, self._workers = dataset, workers

    def touch(self) -> None:
        """Has this process map all pages now."""
        self._memory.madvise(MADV_POPULATE_WRITE)

    def fill(self, worker: int, num_epochs: int) -> None:
        """Be a preprocessor, of every so manyth sample: when all have read what lies there."""
        self.touch()
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(0)  # the same order for all
        place = worker
        for epoch in range(num_epochs):
            order = torch.randperm(len(self._dataset), generator=generator).tolist()
            while place < (epoch + 1) * len(order):
                while place >= self.read.min() + SLOTS:
                    time.sleep(POLL_S)
                sample = self._dataset[order[place % len(order)]]
                self.images[place % SLOTS], self.numbers[place % SLOTS] = sample
                self.filled[worker] = place
                place += self._workers

    def batches(self, trial: int, begin: int, end: int, size: int) -> Iterator[Any]:
        """Yields these places in batches, which must not reach beyond the ring's end."""
        for place in range(begin, end, size):
            self.read[trial] = place
            stop = min(place + size, end)
            while self.filled.min() < stop - self._workers:
                time.sleep(POLL_S)
            slots = slice(place % SLOTS, (stop - 1) % SLOTS + 1)
            yield self.images[slots], torch.from_numpy(self.numbers[slots])


@contextmanager
def setup(request: dict[str, Any]) -> Iterator[tuple[Epochs, Callable[[], Any]]]:
    workers, length = request["preprocessors"], request["samples"]
    ring = Ring(dataset_of(request), workers=workers, trials=len(request["trials"]))
    num_epochs = max(Trial(**trial).epochs for trial in request["trials"])
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=ring.fill, args=(n, num_epochs)) for n in range(workers)]
    for process in processes:
        process.start()
    num_begun = context.Value("q", 0)

    @contextmanager
    def epochs(trial: Trial) -> Iterator[Iterable[Any]]:
        with num_begun.get_lock():
            mine = num_begun.value
            num_begun.value += 1
        ring.touch()
        spans = (range(e * length, (e + 1) * length) for e in range(trial.epochs))
        yield (ring.batches(mine, s.start, s.stop, trial.batch_size) for s in spans)
        ring.read[mine] = ENDED

    yield epochs, lambda: None
    for process in processes:
        process.kill()
        process.join()


if __name__ == "__main__":
    serve(setup)
