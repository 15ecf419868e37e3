"""Data-parallel training of one trial on this rank: what `FleetTrial`'s methods do.

Imports torch; a trainer imports this module when an objective first needs it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch

from optuna_fleet.arguments import check_number
from optuna_fleet.events import EpochDecision, MoveRefused, WidthLimited
from optuna_fleet.exceptions import FleetConfigError, TrialError
from optuna_fleet.pipeline.reader.client import PipelineClient
from optuna_fleet.pipeline.reader.inline import InlineClient
from optuna_fleet.trainer import calls, checkpoint, reduction
from optuna_fleet.trainer.groups import GroupSpec, join_group, leave_group
from optuna_fleet.trainer.left_behind import LeftBehind
from optuna_fleet.trainer.parallel import make_data_parallel
from optuna_fleet.trainer.saving import Saver, owner_of
from optuna_fleet.trainer.session import Session, Yielded
from optuna_fleet.trainer.shard_loader import Bounds, EpochPosition, ShardLoader
from optuna_fleet.trainer.shard_loader import Shards as Shards
from optuna_fleet.trainer.shares import BatchShares
from optuna_fleet.trainer.split_check import SplitCheck
from optuna_fleet.trainer.states import (
    add_groups,
    load_state,
    remainder_of,
    restore_into,
    restore_remainder,
    state_of,
)
from optuna_fleet.trainer.steps import Steps
from optuna_fleet.wire.calls import EndEpoch, IsAmongBest
from optuna_fleet.wire.messages import Remark, RunTrial, Usage
from optuna_fleet.wire.packing import pack, plain

_PREPARED = (
    "modules, optimizers, schedulers and other objects with `state_dict` and `load_state_dict`"
)


def join_group_of(run: RunTrial, device_kind: str) -> None:
    """Join the group of a run's ranks, the default group of ``torch.distributed`` from now on."""
    spec = GroupSpec(
        rank=run.rank,
        world_size=run.world_size,
        prefix=run.group,
        store_host=run.store.host if run.store else "",
        store_port=run.store.port if run.store else None,
    )
    by_gloo = device_kind == "cpu" or run.shares_gpu
    join_group(spec, "gloo" if by_gloo else "nccl", run.collective_s)


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
        self._position = EpochPosition()
        self._shares = BatchShares()
        self._shares.on_too_wide = self._go_on_with_fewer
        self._split_check = self._new_split_check()
        self._loader = ShardLoader(
            session,
            pipeline,
            self.device,
            self._modules,
            self._position,
            self._shares,
            self._split_check,
        )
        calls.listen(self._split_check or self._shares)
        self.state: dict[str, Any] = {}
        self._checkpoint: checkpoint.Checkpoint | None = None
        self._saver = Saver(session)
        if self._run.best_to is not None and self._run.rank == 0:
            session.reports.at_best = self._keep_best
        self._is_apart = False
        self._steps = Steps(self._objects, session.warn)
        self._left_behind = LeftBehind(
            self._objects if self._run.rank == 0 else (),  # the others hold the same
            self.state,
            self._steps.optimizers,
            session.remark,
        )
        join_group_of(session.run, kind)
        if self._run.checkpoint is not None:
            self._resume(self._run.checkpoint)

    def _new_split_check(self) -> SplitCheck | None:
        """On one device, unless the trial will never have more."""
        if self._run.world_size > 1 or self._run.num_devices == 1:
            return None
        return SplitCheck(self._stay_alone, self._session.remark, self._shares)

    def _stay_alone(self, why: str) -> None:
        self._session.send(WidthLimited(run_id=self._run.run_id, max_devices=1))
        self._session.warn(why)

    def _go_on_with_fewer(self, why: str, max_devices: int) -> None:
        """This step can't be done on so many devices: the run ends, the trial goes on.

        Raises:
            TrialError: The trial must not have so few.
        """
        number, least = self._run.number, self._loader.bounds.min_devices
        devices = "one device" if max_devices == 1 else f"{max_devices} devices at most"
        if max_devices < least:
            raise TrialError(
                f"{why} It could go on on {devices}, but its `min_devices` is {least}."
            )
        self._session.send(WidthLimited(run_id=self._run.run_id, max_devices=max_devices))
        remark = Remark(
            run_id=self._run.run_id,
            keys=(f"trial {number} is too wide",),
            text=f"{why} The trial goes on from its last checkpoint, on {devices}.",
        )
        self._session.send(remark)  # whichever rank finds it

    def _resume(self, path: str) -> None:
        run = self._run
        self._checkpoint, problems = checkpoint.load_newest(path, owner_of(run), run.parameters)
        for problem in problems:
            self._session.warn(problem)
        if self._checkpoint is not None:
            self.state.update(copy.deepcopy(self._checkpoint.state))
            self._session.reports.begin_with(self._checkpoint.history)

    def end(self, *, alone: bool) -> Usage:
        """Leave the group, unless that could take for ever; return where the time went.

        Args:
            alone: The other ranks may not be at their end.
        """
        self._session.reports.at_best = None  # it would keep the trial's memory
        self._steps.close()
        if self._split_check is not None:
            self._split_check.close()
        self._saver.finish()  # or the file would appear when nobody expects it any more
        # Its peers may be in a collective, and NCCL's end, abrupt or not, may wait for them, who
        # end when the driver has heard of this failure. The process' own end waits for nobody.
        self.is_stuck = alone and self._kind != "cpu" and self._run.world_size > 1
        if not self.is_stuck:
            leave_group()
        return Usage(
            probing_s=self._loader.reached_after_s or 0.0,
            profiling_s=self._loader.stopwatch.total_s,
        )

    @property
    def shard_size(self) -> int:
        """Samples of the present batch on this rank."""
        size = self._shares.present.local_size
        return size if self._split_check is None else self._split_check.size(size)

    # -- prepare ----------------------------------------------------------------------------------

    def prepare(
        self, *objects: Any, min_devices: int | None = None, max_devices: int | None = None
    ) -> Any:
        """See `FleetTrial.prepare`."""
        if not objects:
            raise FleetConfigError(f"trial.prepare() was given nothing, but takes {_PREPARED}.")
        if min_devices is not None or max_devices is not None:
            self._loader.bounds = Bounds.checked(min_devices, max_devices, self._run.num_devices)
        for thing in objects:  # before any optimizer's state is made to follow them
            if isinstance(thing, torch.nn.Module):
                thing.to(self.device)
        prepared = tuple(self._prepare_one(thing) for thing in objects)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_one(self, thing: Any) -> Any:
        has_state = hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
        if isinstance(thing, type) or not has_state:
            kind = f"class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__
            raise FleetConfigError(f"trial.prepare() was given a `{kind}`, but takes {_PREPARED}.")
        position = len(self._objects)
        self._objects.append(thing)
        if self._checkpoint is not None:
            self._restore(thing, position)
        elif isinstance(thing, torch.optim.Optimizer) and thing.state:
            thing.load_state_dict(thing.state_dict())  # moves it to where the parameters are now
        return self._parallel(thing) if isinstance(thing, torch.nn.Module) else thing

    def _restore(self, thing: Any, position: int) -> None:
        assert self._checkpoint is not None
        saved = self._checkpoint.objects
        if position >= len(saved):
            if self._position.loop >= self._checkpoint.loop:
                return  # made after the loop that was checkpointed
            raise TrialError(
                f"trial.prepare() was called with more objects than when trial {self._run.number} "
                f"was checkpointed ({len(saved)}): an objective must prepare the same objects "
                "each time."
            )
        state = saved[position]
        num_groups = len(state.get("param_groups", ()))
        if isinstance(thing, torch.optim.Optimizer) and len(thing.param_groups) < num_groups:
            return  # they were added later: see `_restore_all`
        # Modules copy it; optimizers keep what they get.
        load_state(thing, state if isinstance(thing, torch.nn.Module) else copy.deepcopy(state))

    def _parallel(self, module: torch.nn.Module) -> torch.nn.Module:
        self._modules.append(module)
        self._steps.watch(module)
        if self._split_check is not None:
            calls.watch(module.modules())
        if self._run.world_size == 1:
            return module
        return make_data_parallel(module, self._shares, self.device)

    # -- epochs -----------------------------------------------------------------------------------

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """See `FleetTrial.epochs`."""
        self._session.check()
        check_number("num_epochs", num_epochs, least=1, whole=True)
        return self._epochs(num_epochs)

    def _epochs(self, num_epochs: int) -> Iterator[int]:
        self._position.loop += 1
        first = 0
        if self._checkpoint is not None:
            if self._position.loop < self._checkpoint.loop:
                return  # this loop was done before the checkpoint
            if self._position.loop == self._checkpoint.loop:
                first = self._checkpoint.epoch
                self._restore_all(self._checkpoint)
        self._position.is_inside, self._position.num_epochs = True, num_epochs
        for epoch in range(first, num_epochs):
            self._position.epoch = self._session.epoch = epoch
            self._left_behind.begin_epoch(sys._getframe(1))
            yield epoch
            self._loader.end_epoch()
            if epoch + 1 == num_epochs:
                break
            self._left_behind.end_epoch(sys._getframe(1))
            if not self._goes_on_after(epoch):
                break
        self._position.is_inside = False

    def _restore_all(self, saved: checkpoint.Checkpoint) -> None:
        """Once more: what came after `prepare` began anew (weights, a scheduler's first rate)."""
        for position, thing in enumerate(self._objects[: len(saved.objects)]):
            if isinstance(thing, torch.optim.Optimizer):
                add_groups(thing, saved.remainder[position], self._objects)
            load_state(thing, saved.objects[position])
            restore_remainder(thing, saved.remainder[position])
            saved.objects[position] = saved.remainder[position] = {}  # their memory is needed
        restore_into(self.state, saved.state)
        checkpoint.restore_rng(saved.rng)

    def _goes_on_after(self, epoch: int) -> bool:
        if self._split_check is not None:
            self._split_check.end_step()
        # First what needs no other rank: one that left this epoch early is told of at once.
        decision = self._session.ask(EndEpoch, epoch=epoch)
        self._check_replicas()
        if decision is EpochDecision.YIELD and self._has_left(epoch + 1):
            self._session.unwind(Yielded)  # even if the objective catches everything
        if decision is EpochDecision.CHECKPOINT:
            self._save(epoch + 1)
        return decision is not EpochDecision.STOP

    def _check_replicas(self) -> None:
        if self._is_apart or not (apart := reduction.find_divergence(self._objects)):
            return
        self._is_apart = True
        shown = ", ".join(apart[:3]) + (", ..." if len(apart) > 3 else "")
        self._session.warn(
            f"Its ranks have come apart: {shown}. On another number of "
            "devices it would give other results. What decides must be alike on all ranks: use "
            "trial.mean(loss) for it; prepare layers when the model is complete."
        )

    def _has_left(self, next_epoch: int) -> bool:
        """Write the checkpoint to leave with; a trial that can't keeps its devices."""
        self._saver.finish()
        self._save(next_epoch)
        has_failed = bool(reduction.all_reduce_sum(int(not self._saver.finish())))
        if has_failed and self._run.rank == 0:
            self._session.send(MoveRefused(run_id=self._run.run_id))
        return not has_failed

    def _save(self, next_epoch: int) -> None:
        rng = checkpoint.gather_rng()
        if self._run.rank == 0 and not self._saver.is_busy:
            self._saver.save(lambda: self._checkpoint_at(next_epoch, rng))

    def _checkpoint_at(self, next_epoch: int, rng: list[dict[str, Any]]) -> checkpoint.Checkpoint:
        modules = [i for i, o in enumerate(self._objects) if isinstance(o, torch.nn.Module)]
        return checkpoint.Checkpoint(
            loop=self._position.loop,
            epoch=next_epoch,
            objects=[state_of(thing) for thing in self._objects],
            state=self.state,
            rng=rng,
            history=self._session.reports.values,
            modules=modules,
            remainder=remainder_of(self._objects, with_gradients=self._steps.are_pending),
            parameters=dict(self._session.parameters),
        )

    # -- what is left in the end ------------------------------------------------------------------

    def _as_it_is(self) -> checkpoint.Checkpoint:
        return self._checkpoint_at(self._position.epoch + 1, [])

    def _keep_best(self) -> None:
        if self._objects:
            self._saver.keep_best(self._as_it_is)

    def leave_final_checkpoint(self, value: Any) -> None:
        """The objective returned `value`: leave its weights behind, if they are among the best."""
        if self._run.final_to is None or self._run.rank > 0 or not self._objects:
            return
        try:
            value = plain(value)
            is_wanted = self._session.ask(IsAmongBest, value=pack(value))
        except Exception:  # it can't be sent, say; the study will be told and say so
            return
        if is_wanted:
            self._saver.leave(value, self._as_it_is)

    # -- losses -----------------------------------------------------------------------------------

    def weighted(self, loss: Any, weight: Any) -> Any:
        """See `FleetTrial.weighted`."""
        reduction.one_number(loss, "loss")
        own = reduction.one_number(weight, "weight")
        if self._run.world_size == 1:
            if self._split_check is not None:
                self._split_check.weigh(loss, weight)
            return loss
        shares = self._shares
        shares.begin("trial.weighted")
        share = shares.share_behind(loss)
        is_dummy = (share or shares.present).dummy
        part = reduction.share_of_sum(torch.zeros_like(own) if is_dummy else own)
        return shares.weigh(loss, part.to(loss.device), share)

    # -- data -------------------------------------------------------------------------------------

    def batches(self, name: str, batch_size: int | None, *, drop_last: bool) -> Shards:
        """See `FleetTrial.batches`."""
        return self._loader.batches(name, batch_size, drop_last=drop_last)

    # -- reductions -------------------------------------------------------------------------------

    def sum(self, value: Any) -> Any:
        """See `FleetTrial.sum`."""
        self._shares.check_step("trial.sum")
        self._shares.begin("trial.sum")
        return reduction.all_reduce_sum(value)

    def mean(self, value: Any, weight: float | None) -> Any:
        """See `FleetTrial.mean`."""
        self._shares.check_step("trial.mean")
        self._shares.begin("trial.mean")
        return reduction.mean(value, weight)
