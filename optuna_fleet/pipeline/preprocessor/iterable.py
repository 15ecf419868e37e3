"""Data that come as a stream (torch's ``IterableDataset``): one sample of each shard in turn."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from optuna_fleet.pipeline.preprocessor import payload
from optuna_fleet.pipeline.preprocessor.order import seed_order, seed_sample
from optuna_fleet.wire import packing

_MOST_PASSES = 16
"""That are under way at a time: one for each place at which somebody reads."""

_LONG_S = 10.0
_COUNTING = (
    "Stream %r has no len(), so it is read once to count its samples: %d of them in %g s, and it "
    "goes on. Give its class a __len__(self) to save that. An epoch is one pass: of a stream that "
    "never ends, each shard must end somewhere, as by itertools.islice."
)

_logger = logging.getLogger(__name__)

_OVER = object()

_Place = tuple[int, str, int]
"""Seed, data set, epoch."""


class Stream:
    """Gives the samples of a stream by their position in an epoch, which is one pass.

    Each of ``num_shards`` has a copy of the stream for each pass, and is told which it is as a
    worker of a DataLoader is. Positions in order are read on from where a pass is; for an earlier
    one, as after a death, it is read from the start. ``at_work`` is called as what is not wanted
    is read.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        name: str,
        num_shards: int,
        seed: int,
        num_samples: int | None = None,
        at_work: Callable[[], object] = lambda: None,
    ) -> None:
        self._dataset = dataset
        self._place = seed, name
        self._num_shards = num_shards
        self._num_samples = num_samples
        self._at_work = at_work
        self._passes: list[_Pass] = []  # that was read last comes last

    @cached_property
    def _packed(self) -> bytes:
        return packing.pack(self._dataset)

    def sample(self, epoch: int, position: int) -> Any:
        """Returns the sample at a position of an epoch."""
        found = self._pass(epoch, position)
        while found.position < position:
            self._next(found)
            self._at_work()
        sample = self._next(found)
        is_last = found.position == self._num_samples
        if is_last and found.next() is not _OVER:
            raise ValueError(self._unlike("more"))
        if not is_last:
            self._passes = [*self._passes, found][-_MOST_PASSES:]
        return sample

    def count(self) -> int:
        """Returns how many samples the first epoch has."""
        found, tell_at_s = self._pass(0, 0), time.monotonic() + _LONG_S
        while found.next() is not _OVER:
            if time.monotonic() > tell_at_s:
                _logger.warning(_COUNTING, self._place[1], found.position, _LONG_S)
                tell_at_s = math.inf
        return found.position

    def _next(self, found: _Pass) -> Any:
        if (sample := found.next()) is _OVER:
            raise ValueError(self._unlike(f"only {found.position}"))
        return sample

    def _pass(self, epoch: int, position: int) -> _Pass:
        """Takes out the pass that is nearest; it is put back when all went well."""
        before = [p for p in self._passes if p.epoch == epoch and p.position <= position]
        if not before:
            return _Pass(self._packed, (*self._place, epoch), self._num_shards)
        found = max(before, key=lambda each: each.position)
        self._passes.remove(found)
        return found

    def _unlike(self, number: str) -> str:
        return (
            f"The stream gave {number} samples in one pass, but it is to have "
            f"{self._num_samples}: its len(), or as many as in the first pass. Each of "
            f"{self._num_shards} shards reads a copy of the stream: does it leave to each its "
            "part, by torch.utils.data.get_worker_info(), as under a DataLoader with as many "
            "workers? SharedPipeline(shards=1) reads it as a whole."
        )


class _Pass:
    """One pass over all shards, from its start to ``position``."""

    def __init__(self, packed: bytes, place: _Place, num_shards: int) -> None:
        *_, self.epoch = self.place = place
        self.position = 0
        # They begin when they are first asked: a pass that is not needed long costs nothing. With
        # a reference to it in each, what they have open would outlive it.
        whole = weakref.proxy(self)
        self._turns = deque(
            _shard(whole, packed, number, num_shards) for number in range(num_shards)
        )

    def next(self) -> Any:
        """Returns the next sample, which is seeded as such; ``_OVER`` at the end."""
        while self._turns:
            if (sample := next(self._turns[0], _OVER)) is not _OVER:
                self._turns.rotate(-1)
                self.position += 1
                return sample
            self._turns.popleft()
        return _OVER


def _shard(whole: _Pass, packed: bytes, number: int, num_shards: int) -> Iterator[Any]:
    """Reads a copy of the stream for a pass, with around it what it is to find there."""
    from torch.utils.data._utils import worker

    def surround(position: int) -> None:
        seed_sample(*whole.place, position, own)
        worker._worker_info = info

    dataset = packing.unpack(packed)
    own = payload.generators_in(dataset)
    seed = seed_sample(*whole.place, number, own)
    info = worker.WorkerInfo(id=number, num_workers=num_shards, seed=seed, dataset=dataset)
    if hasattr(dataset, "set_epoch"):
        seed_order(*whole.place, own)
        dataset.set_epoch(whole.epoch)
    surround(number)
    samples = iter(dataset)
    while True:
        surround(whole.position)
        if (sample := next(samples, _OVER)) is _OVER:
            return
        yield sample
