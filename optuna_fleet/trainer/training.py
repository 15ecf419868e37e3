"""Data-parallel training of one trial on this rank: what `FleetTrial`'s methods do.

Imports torch; a trainer imports this module when an objective first needs it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from optuna_fleet.events import EpochDecision
from optuna_fleet.exceptions import FleetConfigError, TrialError
from optuna_fleet.messages import Measured, Reached, RunTrial, Usage
from optuna_fleet.packing import plain
from optuna_fleet.pipeline.inline import InlineClient
from optuna_fleet.pipeline.reader import PipelineClient
from optuna_fleet.trainer import checkpoint, reduction
from optuna_fleet.trainer.feed import feed
from optuna_fleet.trainer.groups import GroupSpec, join_group, leave_group
from optuna_fleet.trainer.parallel import ShardWeights, wrap_module
from optuna_fleet.trainer.saving import Saver
from optuna_fleet.trainer.session import Session, Yielded
from optuna_fleet.trainer.stopwatch import Stopwatch

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
    """

    def __init__(
        self, session: Session, pipeline: PipelineClient | InlineClient | None, kind: str
    ) -> None:
        self._session = session
        self._run = session.run
        self._pipeline = pipeline
        self.device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", 0)
        self._kind = kind
        self._objects: list[Any] = []
        self._modules: list[torch.nn.Module] = []
        self._weights = ShardWeights()
        self._epoch = 0
        self._num_epochs = 1
        self._num_loops = 0
        self._in_epochs = False
        self._reached_after_s: float | None = None
        self._stopwatch = Stopwatch(session.run.measure)
        self.state: dict[str, Any] = {}
        self._checkpoint: checkpoint.Checkpoint | None = None
        self._saver = Saver(session)
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

    def end(self, *, failed: bool) -> Usage:
        """Leave the group; return where the time went.

        A rank that `failed` does not wait for its peers, which may be in a collective for ever.
        """
        self._saver.finish()  # or the file would appear when nobody expects it any more
        leave_group(abort=failed and self._kind != "cpu")
        return Usage(probing_s=self._reached_after_s or 0.0, profiling_s=self._stopwatch.total_s)

    @property
    def shard_size(self) -> int:
        """Samples of the present batch on this rank."""
        return self._weights.local_size

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
        thing.load_state_dict(saved[position])

    def _parallel(self, module: torch.nn.Module) -> torch.nn.Module:
        self._modules.append(module)
        if self._run.world_size == 1:
            return module
        return wrap_module(module, self._weights, self.device)

    # -- epochs -----------------------------------------------------------------------------------

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """See `FleetTrial.epochs`."""
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
                checkpoint.restore_rng(self._checkpoint.rng)
        self._in_epochs = True
        self._num_epochs = num_epochs
        for epoch in range(first, num_epochs):
            self._epoch = epoch
            yield epoch
            if epoch + 1 < num_epochs and not self._goes_on_after(epoch):
                break
        self._in_epochs = False

    def _goes_on_after(self, epoch: int) -> bool:
        decision = self._session.call("fleet", "end_epoch", epoch)
        if decision is EpochDecision.YIELD and self._has_landed(epoch + 1):
            raise Yielded
        if decision is EpochDecision.CHECKPOINT:
            self._save(epoch + 1)
        return decision is not EpochDecision.STOP

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
                path, lambda: self._checkpoint_at(self._epoch + 1, []), keep_previous=False
            )
            self._saver.finish()

    # -- data -------------------------------------------------------------------------------------

    def batches(self, name: str, batch_size: int, *, drop_last: bool) -> Shards:
        """See `FleetTrial.batches`."""
        if self._pipeline is None:
            raise FleetConfigError(
                "trial.batches() needs data: pass it as FleetExecutor(SharedPipeline(train=..., "
                "...))."
            )
        if not self._modules:
            raise TrialError(
                f"Trial {self._run.number} asked for batches before trial.prepare(model, "
                "optimizer): without it the model would not be trained on the trial's devices nor "
                "checkpointed."
            )
        batches = Shards(self, name, batch_size, drop_last)
        len(batches)  # checks the arguments
        self._reach(name, batch_size)
        return batches

    def _reach(self, name: str, batch_size: int) -> None:
        if self._reached_after_s is not None:
            return
        self._reached_after_s = time.perf_counter() - self._session.began
        assert self._pipeline is not None
        samples = self._pipeline.sample_count(name)
        if self._run.rank == 0:
            structure = self._structure(name, batch_size)
            self._session.send(
                Reached(
                    run_id=self._run.run_id,
                    structure=structure,
                    resumable=self._in_epochs,
                    batch_size=batch_size,
                    samples_per_epoch=samples,
                )
            )
        if batch_size > samples:
            self._session.tell(
                "fleet",
                "warn",
                f"batch_size={batch_size} is larger than data set '{name}' with its {samples} "
                f"samples: each epoch is one batch of {samples}.",
            )

    def _structure(self, name: str, batch_size: int) -> str:
        """What decides the rate on devices of one type: parameter shapes, batch size, data."""
        digest = hashlib.sha256(f"{name}|{batch_size}".encode())
        for module in self._modules:
            digest.update(type(module).__qualname__.encode())
            for key, parameter in module.named_parameters():
                digest.update(f"{key}{tuple(parameter.shape)}{parameter.dtype}".encode())
        return digest.hexdigest()[:16]

    def read(self, name: str, batch_size: int, drop_last: bool) -> Iterator[Any]:
        """Yield this rank's shards, on the trial's device."""
        assert self._pipeline is not None
        watch = self._stopwatch
        watch.start()
        waited_s = self._pipeline.waited_s
        batches = self._read(name, batch_size, drop_last)
        for batch, data in feed(batches, self.device, self._pipeline.finisher(name)):
            # Every rank takes part in a step that trains, if need be with a stand-in sample.
            self._session.num_batches += 1
            in_step = any(module.training for module in self._modules)
            if batch.local_size == 0 and not in_step:
                continue
            self._weights.local_size = batch.local_size
            self._weights.global_size = batch.global_size
            self._weights.lockstep = in_step
            timed = watch.active and in_step and torch.is_grad_enabled()
            yield data
            if timed:
                self._measure(batch.global_size, self._pipeline.waited_s - waited_s)
                waited_s = self._pipeline.waited_s
                watch.start()

    def _read(self, name: str, batch_size: int, drop_last: bool) -> Any:
        assert self._pipeline is not None
        return self._pipeline.read(
            name,
            epoch=self._epoch,
            batch_size=batch_size,
            rank=self._run.rank,
            world_size=self._run.world_size,
            drop_last=drop_last,
            dummy=True,
            continues=self._epoch + 1 < self._num_epochs,
        )

    def num_steps(self, name: str, batch_size: int, drop_last: bool) -> int:
        """Number of global batches in an epoch."""
        return len(self._read(name, batch_size, drop_last))

    def _measure(self, samples: int, waited_s: float) -> None:
        if self._kind != "cpu":
            torch.cuda.synchronize()
        rate = self._stopwatch.stop(samples, waited_s)
        if rate is not None and self._run.rank == 0:
            self._session.send(Measured(run_id=self._run.run_id, samples_per_s=rate))

    # -- reductions -------------------------------------------------------------------------------

    def sum(self, value: Any) -> Any:
        """See `FleetTrial.sum`."""
        return reduction.all_reduce_sum(value)

    def mean(self, value: Any, weight: float | None) -> Any:
        """See `FleetTrial.mean`."""
        return reduction.mean(value, weight)


class Shards:
    """One epoch's batches of a data set, this rank's share of each."""

    def __init__(self, training: Training, name: str, batch_size: int, drop_last: bool) -> None:
        self._training = training
        self._arguments = (name, batch_size, drop_last)

    def __len__(self) -> int:
        """Number of steps in the epoch, the same on every rank."""
        return self._training.num_steps(*self._arguments)

    def __iter__(self) -> Iterator[Any]:
        return self._training.read(*self._arguments)
