"""A rank's data: which batches it gets, what part of each it holds, how fast they are trained."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from optuna_fleet.arguments import check_that, is_a
from optuna_fleet.events import DataRequested, Model, RateMeasured
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.reader.client import PipelineClient
from optuna_fleet.pipeline.reader.inline_client import InlineClient
from optuna_fleet.trainer.data.feed import feed
from optuna_fleet.trainer.data.reading import Asked, Reading, Shards
from optuna_fleet.trainer.data.stopwatch import Stopwatch
from optuna_fleet.trainer.gradients.weights import Share
from optuna_fleet.trainer.leaving import Leaving
from optuna_fleet.trainer.nested import lengths_in
from optuna_fleet.trainer.prepared import Prepared
from optuna_fleet.trainer.randomness import seed_gpu
from optuna_fleet.trainer.run_parts import Parts
from optuna_fleet.trainer.session import Yielded
from optuna_fleet.trainer.widths import Bounds
from optuna_fleet.wire.messages import Trained

_LONG_S = 120.0
_UNPREPARED = (
    "without trial.prepare(model, optimizer) it stays on one device; it never moves nor resumes."
)
_NOT_CHECKED = (
    "It is not checked whether it gives the same on several devices, as it has asked for them "
    "(min_devices, trial.pipeline). See docs/objective.md."
)
_MOVABLE = (
    "An epoch took {seconds:.0f} s, and a trial moves to other devices at the end of one only. It "
    'can do so between two batches with trial.batches("train", ..., movable=True), if that is the '
    "first thing that the epoch reads, and the loop keeps its sums in trial.totals, and what else "
    "it carries from batch to batch in trial.state. Or cut epochs: trial.steps(n, every=...)."
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
    """What `FleetTrial.batches` does.

    Attributes:
        reached_after_s: When the objective first asked for data; None before.
        stopwatch: Measures the rate.
    """

    def __init__(
        self,
        parts: Parts,
        pipeline: PipelineClient | InlineClient | None,
        prepared: Prepared,
        leaving: Leaving,
    ) -> None:
        self.reached_after_s: float | None = None
        self.stopwatch = Stopwatch(parts.run.measure, parts.device)
        self._gives_whole_batches = False
        self._parts = parts
        self._session = parts.session
        self._run = parts.run
        self._widths = parts.widths
        self._weights = parts.weights
        self._position = parts.position
        self._device = parts.device
        self._pipeline = pipeline
        self._prepared = prepared
        self._modules = prepared.modules
        self._leaving = leaving
        self._reading = Reading(pipeline, parts.position) if pipeline else None
        self._batch_size: int | None = None  # that was given last
        self._has_reached_training = False
        self._reached: Model | None = None  # as told last
        self._seeded_for: tuple[int, int] | None = None
        self._samples_per_epoch = 0
        self._trained_loop: int | None = None  # the last, of which these are
        self._epoch_began = time.perf_counter()
        self._read_outside: Counter[str] = Counter()
        self._timed_pass: int | None = None
        self._num_passes = 0
        self._has_trained = False
        if isinstance(pipeline, PipelineClient):
            pipeline.begin(parts.run.run_id, self.stopwatch.wait)

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
        if batch_size is None and self._batch_size is None:
            raise FleetConfigError(
                f"trial.batches({name!r}) was called without `batch_size`, and no other call gave "
                "one yet: give that of the whole trial, over all its devices: "
                f"trial.batches({name!r}, batch_size=...)."
            )
        batch_size = self._batch_size if batch_size is None else batch_size
        assert batch_size is not None
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
        assert self._reading is not None
        return len(self._reading.batches(asked, self._place))

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
            self._parts.net.check()

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
                timed = self.stopwatch.active and trains and one.number == self._timed_pass
                if trains:
                    self._check_rows(one.asked.name, data, batch.local_size)
                    self._begin_step()
                yield data
                if trains:
                    self._tell_trained()
                if timed:
                    if (rate := self.stopwatch.stop(batch.global_size)) is not None:
                        self._tell_rate(rate)
                    self.stopwatch.start()

    def _open(self, asked: Asked, *, movable: bool) -> _Pass:
        assert self._pipeline is not None
        assert self._reading is not None
        if not self._modules and not self._position.reads_unprepared:
            self._position.reads_unprepared = True
            self._widths.bounds = Bounds(max_devices=1)
            self._session.remark(["unprepared"], _UNPREPARED)
        name = asked.name
        can_leave = movable and not self._gives_whole_batches
        can_leave = self._leaving.begin_pass(movable=can_leave)
        self._reach(name, asked.batch_size, movable=can_leave)
        is_shuffled = self._pipeline.spec.dataset(name).shuffled
        self._check_order(name, is_shuffled)
        self._num_passes += 1
        first, goes_on = self._prepared.kept.first_step() if can_leave else (0, False)
        if self._timed_pass is None and self._trains(is_shuffled):
            self._timed_pass = self._num_passes
            self.stopwatch.start()
        if goes_on:  # with the generator that the checkpoint has
            self._seeded_for = (self._position.loop, self._position.epoch)
        batches = self._reading.batches(asked, self._place, first)
        return _Pass(asked, self._num_passes, batches, first, is_shuffled, can_leave)

    def _close(self, one: _Pass) -> None:
        self._weights.close(one.number)
        if one.can_leave:
            self._leaving.end_pass()
        if self._timed_pass == one.number:
            self._timed_pass = None

    def _begin_step(self) -> None:
        # Dropout's noise must not be the same in all shards. The CPU's generator stays alike on
        # all ranks: objectives decide by it.
        place = (self._position.loop, self._position.epoch)
        if self._run.world_size > 1 and self._device.type != "cpu" and place != self._seeded_for:
            self._seeded_for = place
            place_of_rank = (*place, self._place[0])
            seed_gpu(self._device.type, self._run.seed, self._run.number, place_of_rank)

    def _check_rows(self, name: str, data: Any, size: int) -> None:
        """Check what a ``collate_fn`` has made: gradients are weighed by samples.

        Raises:
            TrialError: It has left some out, say; and the trial is on several devices.
        """
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

    # -- what the driver is told ------------------------------------------------------------------

    def _reach(self, name: str, batch_size: int, *, movable: bool) -> None:
        """Tells what the trial trains on; if it evaluates first, once more when it trains.

        And in each further loop how long that goes on, and how long its epochs are.
        """
        assert self._pipeline is not None
        dataset, position = self._pipeline.spec.dataset(name), self._position
        trains, samples = dataset.shuffled, dataset.num_samples
        periods = position.periods
        per_period = samples if periods is None else periods.every * min(batch_size, samples)
        max_epochs = position.num_epochs if position.is_inside else None
        if trains and position.loop != self._trained_loop:
            self._trained_loop, self._samples_per_epoch = position.loop, per_period
        is_first = self.reached_after_s is None
        if not is_first and (self._has_reached_training or not trains):
            if self._reached and max_epochs is not None:
                told = replace(
                    self._reached,
                    resumable=True,
                    max_epochs=max_epochs,
                    samples_per_epoch=self._samples_per_epoch,
                )
                if told != self._reached:
                    self._tell_reached(told)
            return
        if is_first:
            self.reached_after_s = time.perf_counter() - self._session.began
        self._has_reached_training = trains
        self._samples_per_epoch = per_period
        bounds = replace(self._widths.bounds, samples_per_epoch=per_period, max_epochs=max_epochs)
        self._tell_reached(
            Model(
                structure=self._structure(name, batch_size),
                resumable=self._position.is_inside,
                min_devices=bounds.min_devices,
                max_devices=bounds.most_for(batch_size),
                spans_types=bounds.spans_types,
                **bounds.facts(),
                movable=movable,
                traits=self._traits(movable=movable),
            )
        )
        if self._position.is_inside and bounds.min_devices > self._run.world_size:
            self._session.unwind(Yielded)  # nothing is trained on fewer; it is told of now
        if batch_size > samples:
            self._session.warn(
                f"batch_size={batch_size} is larger than data set '{name}' with its {samples} "
                f"samples: each epoch is one batch of {samples}."
            )

    def need(self, num_devices: int) -> NoReturn:
        """Leave the objective, which is to begin anew on no fewer devices.

        Raises:
            FleetConfigError: It reads no batches, and so can have no more devices.
        """
        self._widths.bounds = replace(self._widths.bounds, min_devices=num_devices)
        if self._reached is not None:
            most = self._widths.bounds.most_for(self._reached.max_devices)
            self._tell_reached(replace(self._reached, min_devices=num_devices, max_devices=most))
            self._session.unwind(Yielded)
        raise FleetConfigError(
            f"The model does not fit on {self._run.world_size} devices, but on {num_devices}. A "
            "trial can have several only if its batches come from trial.batches()."
        )

    def _tell_reached(self, reached: Model) -> None:
        self._reached = reached
        self._tell(DataRequested(run_id=self._run.run_id, model=reached))

    def _traits(self, *, movable: bool) -> frozenset[str]:
        if not self._modules:  # it stays on one device
            return frozenset()
        in_periods = self._position.periods is not None
        reads = "periods" if in_periods else "movable epochs" if movable else "epochs"
        traits = self._prepared.traits(f"reads {reads}")
        if not traits and self._run.num_of_all_types > 1:
            self._session.remark(["not checked"], _NOT_CHECKED)
        return traits

    def _structure(self, name: str, batch_size: int) -> str:
        """What decides the rate on devices of one type: parameter shapes, batch size, data."""
        digest = hashlib.sha256(f"{name}|{batch_size}".encode())
        for module in self._modules:
            digest.update(type(module).__qualname__.encode())
            for key, parameter in module.named_parameters():
                digest.update(f"{key}{tuple(parameter.shape)}{parameter.dtype}".encode())
        return digest.hexdigest()[:16]

    def end_epoch(self) -> None:
        """An epoch without a training batch has a pace too: others wait for its rate."""
        now = time.perf_counter()
        seconds, self._epoch_began = now - self._epoch_began, now
        if seconds >= _LONG_S and not self._leaving.is_movable and self._run.num_devices > 1:
            self._session.remark(["long epochs"], _MOVABLE.format(seconds=seconds))
        if self.stopwatch.active and self.stopwatch.is_unused and self._samples_per_epoch:
            self.stopwatch.give_up()
            self._tell_rate(self._samples_per_epoch / max(seconds, 1e-9))

    def _tell_trained(self) -> None:
        if not self._has_trained:
            self._has_trained = True
            self._tell(Trained(run_id=self._run.run_id))

    def _tell_rate(self, samples_per_s: float) -> None:
        self._tell(RateMeasured(run_id=self._run.run_id, samples_per_s=samples_per_s))

    def _tell(self, message: DataRequested | Trained | RateMeasured) -> None:
        if self._run.rank == 0:
            self._session.send(message)


def _is_trained(module: torch.nn.Module) -> bool:
    return module.training and any(p.requires_grad for p in module.parameters())
