"""Data-parallel training of one trial on this rank: what `FleetTrial`'s methods do.

Imports torch; a trainer imports this module when an objective first needs it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch

from optuna_fleet.events import EpochDecision
from optuna_fleet.exceptions import FleetConfigError, TrialError
from optuna_fleet.messages import RunTrial, Usage
from optuna_fleet.packing import plain
from optuna_fleet.pipeline.reader.client import PipelineClient
from optuna_fleet.pipeline.reader.inline import InlineClient
from optuna_fleet.trainer import checkpoint, reduction
from optuna_fleet.trainer.alike import come_apart
from optuna_fleet.trainer.groups import GroupSpec, join_group, leave_group
from optuna_fleet.trainer.left_behind import LeftBehind
from optuna_fleet.trainer.parallel import wrap_module
from optuna_fleet.trainer.reading import Place, Reading
from optuna_fleet.trainer.reading import Shards as Shards
from optuna_fleet.trainer.saving import Saver
from optuna_fleet.trainer.session import Session, Yielded
from optuna_fleet.trainer.unprepared import Unprepared

_GROUP_TIMEOUT_S = 600.0


def join_group_of(run: RunTrial, device_kind: str) -> None:
    """Join the group of a run's ranks, the default group of ``torch.distributed`` from now on."""
    spec = GroupSpec(
        rank=run.rank,
        world_size=run.world_size,
        prefix=run.group,
        store_host=run.store.host if run.store else "",
        store_port=run.store.port if run.store else None,
    )
    join_group(spec, "gloo" if device_kind == "cpu" else "nccl", _GROUP_TIMEOUT_S)


class Training:
    """One rank's part in a run: its prepared objects, its place in the epochs, its data.

    Joins the trial's process group, so every rank of a trial must make one.

    Attributes:
        is_stuck: After the end: this process can't leave the group, nor join another one.
    """

    def __init__(
        self, session: Session, pipeline: PipelineClient | InlineClient | None, kind: str
    ) -> None:
        self._session = session
        self._run = session.run
        self.device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", 0)
        self._kind = kind
        self.is_stuck = False
        self._objects: list[Any] = []
        self._modules: list[torch.nn.Module] = []
        self._place = Place()
        self._num_loops = 0
        self._reading = Reading(session, pipeline, self.device, self._modules, self._place)
        self.state: dict[str, Any] = {}
        self._checkpoint: checkpoint.Checkpoint | None = None
        self._saver = Saver(session)
        self._is_apart = False
        self._unprepared = Unprepared(
            self._objects,
            lambda text: session.tell("fleet", "warn", text),
        )
        self._left_behind = LeftBehind(
            self._objects if self._run.rank == 0 else (),  # the others hold the same
            self.state,
            self._unprepared.optimizers,
            session.remark,
        )
        join_group_of(session.run, kind)
        if self._run.checkpoint is not None:
            self._resume(self._run.checkpoint)

    def _resume(self, path: str) -> None:
        self._checkpoint, problems = checkpoint.load_newest(path)
        for problem in problems:
            self._session.tell("fleet", "warn", problem)
        if self._checkpoint is not None:
            self.state.update(self._checkpoint.state)
            self._session.reported[:0] = self._checkpoint.history

    def end(self, *, alone: bool) -> Usage:
        """Leave the group, unless that could take for ever; return where the time went.

        Args:
            alone: The other ranks may not be at their end.
        """
        self._unprepared.close()
        self._saver.finish()  # or the file would appear when nobody expects it any more
        # Its peers may be in a collective, and NCCL's end, abrupt or not, may wait for them, who
        # end when the driver has heard of this failure. The process' own end waits for nobody.
        self.is_stuck = alone and self._kind != "cpu" and self._run.world_size > 1
        if not self.is_stuck:
            leave_group()
        return Usage(
            probing_s=self._reading.reached_after_s or 0.0,
            profiling_s=self._reading.stopwatch.total_s,
        )

    @property
    def shard_size(self) -> int:
        """Samples of the present batch on this rank."""
        return self._reading.weights.local_size

    # -- prepare ----------------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """See `FleetTrial.prepare`."""
        for thing in objects:  # before any optimizer's state is made to follow them
            if isinstance(thing, torch.nn.Module):
                thing.to(self.device)
        prepared = tuple(self._prepare_one(thing) for thing in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_one(self, thing: Any) -> Any:
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise FleetConfigError(
                f"trial.prepare() was given a `{type(thing).__name__}`, but takes modules, "
                "optimizers, schedulers and other objects with `state_dict` and `load_state_dict`."
            )
        position = len(self._objects)
        self._objects.append(thing)
        if self._checkpoint is not None:
            self._restore(thing, position)
        elif isinstance(thing, torch.optim.Optimizer) and thing.state:
            thing.load_state_dict(thing.state_dict())  # moves it to where the parameters are now
        if isinstance(thing, torch.nn.Module):
            return self._parallel(thing)
        return thing

    def _restore(self, thing: Any, position: int) -> None:
        assert self._checkpoint is not None
        saved = self._checkpoint.objects
        if position >= len(saved) and self._num_loops >= self._checkpoint.loop:
            return  # made after the loop that was checkpointed
        if position >= len(saved):
            raise TrialError(
                f"trial.prepare() was called with more objects than when trial {self._run.number} "
                f"was checkpointed ({len(saved)}): an objective must prepare the same objects "
                "each time."
            )
        state = saved[position]
        if not isinstance(
            thing, torch.nn.Module
        ):  # which would copy; optimizers keep what they get
            state = copy.deepcopy(state)
        thing.load_state_dict(state)

    def _parallel(self, module: torch.nn.Module) -> torch.nn.Module:
        self._modules.append(module)
        if self._run.world_size == 1:
            return module
        return wrap_module(module, self._reading.weights, self.device)

    # -- epochs -----------------------------------------------------------------------------------

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """See `FleetTrial.epochs`."""
        self._session.check()
        if not isinstance(num_epochs, int) or num_epochs < 1:
            raise FleetConfigError(
                f"trial.epochs() was given {num_epochs!r}, but takes a number of epochs >= 1."
            )
        return self._epochs(num_epochs)

    def _epochs(self, num_epochs: int) -> Iterator[int]:
        self._num_loops += 1
        first = 0
        if self._checkpoint is not None:
            if self._num_loops < self._checkpoint.loop:
                return  # this loop was done before the checkpoint
            if self._num_loops == self._checkpoint.loop:
                first = self._checkpoint.epoch
                self._restore_all(self._checkpoint)
        self._place.is_inside, self._place.num_epochs = True, num_epochs
        for epoch in range(first, num_epochs):
            self._place.epoch = epoch
            self._left_behind.begin_epoch(sys._getframe(1))
            yield epoch
            self._reading.end_epoch()
            if epoch + 1 == num_epochs:
                break
            self._left_behind.end_epoch(sys._getframe(1))
            if not self._goes_on_after(epoch):
                break
        self._place.is_inside = False

    def _restore_all(self, saved: checkpoint.Checkpoint) -> None:
        """Once more: what came after `prepare` began anew (weights, a scheduler's first rate)."""
        for position, thing in enumerate(self._objects[: len(saved.objects)]):
            thing.load_state_dict(saved.objects[position])
            saved.objects[position] = {}  # its memory is needed
        self.state.update(saved.state)
        checkpoint.restore_rng(saved.rng)

    def _goes_on_after(self, epoch: int) -> bool:
        self._check_alike()
        decision = self._session.call("fleet", "end_epoch", epoch)
        if decision is EpochDecision.YIELD and self._has_landed(epoch + 1):
            self._session.unwind(Yielded)  # even if the objective catches everything
        if decision is EpochDecision.CHECKPOINT:
            self._save(epoch + 1)
        return decision is not EpochDecision.STOP

    def _check_alike(self) -> None:
        if self._is_apart or not (apart := come_apart(self._objects)):
            return
        self._is_apart = True
        shown = ", ".join(apart[:3]) + (", ..." if len(apart) > 3 else "")
        self._session.tell(
            "fleet",
            "warn",
            f"Its ranks have come apart: {shown}. On another number of "
            "devices it would give other results. What decides must be alike on all ranks: use "
            "trial.mean(loss) for it; prepare layers when the model is complete.",
        )

    def _has_landed(self, next_epoch: int) -> bool:
        """Write the checkpoint to leave with; a trial that can't keeps its devices for now."""
        self._saver.finish()
        self._save(next_epoch)
        return bool(reduction.all_reduce_sum(int(not self._saver.finish())) == 0)

    def _save(self, next_epoch: int) -> None:
        rng = checkpoint.gather_rng()
        if self._run.rank == 0 and not self._saver.is_busy:
            path = self._run.checkpoint_to
            self._saver.save(path, lambda: self._checkpoint_at(next_epoch, rng))

    def _checkpoint_at(self, next_epoch: int, rng: list[dict[str, Any]]) -> checkpoint.Checkpoint:
        modules = [i for i, o in enumerate(self._objects) if isinstance(o, torch.nn.Module)]
        return checkpoint.Checkpoint(
            loop=self._num_loops,
            epoch=next_epoch,
            objects=[thing.state_dict() for thing in self._objects],
            state=self.state,
            rng=rng,
            history=self._session.reported,
            modules=modules,
        )

    def leave_final_checkpoint(self, value: Any) -> None:
        """The objective returned `value`: leave its weights behind, if they are among the best."""
        path = self._run.final_to
        if path is None or self._run.rank > 0 or not self._objects:
            return
        try:
            is_wanted = self._session.call("fleet", "is_among_best", plain(value))
        except Exception:  # it can't be sent, say; the study will be told and say so
            return
        self._saver.finish()
        if is_wanted:
            self._saver.save(
                path, lambda: self._checkpoint_at(self._place.epoch + 1, []), keep_previous=False
            )
            self._saver.finish()

    # -- data -------------------------------------------------------------------------------------

    def batches(self, name: str, batch_size: int | None, *, drop_last: bool) -> Shards:
        """See `FleetTrial.batches`."""
        return self._reading.batches(name, batch_size, drop_last=drop_last)

    # -- reductions -------------------------------------------------------------------------------

    def sum(self, value: Any) -> Any:
        """See `FleetTrial.sum`."""
        return reduction.all_reduce_sum(value)

    def mean(self, value: Any, weight: float | None) -> Any:
        """See `FleetTrial.mean`."""
        return reduction.mean(value, weight)
