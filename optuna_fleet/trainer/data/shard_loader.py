"""A rank's data: which batches it gets, and what part of each it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from optuna_fleet.arguments import check_that, is_a
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.reader.client import InlineClient, PipelineClient
from optuna_fleet.trainer.data.feed import feed
from optuna_fleet.trainer.data.telling import Telling
from optuna_fleet.trainer.gradients.weights import Share
from optuna_fleet.trainer.nested import lengths_in
from optuna_fleet.trainer.randomness import seed_gpu
from optuna_fleet.trainer.run_parts import Asked, Bounds, Parts
from optuna_fleet.trainer.saving import Leaving
from optuna_fleet.trainer.training_state import TrainingState

_UNPREPARED = (
    "without trial.prepare(model, optimizer) it stays on one device; it never moves nor resumes."
)
_OTHER_ROWS = (
    "The collate_fn of data set '{name}' makes other rows than one for each sample: devices would "
    "weigh their parts of a batch by samples that are not in them. So that its results do not "
    "depend on the number of devices, the trial trains on one. Leave samples out of the data set "
    "instead, or of what a `sampler` gives."
)


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass over batches, from the step `first` on."""

    asked: Asked
    number: int
    batches: Any
    first: int
    is_shuffled: bool
    can_leave: bool


class ShardLoader:
    """What `FleetTrial.batches` does."""

    def __init__(
        self,
        parts: Parts,
        pipeline: PipelineClient | InlineClient | None,
        kept: TrainingState,
        leaving: Leaving,
        telling: Telling,
    ) -> None:
        self._gives_whole_batches = False
        self._parts = parts
        self._session = parts.session
        self._run = parts.run
        self._widths = parts.widths
        self._weights = parts.weights
        self._position = parts.position
        self._device = parts.device
        self._pipeline = pipeline
        self._kept = kept
        self._modules = kept.modules
        self._leaving = leaving
        self._telling = telling
        self._batch_size: int | None = None  # that was given last
        self._seeded_for: tuple[int, int] | None = None
        self._read_outside: Counter[str] = Counter()
        self._num_passes = 0
        if isinstance(pipeline, PipelineClient):
            pipeline.begin(parts.run.run_id, telling.stopwatch.wait)

    @property
    def _place(self) -> tuple[int, int]:
        """This rank among those that share a batch, and their number."""
        return (0, 1) if self._gives_whole_batches else (self._run.rank, self._run.world_size)

    def batches(
        self, name: str, batch_size: int | None, *, drop_last: bool, movable: bool = False
    ) -> Shards:
        """See `FleetTrial.batches`."""
        if self._pipeline is None:
            raise FleetConfigError(
                "trial.batches() needs data: pass it as FleetExecutor(SharedPipeline(train=..., "
                "...))."
            )
        batch_size = self._batch_size if batch_size is None else batch_size
        if batch_size is None:
            raise FleetConfigError(
                f"trial.batches({name!r}) was called without `batch_size`, and no other call gave "
                "one yet: give that of the whole trial, over all its devices: "
                f"trial.batches({name!r}, batch_size=...)."
            )
        check_that("movable", movable, is_a(bool), "be True or False")
        shards = Shards(self, Asked(name, batch_size, drop_last), movable=movable)
        len(shards)  # checks the arguments
        self._batch_size = batch_size
        return shards

    def num_samples(self, name: str) -> int:
        """Of a data set."""
        assert self._pipeline is not None
        return int(self._pipeline.spec.dataset(name).num_samples)

    def give_whole_batches(self, *, is_whole: bool) -> None:
        """Give each rank all of a batch from now on, as if it were alone; or its share."""
        self._gives_whole_batches = is_whole

    def num_steps(self, asked: Asked) -> int:
        """Number of global batches in an epoch."""
        return len(self._batches(asked))

    def _batches(self, asked: Asked, first_step: int = 0) -> Any:
        """Those of a pass, but for the first ones."""
        assert self._pipeline is not None
        rank, world_size = self._place
        read = partial(
            self._pipeline.read,
            asked.name,
            batch_size=asked.batch_size,
            drop_last=asked.drop_last,
            rank=rank,
            world_size=world_size,
            dummy=True,
        )
        position, periods = self._position, self._position.periods
        if periods is not None and self._pipeline.spec.dataset(asked.name).shuffled:
            return periods.batches(read, position.epoch, first_step)
        goes_on = position.epoch + 1 < position.num_epochs
        return read(epoch=position.epoch, first_step=first_step, continues=goes_on)

    def read(self, asked: Asked, *, movable: bool) -> Iterator[Any]:
        """Yield this rank's shards, on the trial's device."""
        one = self._open(asked, movable=movable)
        try:
            yield from self._read(one)
        finally:
            self._close(one)
        # While all ranks are here: some may not look at the totals.
        if movable:
            self._parts.totals.merge()
        if one.is_shuffled:
            self._kept.check_together()

    def _read(self, one: _Pass) -> Iterator[Any]:
        assert self._pipeline is not None
        finish = self._pipeline.finisher(one.asked.name)
        with closing(feed(one.batches, self._device, finish)) as fed:
            for step, (batch, data) in enumerate(fed, one.first):
                self._session.check()
                if one.can_leave:
                    self._leaving.come_to(step, one.number)
                self._session.begin_batch()
                trains = self._trains(one.is_shuffled)
                in_step = trains or self._normalises()
                # Every rank takes part in a step that trains, if need be with a padding sample.
                if batch.local_size == 0 and not in_step:
                    continue
                share = Share(batch.local_size, batch.global_size)
                self._weights.hand_out(
                    one.number,
                    share,
                    lockstep=in_step,
                    trains=trains,
                    is_whole=self._gives_whole_batches,
                )
                if trains:
                    self._check_rows(one.asked.name, data, batch.local_size)
                    self._begin_step()
                yield data
                if trains:
                    self._telling.trained(one.number, batch.global_size)

    def _open(self, asked: Asked, *, movable: bool) -> _Pass:
        assert self._pipeline is not None
        if not self._modules and not self._position.reads_unprepared:
            self._position.reads_unprepared = True
            self._widths.bounds = Bounds(max_devices=1)
            self._session.remark(["unprepared"], _UNPREPARED)
        can_leave = movable and not self._gives_whole_batches
        can_leave = self._leaving.begin_pass(movable=can_leave)
        dataset = self._pipeline.spec.dataset(asked.name)
        is_shuffled = dataset.shuffled
        self._telling.reach(asked, dataset.num_samples, trains=is_shuffled, movable=can_leave)
        self._check_order(asked.name, is_shuffled)
        self._num_passes += 1
        first, goes_on = self._kept.first_step() if can_leave else (0, False)
        if self._trains(is_shuffled):
            self._telling.begin_pass(self._num_passes)
        if goes_on:  # with the generator that the checkpoint has
            self._seeded_for = (self._position.loop, self._position.epoch)
        batches = self._batches(asked, first)
        return _Pass(asked, self._num_passes, batches, first, is_shuffled, can_leave)

    def _close(self, one: _Pass) -> None:
        self._weights.close(one.number)
        if one.can_leave:
            self._leaving.end_pass()
        self._telling.end_pass(one.number)

    def _begin_step(self) -> None:
        # Dropout's noise must not be the same in all shards. The CPU's generator stays alike on
        # all ranks: objectives decide by it.
        place = (self._position.loop, self._position.epoch)
        if self._run.world_size > 1 and self._device.type != "cpu" and place != self._seeded_for:
            self._seeded_for = place
            place_of_rank = (*place, self._place[0])
            seed_gpu(self._device.type, self._run.seed, self._run.number, place_of_rank)

    def _check_rows(self, name: str, data: Any, size: int) -> None:
        """Check what a ``collate_fn`` has made: gradients are weighed by samples."""
        assert self._pipeline is not None
        if self._run.world_size == 1 or not size:
            return
        if self._pipeline.spec.dataset(name).collate and size not in (lengths_in(data) or {size}):
            raise self._weights.too_wide(_OTHER_ROWS.format(name=name))

    def _trains(self, is_shuffled: bool) -> bool:
        """Whether the step that comes may end in `backward`, where the ranks communicate.

        A model may be trained in eval mode, but then on training data.
        """
        return torch.is_grad_enabled() and (is_shuffled or any(map(_is_trained, self._modules)))

    def _normalises(self) -> bool:
        """Whether BatchNorm communicates in a step without gradients."""
        if self._place[1] == 1 or torch.is_grad_enabled():
            return False
        return any(
            layer.training
            for module in self._modules
            for layer in module.modules()
            if isinstance(layer, _BatchNorm)
        )

    def _check_order(self, name: str, has_epochs: bool) -> None:
        if not has_epochs or self._position.is_inside:
            return
        self._read_outside[name] += 1
        if self._read_outside[name] == 2:
            self._session.warn(
                f"Data set '{name}' is read again outside of "
                "trial.epochs(): all such passes have the same order and augmentation. Use `for "
                "epoch in trial.epochs(n):`."
            )


class Shards:
    """One epoch's batches, this rank's share of each: what `FleetTrial.batches` returns."""

    def __init__(self, loader: ShardLoader, asked: Asked, *, movable: bool) -> None:
        self._loader = loader
        self._asked = asked
        self._movable = movable

    @property
    def most_samples(self) -> int:
        """Of a batch, over all ranks."""
        return min(self._asked.batch_size, self._loader.num_samples(self._asked.name))

    def __len__(self) -> int:
        """Number of steps in the epoch, the same on every rank."""
        return self._loader.num_steps(self._asked)

    def __iter__(self) -> Iterator[Any]:
        return self._loader.read(self._asked, movable=self._movable)


def _is_trained(module: torch.nn.Module) -> bool:
    return module.training and any(p.requires_grad for p in module.parameters())
