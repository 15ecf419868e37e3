"""How a rank goes on in another group: it waits where it has stopped, or joins those that do.

Who joins runs the objective's beginning by itself, as if it were alone, with the answers that the
others were given. It waits where it needs what they have in memory: `FleetTrial.state`, what was
reported, the loop over the epochs. That reaches it as a checkpoint would, from rank 0. It has
joined when it asks for the batch before which the others have stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optuna_fleet.events import Ending
from optuna_fleet.processes import flush_prints
from optuna_fleet.trainer.checkpoints import checkpoint
from optuna_fleet.trainer.groups import join_group_of
from optuna_fleet.trainer.moves.moving import Moving, Stop
from optuna_fleet.trainer.parts import Parts
from optuna_fleet.trainer.prepared import Prepared
from optuna_fleet.trainer.session import Yielded
from optuna_fleet.wire.messages import Leaving, Release, RunTrial, Usage


class Regrouping:
    """One rank's way from group to group."""

    def __init__(self, parts: Parts, moving: Moving, prepared: Prepared) -> None:
        self._parts = parts
        self._session = parts.session
        self._moving = moving
        self._prepared = prepared
        parts.weights.at_collective = self._check_joined

    # -- where a run stops ------------------------------------------------------------------------

    def stop(
        self, step: int, stays: Sequence[int], usage: Callable[[], Usage], *, can_join: bool
    ) -> bool:
        """Stop before a step of the epoch; return whether another run goes on here.

        Else the trial stays; a rank that leaves does not return. Ranks of whom one `stays` wait.
        """
        session = self._session
        if session.run.rank == 0:
            session.send(Leaving(run_id=session.run.run_id))
        if not stays:
            if self._moving.has_left(step):
                session.unwind(Yielded)
            return False
        if (stop := self._moving.stop(step, leader_stays=0 in stays)) is None:
            return False
        if session.run.rank not in stays:
            session.unwind(Yielded)
        order = self._wait(usage(), can_join=can_join)
        if isinstance(order, RunTrial):
            self._go_on(order, stop)
            return True
        if order is not None and order.saves:
            self._moving.begin_to_save(stop)
            self._parts.saver.finish()
        return session.unwind(Yielded)

    def _wait(self, usage: Usage, *, can_join: bool) -> RunTrial | Release | None:
        flush_prints()  # trainers are killed in the end
        ended = self._session.ended(Ending.YIELDED, usage=usage, waits=True, can_join=can_join)
        return self._session.wait(ended)

    def _go_on(self, run: RunTrial, stop: Stop) -> None:
        self._begin(run)
        if run.num_stay < run.world_size:
            own = self._moving.checkpoint_at(stop) if run.rank == 0 else None
            checkpoint.broadcast(own)
        checkpoint.restore_rng(stop.rng)
        self._parts.totals.begin(stop.totals, run.rank, run.world_size)
        self._check_alike(run)

    def _begin(self, run: RunTrial) -> None:
        self._parts.weights.begin_run()
        self._parts.reducer.begin_epoch()
        self._session.begin(run)
        self._parts.saver.begin_run()
        join_group_of(run, self._parts.device.type)
        self._moving.begin_run()

    def _check_alike(self, run: RunTrial) -> None:
        """Those that have stayed and those that have joined have prepared the same."""
        if run.num_stay < run.world_size:
            self._prepared.check_alike()

    # -- who joins --------------------------------------------------------------------------------

    def arrive(self) -> checkpoint.Checkpoint:
        """Wait for the run, join its group, and return what it goes on with."""
        flush_prints()
        run = self._session.rehearsed()
        if run is None:
            self._session.unwind(Yielded)
        self._begin(run)
        return checkpoint.broadcast(None)

    def settle(self) -> None:
        """This rank is where the others are."""
        self._check_alike(self._session.run)
        self._prepared.begin_run()
        self._parts.weights.begin_run()
        self._session.has_joined()

    def _check_joined(self, purpose: str) -> None:
        """A collective begins."""
        if self._session.joins:
            self._session.cannot_join(f"{purpose} needs all ranks")
