"""Data-parallel training of one trial on this rank: what `FleetTrial`'s methods do.

Imports torch; a trainer imports this module when an objective first needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from optuna_fleet.arguments import check_number
from optuna_fleet.events import EpochDecision
from optuna_fleet.exceptions import FleetConfigError, TrainerLostError
from optuna_fleet.pipeline.reader.client import PipelineClient
from optuna_fleet.pipeline.reader.inline import InlineClient
from optuna_fleet.trainer.began_anew import BeganAnew
from optuna_fleet.trainer.checkpoints import checkpoint
from optuna_fleet.trainer.checkpoints.resuming import Resuming
from optuna_fleet.trainer.checkpoints.saving import Saver
from optuna_fleet.trainer.data.reading import EpochPosition, Periods
from optuna_fleet.trainer.data.shard_loader import ShardLoader
from optuna_fleet.trainer.gradients import batchnorm, collectives
from optuna_fleet.trainer.gradients.reducer import Reducer
from optuna_fleet.trainer.gradients.replicas import Net
from optuna_fleet.trainer.gradients.weights import Weights
from optuna_fleet.trainer.groups import can_leave_alone, join_group_of, leave_group
from optuna_fleet.trainer.moves.moving import Moving
from optuna_fleet.trainer.moves.regrouping import Regrouping
from optuna_fleet.trainer.moves.totals import Totals
from optuna_fleet.trainer.moves.within_epoch import WithinEpoch
from optuna_fleet.trainer.parts import Parts
from optuna_fleet.trainer.pipeline_parallel.pipeline import Pipeline
from optuna_fleet.trainer.pipeline_parallel.staging import make_pipeline
from optuna_fleet.trainer.prepared import Prepared
from optuna_fleet.trainer.session import Session, Yielded
from optuna_fleet.trainer.splitting.split_check import SplitCheck
from optuna_fleet.trainer.steps import Steps
from optuna_fleet.trainer.widths import Bounds, go_on_with_fewer, stay_alone
from optuna_fleet.wire.calls import EndEpoch
from optuna_fleet.wire.messages import RunTrial, StopAt, Usage

_NESTED = (
    "A loop over trial.epochs() or trial.steps() has another one in it: a trial that moves, or is "
    "run again, could not go on there. Make the outer one `for fold in range(n)`, say: the loops "
    "that are done are then passed over."
)


class Training:
    """One rank's part in a run: its prepared objects, its place in the epochs, its data.

    Joins the trial's process group, so every rank of a trial must make one.

    Attributes:
        parts: What it is made of.
        moving: Makes its checkpoints.
        batches: See `FleetTrial.batches`.
        began_anew: Tells what began anew when it moved.
        in_stages: Its pipeline, if any.
        is_stuck: After the end: this process can't leave the group, nor join another one.
    """

    def __init__(
        self,
        session: Session,
        pipeline: PipelineClient | InlineClient | None,
        kind: str,
    ) -> None:
        self._session = session
        self._pipeline = pipeline
        self._waited_s = pipeline.waited_s if pipeline else 0.0
        self.device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", 0)
        self.is_stuck = False
        self.in_stages: Pipeline | None = None
        self._weights = Weights()
        self._weights.on_too_wide = self.go_on_with_fewer
        self._objects: list[Any] = []
        reducer, state = Reducer(self._weights, session.remark), dict[str, Any]()
        self._position = EpochPosition()
        self.totals = Totals(self._weights, self.device, self._gather)
        self.parts = Parts(
            session=session,
            device=self.device,
            objects=self._objects,
            state=state,
            position=self._position,
            steps=Steps(self._objects, session.warn, reducer, self._weights),
            weights=self._weights,
            reducer=reducer,
            net=Net(self._objects, state, self._weights),
            totals=self.totals,
            saver=Saver(session),
        )
        self._prepared = Prepared(self.parts)
        self._resuming: Resuming | None = None
        self.began_anew = BeganAnew(session, self._objects, self._prepared.modules, state)
        self._within = WithinEpoch(
            self.parts,
            at_step=self.began_anew.begin_batch,
            save=lambda step: self.moving.save(step),
            leave=self._leave_within,
            resume=self._resume_within,
        )
        self._split_check = self._new_split_check()
        self._loader = ShardLoader(
            self.parts, pipeline, self._prepared.modules, self._within, self._split_check
        )
        self.batches = self._loader.batches
        self.moving = Moving(self.parts)
        self._regrouping = Regrouping(self.parts, self.moving, self._prepared)
        try:
            self._begin()
        except BaseException:
            self._stop_watching()  # nobody ends what has not begun
            raise

    def _begin(self) -> None:
        """Join the other ranks, with what the trial goes on with."""
        num_damaged = self._resume()  # may fail, so before anybody waits for it
        join_group_of(self._run, self.device.type)
        if self._run.checkpoints:
            self._check_alike(num_damaged)
        self.moving.begin_run()

    @property
    def _run(self) -> RunTrial:
        return self._session.run

    def _new_split_check(self) -> SplitCheck | None:
        """On one device, unless the trial will never have more."""
        if self._run.world_size > 1 or self._run.num_devices == 1:
            return None
        found = partial(stay_alone, self._session)
        modules, reducer = self._prepared.modules, self.parts.reducer
        return SplitCheck(found, self._session.remark, modules, reducer)

    def go_on_with_fewer(self, why: str, max_devices: int) -> None:
        """See `widths.go_on_with_fewer`."""
        go_on_with_fewer(self._session, self._loader.bounds, why, max_devices)

    def _resume(self) -> int:
        """Read the newest good checkpoint; return how many were passed over."""
        saved, problems = self.parts.saver.newest()
        for problem in problems:
            self._session.warn(problem)
        if saved is not None:
            self._take(saved)
        return len(problems)

    def _take(self, saved: checkpoint.Checkpoint) -> Resuming:
        """Go on from that."""
        self._resuming = Resuming(saved, self.parts)
        self._session.reports.begin_with(saved.history)
        return self._resuming

    def _check_alike(self, num_damaged: int) -> None:
        own = [num_damaged, num_damaged**2]  # of unlike numbers, no one equals both means
        if collectives.all_reduce_sum(own) != [self._run.world_size * number for number in own]:
            raise TrainerLostError("the ranks did not all read the same checkpoint")

    @property
    def is_broken(self) -> bool:
        """See `Pipeline`."""
        return self.in_stages is not None and self.in_stages.is_broken

    def end(self, *, alone: bool) -> Usage:
        """Leave the group, unless that could take for ever; return where the time went.

        Args:
            alone: The other ranks may not be at their end.
        """
        alone = alone or self.is_broken
        self.moving.end()
        if self.in_stages is not None:
            self.in_stages.close(alone=alone)
        self._stop_watching()
        self.parts.saver.finish()  # or the file would appear when nobody expects it any more
        # Its peers end when the driver has heard of this. A process' end waits for nobody.
        self.is_stuck = alone and not can_leave_alone(self.device.type)
        if not self.is_stuck:
            leave_group()
        return self._usage()

    def _stop_watching(self) -> None:
        """Hear no more of modules and optimizers: that would keep the trial's memory."""
        self.parts.steps.close()
        self.parts.reducer.close()
        self._prepared.close()
        batchnorm.end()
        self._weights.end()
        if self._split_check is not None:
            self._split_check.close()

    def _usage(self) -> Usage:
        """Where the time went in this run."""
        waited_s = self._pipeline.waited_s if self._pipeline else 0.0
        spent_s, self._waited_s = waited_s - self._waited_s, waited_s
        return Usage(
            probing_s=self._loader.reached_after_s or 0.0,
            profiling_s=self._loader.stopwatch.total_s,
            data_wait_s=spent_s,
        )

    @property
    def state(self) -> dict[str, Any]:
        """See `FleetTrial.state`."""
        self.arrive()
        return self.parts.state

    @property
    def shard_size(self) -> int:
        """Samples of the present batch on this rank."""
        size = self._weights.present.local_size
        return size if self._split_check is None else self._split_check.size(size)

    def num_samples(self, name: str) -> int:
        """See `FleetTrial.num_samples`."""
        return self._loader.num_samples(name)

    def give_whole_batches(self, is_whole: bool) -> None:
        """See `FleetTrial.give_whole_batches`."""
        self._loader.gives_whole_batches = is_whole

    # -- prepare ----------------------------------------------------------------------------------

    def prepare(
        self, *objects: Any, min_devices: int | None = None, max_devices: int | None = None
    ) -> Any:
        """See `FleetTrial.prepare`."""
        if self.in_stages is not None:
            self.in_stages.check_beside(objects)
        if min_devices is not None or max_devices is not None:
            most = 1 if self._position.reads_unprepared else max_devices
            self._loader.bounds = Bounds.checked(min_devices, most, self._run)
        self._prepared.add(objects, self._resuming)
        return objects[0] if len(objects) == 1 else objects

    def pipeline(self, model: Any, optimizer: Any, loss: Any, **options: Any) -> Pipeline:
        """See `FleetTrial.pipeline`."""
        if self._objects:
            raise FleetConfigError(
                "trial.pipeline() must come before trial.prepare(), and only once: a trial trains "
                "one model in stages."
            )
        self._check_no_split()
        pipeline = make_pipeline(model, optimizer, loss, options, self.parts, self._loader)
        self.in_stages = pipeline
        self._prepared.modules.append(model)
        for position, thing in enumerate(pipeline.objects):
            self._objects.append(thing)
            if self._resuming is not None:
                self._resuming.prepared(thing, position)
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
        self.arrive()
        self._position.loop += 1
        loop = self._position.loop
        first = 0 if self._resuming is None else self._resuming.begin_loop()
        if first is None:
            return
        self.moving.begin_loop()
        self._position.is_inside, self._position.num_epochs = True, num_epochs
        with self._position.counting(periods):
            for epoch in range(first, num_epochs):
                self._position.epoch = self._session.epoch = epoch
                self._within.begin_epoch()
                self.parts.reducer.begin_epoch()
                if epoch == first:
                    self.began_anew.begin_loop()
                yield epoch
                if self._position.loop != loop:
                    raise FleetConfigError(_NESTED)
                if self.in_stages is not None:
                    self.in_stages.flush()
                self._loader.end_epoch()
                if epoch + 1 == num_epochs:
                    break
                if not self._goes_on_after(epoch):
                    break
        self._position.is_inside = False

    def _goes_on_after(self, epoch: int) -> bool:
        # First what needs no other rank: one that left this epoch early is told of at once.
        last_step = self._session.reports.last_step
        decision = self._session.ask(EndEpoch, epoch=epoch, last_step=last_step)
        self.parts.net.check()
        if decision is EpochDecision.YIELD and self.moving.has_left():
            self._session.unwind(Yielded)  # even if the objective catches everything
        if decision is EpochDecision.CHECKPOINT:
            self.moving.save()
        return decision is not EpochDecision.STOP

    def check_ranks(self) -> None:
        """See `Net.check`; a pass under way is checked when it is over."""
        if not self._weights.is_reading:
            self.parts.net.check()

    def check_resumed(self) -> None:
        """See `Resuming`; the objective has returned."""
        if self._resuming is not None:
            self._resuming.check_reached()

    # -- moves within an epoch --------------------------------------------------------------------

    def _resume_within(self) -> tuple[int, bool]:
        if self._resuming is None:
            return 0, False
        place = self._resuming.begin_pass()
        if self._session.joins:
            self._regrouping.settle()
            self._loader.begin_run()
        return place

    def arrive(self) -> None:
        """What comes now needs what the others have in memory, where there are others."""
        if self._session.run.rehearses:
            resuming = self._take(self._regrouping.arrive())
            for position, thing in enumerate(self._objects):
                resuming.prepared(thing, position)

    def _leave_within(self, step: int, order: StopAt) -> bool:
        """Leave at that step; return whether another run goes on here, if not by leaving."""
        can_join = self._within.can_be_joined
        if not self._regrouping.stop(step, order.stays, self._usage, can_join=can_join):
            return False
        if self._run.world_size > 1:
            self._check_no_split()
            self._prepared.begin_run()
        self._loader.begin_run()
        return True

    def _check_no_split(self) -> None:
        if self._split_check is not None:
            self._split_check.close()
            self._split_check = self._loader.split_check = None

    # -- losses -----------------------------------------------------------------------------------

    def weighted(self, loss: Any, weight: Any, *, fetched_ahead: bool) -> Any:
        """See `FleetTrial.weighted`."""
        collectives.one_number(loss, "loss")
        own = collectives.one_weight(weight)
        if self._run.world_size == 1:
            if self._split_check is not None:
                self._split_check.weigh(loss, weight)
            return loss
        return self._weights.weigh(loss, own, fetched_ahead=fetched_ahead)

    # -- reductions -------------------------------------------------------------------------------

    def sum(self, value: Any) -> Any:
        """See `FleetTrial.sum`."""
        self._weights.check_step("trial.sum")
        self._weights.begin("trial.sum")
        return collectives.all_reduce_sum(value, alone=self.in_stages is not None)

    def _gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        return [own] if self.in_stages is not None else checkpoint.gather(own)

    def mean(self, value: Any, weight: float | None) -> Any:
        """See `FleetTrial.mean`."""
        self._weights.check_step("trial.mean")
        self._weights.begin("trial.mean")
        return collectives.mean(value, weight, alone=self.in_stages is not None)
