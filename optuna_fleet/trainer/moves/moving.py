"""How a rank leaves its devices, or stays where it stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from optuna_fleet.events import MoveRefused
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.checkpoints import checkpoint
from optuna_fleet.trainer.checkpoints.states import names_in, remainder_of, state_of
from optuna_fleet.trainer.gradients import collectives
from optuna_fleet.trainer.groups import of_first_rank
from optuna_fleet.trainer.parts import Parts
from optuna_fleet.trainer.pipeline_parallel.whole import WholeModel, are_in_stages, gathered
from optuna_fleet.trainer.randomness import rng_state
from optuna_fleet.wire.calls import IsAmongBest
from optuna_fleet.wire.packing import pack, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Where a run has stopped, and what its ranks do not have in common.

    Attributes:
        step: The next one of the epoch's first pass; None at the epoch's end.
        rng: `rng_state` of each rank.
        totals: What each rank has added to ``trial.totals``.
    """

    step: int | None = None
    rng: list[dict[str, Any]] = field(default_factory=list)
    totals: list[dict[str, Any]] = field(default_factory=list)


class Moving:
    """Makes the checkpoints of one rank's training."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._saver = parts.saver
        self._num_fit = 0  # objects of which a checkpoint was made
        self._names: list[frozenset[str]] = []

    def begin_loop(self) -> None:
        """Note what is in modules where the objective begins the loop."""
        self._names = list(map(names_in, self._parts.objects))

    def _check_names(self) -> None:
        """Check that modules where the loop begins could take what they have now.

        Raises:
            FleetConfigError: One was changed within the loop.
        """
        for thing, then in zip(self._parts.objects, self._names, strict=False):
            if changed := sorted(names_in(thing) ^ then):
                raise FleetConfigError(
                    f"Parameters or buffers of the {type(thing).__name__} were added or removed "
                    f"since the loop over epochs began ({', '.join(changed[:3])}), which the "
                    "model that the objective makes could not take. Change it between two loops: "
                    "trial.epochs(5), then prune it, say, then trial.epochs(5)."
                )

    def save(self, step: int | None = None) -> None:
        """Begin to write a checkpoint, if it has what is trained; called on all ranks."""
        if self._is_empty():
            return
        stop = self._stopped(step)
        with gathered(self._parts.objects):
            if self._parts.run.rank == 0 and not self._saver.is_busy:
                self.begin_to_save(stop)

    def has_left(self, step: int | None = None) -> bool:
        """Write the checkpoint to leave with, at the epoch's end or before a step of it.

        A trial that can't keeps its devices.
        """
        self._saver.finish()
        self.save(step)
        return self._agree(is_fit=self._saver.finish() and not self._is_empty())

    def stop(self, step: int, *, leader_stays: bool) -> Stop | None:
        """Stop within the epoch, without a checkpoint; called on all ranks.

        Args:
            step: Where.
            leader_stays: What only rank 0 has in memory is not lost.

        Returns:
            None if the trial can't be checkpointed, and keeps its devices.
        """
        self._saver.finish()
        stop, rank = self._stopped(step), self._parts.run.rank
        if not self._agree(is_fit=rank > 0 or self._is_fit()):
            return None
        if rank == 0 and not leader_stays and self._saver.owes_best:
            self.begin_to_save(stop)
            self._saver.finish()
        return stop

    def _stopped(self, step: int | None) -> Stop:
        self._parts.net.check()
        rng = checkpoint.gather(rng_state())
        totals = [] if step is None else checkpoint.gather(self._parts.totals.own)
        return Stop(step=step, rng=rng, totals=totals)

    def begin_to_save(self, stop: Stop) -> None:
        """Copy the checkpoint of where this rank has stopped; it is written meanwhile."""

        def checked() -> checkpoint.Checkpoint:
            self._check_names()
            return self.checkpoint_at(stop)

        self._saver.save(checked)

    def _is_fit(self) -> bool:
        """Whether a checkpoint could be made; objects are copied once for that, not each time."""
        if self._is_empty():
            return False
        objects = self._parts.objects
        unknown = objects if len(objects) > self._num_fit else ()

        def some() -> checkpoint.Checkpoint:
            self._check_names()
            return self._checkpoint_of(unknown, Stop())

        is_fit = self._saver.can_copy(some)
        if is_fit:
            self._num_fit = len(objects)
        return is_fit

    def _is_empty(self) -> bool:
        return self._parts.position.reads_unprepared and not self._parts.objects

    def _agree(self, *, is_fit: bool) -> bool:
        has_failed = bool(collectives.all_reduce_sum(int(not is_fit)))
        if has_failed and self._parts.run.rank == 0:
            self._parts.session.send(MoveRefused(run_id=self._parts.run.run_id))
        return not has_failed

    # -- what is left in the end ------------------------------------------------------------------

    def begin_run(self) -> None:
        """Keep what led to the best report, if that may be left."""
        run = self._parts.run
        self._parts.session.reports.at_best = self._keep_best if run.leaves_final else None

    def end(self) -> None:
        """Keep nothing: it would keep the trial's memory."""
        self._parts.session.reports.at_best = None

    def _keep_best(self) -> None:
        with gathered(self._parts.objects):
            if self._parts.objects and self._parts.run.rank == 0:
                self._saver.keep_best(self._as_it_is)

    def leave_final(self, value: Any) -> None:
        """The objective returned `value`: leave its weights behind, if they are among the best."""
        run = self._parts.run
        if not run.leaves_final or not self._parts.objects:
            return
        is_wanted = run.rank == 0 and self._is_wanted(value)
        if are_in_stages(self._parts.objects):
            (is_wanted,) = map(bool, of_first_rank([is_wanted]))
        if not is_wanted:
            return
        with gathered(self._parts.objects):
            if run.rank == 0:
                self._saver.leave(plain(value), self._as_it_is)

    def _is_wanted(self, value: Any) -> bool:
        try:
            return bool(self._parts.session.ask(IsAmongBest, value=pack(plain(value))))
        except Exception:  # it can't be sent, say; the study will be told and say so
            return False

    # -- what is in them --------------------------------------------------------------------------

    def _as_it_is(self) -> checkpoint.Checkpoint:
        return self.checkpoint_at(Stop())

    def checkpoint_at(self, stop: Stop) -> checkpoint.Checkpoint:
        """The checkpoint of where this rank has stopped; not copied."""
        return self._checkpoint_of(self._parts.objects, stop)

    def _checkpoint_of(self, objects: Sequence[Any], stop: Stop) -> checkpoint.Checkpoint:
        parts = self._parts
        return checkpoint.Checkpoint(
            loop=parts.position.loop,
            epoch=parts.position.epoch + (stop.step is None),
            objects=[state_of(thing) for thing in objects],
            state=parts.state,
            rng=stop.rng,
            history=parts.session.reports.values,
            modules=[i for i, o in enumerate(objects) if _holds_module(o)],
            remainder=remainder_of(objects, with_gradients=parts.steps.are_pending),
            parameters=dict(parts.session.parameters),
            step=stop.step,
            totals=stop.totals,
        )


def _holds_module(thing: Any) -> bool:
    return isinstance(thing, torch.nn.Module | WholeModel)
