"""No cluster at all: trials one by one in the caller's process, for debugging with pdb."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from optuna_fleet.events import EpochDecision
from optuna_fleet.executor.convergence import Convergence
from optuna_fleet.executor.remarks import Remarks
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.sampler_bridge.loop import Loop
from optuna_fleet.trainer.seeding import seed_run
from optuna_fleet.trainer.session import Session
from optuna_fleet.trainer.trial import FleetTrial
from optuna_fleet.wire.calls import Call, RankCall, Report
from optuna_fleet.wire.messages import Remark, RunTrial


def run_inline(
    loop: Loop,
    func: Callable[[Any], Any],
    *,
    pipeline: SharedPipeline | None,
    seed: int,
    convergence: Convergence | None,
) -> None:
    """Run all trials of a call here, on the CPU, one after the other.

    Raises:
        BaseException: The failure of a trial that `catch` does not cover, as it was raised.
    """
    remarks = Remarks()
    while (number := loop.proposals.ask()) is not None:
        run = RunTrial(
            run_id=number,
            number=number,
            trial_id=compat.id_of(loop.proposals[number]),
            rank=0,
            world_size=1,
            seed=seed,
            objective_id=0,
            objective=None,
            measure=False,
            group="",
            store=None,
            checkpoint=None,
            checkpoint_to="",
            gc_after_trial=loop.gc_after_trial,
            maximize=loop.maximize,
        )
        session = _InlineSession(loop.ledger, run, convergence, remarks)
        value, error = None, None
        try:
            value = _run(func, session, pipeline)
        except BaseException as raised:  # `sys.exit()`, say: the trial has ended all the same
            error = raised
        loop.ledger.settle(number, value, error)


def _run(func: Callable[[Any], Any], session: Session, pipeline: SharedPipeline | None) -> Any:
    training: Any = None

    def open_training() -> Any:
        nonlocal training
        if training is None:
            from optuna_fleet.trainer.training import Training  # imports torch

            training = Training(session, pipeline.inline() if pipeline else None, "cpu")
        return training

    seed_run(session.run.seed, session.run.number)
    with _own_group(session.run):
        try:
            return func(FleetTrial(session, open_training))
        finally:
            if training is not None:
                training.end(alone=False)


@contextmanager
def _own_group(run: RunTrial) -> Iterator[None]:
    """As in a trainer: ``torch.distributed`` is there from the objective's first line on.

    Where the script uses torch, and has no group of its own.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.distributed.is_initialized():
        yield
        return
    from optuna_fleet.trainer.groups import leave_group
    from optuna_fleet.trainer.training import join_group_of

    join_group_of(run, "cpu")
    try:
        yield
    finally:
        leave_group()


class _InlineSession(Session):
    """A session whose driver is the same process."""

    def __init__(
        self,
        ledger: Ledger,
        run: RunTrial,
        convergence: Convergence | None,
        remarks: Remarks,
    ) -> None:
        super().__init__(None, run)
        self._ledger = ledger
        self._convergence = convergence
        self._remarks = remarks

    def send(self, message: Any) -> None:
        """Nobody needs to be told, but the user."""
        if isinstance(message, Remark):
            self._remarks.take(self.run.number, message)

    def exchange(self, call: RankCall) -> Any:
        """Carry the call out at once."""
        match call:
            case Report():
                return self._ledger.report(self.run.number, call.value, call.step)
            case Call():
                return self._ledger.carry_out(self.run.number, call)
            case _:
                return self._decision()

    def _decision(self) -> EpochDecision:
        if self._convergence is None or self.run.maximize is None:
            return EpochDecision.GO
        values = self._ledger.reported_values(self.run.number)
        converged = self._convergence.is_reached(values, maximize=self.run.maximize)
        return EpochDecision.STOP if converged else EpochDecision.GO
