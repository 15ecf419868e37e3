"""Data-parallel training of one trial on this rank: what `FleetTrial`'s methods do.

Imports torch; a trainer imports this module when an objective first needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from optuna_fleet.arguments import check_number
from optuna_fleet.events import EpochDecision
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.reader.client import InlineClient, PipelineClient
from optuna_fleet.trainer.checkpoint import Captured, unpacked
from optuna_fleet.trainer.data.shard_loader import ShardLoader
from optuna_fleet.trainer.data.telling import Telling
from optuna_fleet.trainer.gradients import batchnorm, collectives
from optuna_fleet.trainer.gradients.reducer import Reducer
from optuna_fleet.trainer.gradients.weights import Weights
from optuna_fleet.trainer.groups import can_leave_alone, join_group, leave_group
from optuna_fleet.trainer.run_parts import Bounds, EpochPosition, Parts, Periods, Widths
from optuna_fleet.trainer.saving import Held, Leaving, Saver
from optuna_fleet.trainer.session import Session
from optuna_fleet.trainer.totals import Totals
from optuna_fleet.trainer.training_state import TrainingState
from optuna_fleet.virtual_workers import Pipeline
from optuna_fleet.wire.calls import AfterEpoch, EndEpoch
from optuna_fleet.wire.messages import Usage

_NESTED = (
    "A loop over trial.epochs() or trial.steps() has another one in it: a trial that moves, or is "
    "run again, could not go on there. Make the outer one `for fold in range(n)`, say: the loops "
    "that are done are then passed over."
)


class Training:
    """One rank's part in a run: its prepared objects, its place in the epochs, its data.

    Joins the trial's process group, so every rank of a trial must make one. With `held`, the trial
    goes on from the state that an earlier run left in this process's memory.

    Attributes:
        kept: The trial's state that survives moves and deaths: what checkpoints have.
        saver: Writes checkpoints.
        leaving: Saves the trial, and leaves its devices.
        loader: Its data.
        in_stages: Its pipeline, if any.
        is_stuck: After the end: this process can't leave the group, nor join another one.
    """

    def __init__(
        self,
        session: Session,
        pipeline: PipelineClient | InlineClient | None,
        kind: str,
        held: Held | None = None,
    ) -> None:
        self._session = session
        self._run = session.run
        self._pipeline = pipeline
        self._waited_s = pipeline.waited_s if pipeline else 0.0
        self.device = torch.device("cpu") if kind == "cpu" else torch.device(kind, 0)
        self.is_stuck = False
        self.in_stages: Pipeline | None = None
        widths = Widths(session)
        self.weights = Weights(widths.too_wide, session.begin_collective)
        self.totals = Totals(self.weights, self.device, self._gather)
        self._parts = parts = Parts(
            session=session,
            device=self.device,
            position=EpochPosition(),
            widths=widths,
            weights=self.weights,
            reducer=Reducer(self.weights, session.remark),
            totals=self.totals,
        )
        self.kept = TrainingState(parts)
        self.saver = Saver(session, held.saver if held else None)
        self.leaving = Leaving(parts, self.kept, self.saver)
        self._telling = Telling(parts, self.kept, self.leaving)
        self.loader = ShardLoader(parts, pipeline, self.kept, self.leaving, self._telling)
        try:
            self._join(held.content if held else None)
        except BaseException:
            self._stop_watching()  # `end` is not called on what was never made
            raise

    def _join(self, held: Captured | None) -> None:
        """Join the other ranks; if the trial is resumed, rank 0 reads its state and sends it."""
        if self._run.rank == 0 and self._run.resumes and held is None:
            held = self.saver.newest()  # may fail, so it comes before the other ranks wait for it
        join_group(self._run, self.device.type)
        if not self._run.resumes:
            return
        file = collectives.broadcast(held.file if held else None)
        if file is not None:
            self.kept.go_on_with(unpacked(file), self.device)

    @property
    def is_broken(self) -> bool:
        """See `Pipeline`."""
        return self.in_stages is not None and self.in_stages.is_broken

    def end(self, *, alone: bool) -> Usage:
        """Leave the process group, unless that could hang; return this rank's times.

        `alone`: the other ranks may still be at work.
        """
        alone = alone or self.is_broken
        if self.in_stages is not None:
            self.in_stages.close(alone=alone)
        self._stop_watching()
        # Wait for the write: else its file appears after the run is over
        if self.leaving.held is None:
            self.saver.finish()
        # If it can't leave the group alone, its process ends instead, which waits for no peer.
        self.is_stuck = alone and not can_leave_alone(self.device.type)
        if not self.is_stuck:
            leave_group()
        waited_s = self._pipeline.waited_s if self._pipeline else 0.0
        return Usage(
            probing_s=self._telling.reached_after_s or 0.0,
            profiling_s=self._telling.stopwatch.total_s,
            data_wait_s=waited_s - self._waited_s,
        )

    def _stop_watching(self) -> None:
        """Hear no more of modules and optimizers: that would keep the trial's memory."""
        self._parts.reducer.close()
        batchnorm.end()

    # -- prepare ----------------------------------------------------------------------------------

    def prepare(
        self,
        *objects: Any,
        named: Mapping[str, Any],
        kind: str | None,
        **said: Any,
    ) -> Any:
        """See `FleetTrial.prepare`; `said`: bounds and facts, for the allocator."""
        everything = (*objects, *named.values())
        if self.in_stages is not None:
            self.in_stages.check_beside(everything)
        said = {name: value for name, value in said.items() if value is not None}
        if self._parts.position.reads_unprepared:
            said["max_devices"] = 1
        if said:
            known = asdict(self._parts.widths.bounds)  # by earlier calls
            self._parts.widths.bounds = Bounds.checked(run=self._run, **known | said)
        self.kept.prepare(objects, named, kind)
        return everything[0] if len(everything) == 1 else everything

    def pipeline(self, model: Any, optimizer: Any, loss: Any, **options: Any) -> Pipeline:
        """See `FleetTrial.pipeline`."""
        if self.kept.objects:
            raise FleetConfigError(
                "trial.pipeline() must come before trial.prepare(), and only once: a trial trains "
                "one model in stages."
            )
        pipeline = Pipeline(model, optimizer, loss, options, self._parts, self._telling.need)
        self.loader.give_whole_batches(is_whole=True)
        self.in_stages = pipeline
        self.kept.in_parts = pipeline.holding
        self.kept.modules.append(model)
        for thing in pipeline.objects:
            self.kept.add(thing)
        return pipeline

    # -- epochs -----------------------------------------------------------------------------------

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """See `FleetTrial.epochs`."""
        self._session.check()
        check_number("num_epochs", num_epochs, least=1, whole=True)
        return self._epochs(num_epochs)

    def steps(self, num_steps: int, every: int) -> Iterator[int]:
        """See `FleetTrial.steps`."""
        self._session.check()
        periods = Periods.checked(num_steps, every)
        return self._epochs(len(periods), periods)

    def _epochs(self, num_epochs: int, periods: Periods | None = None) -> Iterator[int]:
        position = self._parts.position
        position.loop = loop = position.loop + 1
        first = self.kept.begin_loop()
        if first is None:
            return
        with position.counting(num_epochs, periods):
            for epoch in range(first, num_epochs):
                position.epoch = epoch
                self._session.begin_epoch(epoch)
                self.leaving.begin_epoch()
                self._parts.reducer.begin_epoch()
                yield epoch
                if position.loop != loop:
                    raise FleetConfigError(_NESTED)
                if self.in_stages is not None:
                    self.in_stages.flush()
                self._telling.end_epoch()
                if epoch + 1 == num_epochs or not self._goes_on_after(epoch):
                    break
        position.is_inside = False

    def _goes_on_after(self, epoch: int) -> bool:
        # First the call that needs no other rank: so a rank that left this epoch early shows at
        # once.
        last_step = self._session.reports.last_step
        after: AfterEpoch = self._session.ask(EndEpoch, epoch=epoch, last_step=last_step)
        self.kept.check_together()
        if after.decision is EpochDecision.YIELD:
            self.leaving.leave(stays=after.stays)
        elif after.decision is EpochDecision.CHECKPOINT:
            self.leaving.save()
        return after.decision is not EpochDecision.STOP

    def check_ranks(self) -> None:
        """That they are together; a pass under way is checked when it is over."""
        if not self.weights.is_reading:
            self.kept.check_together()

    # -- losses -----------------------------------------------------------------------------------

    def weighted(self, loss: Any, weight: Any, *, fetched_ahead: bool) -> Any:
        """See `FleetTrial.weighted`."""
        collectives.one_number(loss, "loss")
        own = collectives.one_weight(weight)
        if self._run.world_size == 1:
            return loss
        return self.weights.weigh(loss, own, fetched_ahead=fetched_ahead)

    # -- reductions -------------------------------------------------------------------------------

    def sum(self, value: Any) -> Any:
        """See `FleetTrial.sum`."""
        self.weights.check_step("trial.sum")
        self.weights.begin("trial.sum")
        return collectives.all_reduce_sum(value, alone=self.in_stages is not None)

    def _gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        return [own] if self.in_stages is not None else collectives.gather(own)

    def mean(self, value: Any, weight: float | None) -> Any:
        """See `FleetTrial.mean`."""
        self.weights.check_step("trial.mean")
        self.weights.begin("trial.mean")
        return collectives.mean(value, weight, alone=self.in_stages is not None)
