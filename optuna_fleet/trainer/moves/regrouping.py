"""How a rank goes on in another group: it waits where it has stopped, or joins those that do.

Who joins runs the objective's beginning by itself, as if it were alone, with the answers that the
others were given. It waits where it needs what they have in memory: `FleetTrial.state`, what was
reported, the loop over the epochs. That reaches it as a checkpoint would, from rank 0. It has
joined when it asks for the batch before which the others have stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from optuna_fleet.events import Ending
from optuna_fleet.processes import flush_prints
from optuna_fleet.trainer.checkpoints import checkpoint
from optuna_fleet.trainer.checkpoints.files import RunFiles
from optuna_fleet.trainer.checkpoints.saving import Saver
from optuna_fleet.trainer.gradients.shares import BatchShares
from optuna_fleet.trainer.groups import join_group_of
from optuna_fleet.trainer.moves.moving import Moving, Stop
from optuna_fleet.trainer.moves.totals import Totals
from optuna_fleet.trainer.prepared import Prepared
from optuna_fleet.trainer.session import Session, Yielded
from optuna_fleet.wire.messages import Ended, Leaving, Release, RunTrial, Usage


class Regrouping:
    """One rank's way from group to group.

    Args:
        session: This rank's calls.
        moving: Makes its checkpoints.
        saver: Writes them.
        prepared: What is trained.
        shares: Counts the ranks' collectives.
        totals: Sums over the epoch.
        kind: Of this rank's device.
    """

    def __init__(
        self,
        session: Session,
        moving: Moving,
        saver: Saver,
        prepared: Prepared,
        shares: BatchShares,
        totals: Totals,
        kind: str,
    ) -> None:
        self._session = session
        self._moving = moving
        self._saver = saver
        self._prepared = prepared
        self._shares = shares
        self._totals = totals
        self._kind = kind
        shares.at_collective = self._check_joined

    # -- where a run stops ------------------------------------------------------------------------

    def stop(self, step: int, usage: Callable[[], Usage], *, can_join: bool) -> bool:
        """Stop before a step of the epoch; return whether another run goes on here.

        Else the trial stays; a rank that leaves does not return.
        """
        session, stays = self._session, self._session.stop_line.stays
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
            self._moving.save_at(stop)
        return session.unwind(Yielded)

    def _wait(self, usage: Usage, *, can_join: bool) -> RunTrial | Release | None:
        session = self._session
        flush_prints()  # trainers are killed in the end
        ended = Ended(
            run_id=session.run.run_id,
            rank=session.run.rank,
            device=session.device,
            time_s=time.monotonic(),
            ending=Ending.YIELDED,
            progress=session.progress,
            usage=usage,
            waits=True,
            can_join=can_join,
        )
        return session.wait(ended)

    def _go_on(self, run: RunTrial, stop: Stop) -> None:
        self._begin(run)
        if run.num_stay < run.world_size:
            own = self._moving.checkpoint_at_stop(stop) if run.rank == 0 else None
            checkpoint.broadcast(own)
        if run.saves and run.rank == 0:
            self._moving.begin_to_save_at(stop)
        checkpoint.restore_rng(stop.rng)
        self._totals.begin(stop.totals, run.rank, run.world_size)
        self._check_joined_all(run)

    def _begin(self, run: RunTrial) -> None:
        self._shares.begin_run()
        self._session.begin(run)
        self._saver.files = RunFiles(run, self._session.dial)
        join_group_of(run, self._kind)
        self._moving.begin_run()

    def _check_joined_all(self, run: RunTrial) -> None:
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
        run = self._session.run
        self._check_joined_all(run)
        self._prepared.attach_all()
        self._shares.begin_run()
        self._session.has_joined()

    def _check_joined(self, purpose: str) -> None:
        """A collective begins."""
        if self._session.joins:
            self._session.cannot_join(f"{purpose} needs all ranks")
