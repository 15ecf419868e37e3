"""No cluster at all: trials one by one in the caller's process, for debugging with pdb."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from optuna_fleet.events import Ending, EpochDecision
from optuna_fleet.executor.call.journal import DeviceLog
from optuna_fleet.executor.call.outcomes import EpochEvaluator
from optuna_fleet.executor.given import Options
from optuna_fleet.resources import Device
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.loop import Loop
from optuna_fleet.sampler_bridge.records import Flight
from optuna_fleet.trainer.objective import once_torch_is_imported
from optuna_fleet.trainer.randomness import seed_run, seed_torch
from optuna_fleet.trainer.session import Session
from optuna_fleet.trainer.trial import FleetTrial
from optuna_fleet.wire.calls import AfterEpoch, Call, EndEpoch, RankCall, Report, ShouldPrune
from optuna_fleet.wire.messages import Remark, RunTrial, Usage

_DEVICE = Device(index=0, node=0, kind="cpu", node_name="inline")


class InlineRunner:
    """Runs calls on one CPU device, in the process that makes them; it looks for no other."""

    makes_checkpoints = False
    summary = None

    def __init__(self, options: Options) -> None:
        self._options = options
        self._is_set_up = options.setup is None

    def run(self, loop: Loop, func: Callable[[Any], Any]) -> None:
        """Run trials until `loop` proposes no more; a failure is raised as in the objective."""
        if self._options.setup is not None and not self._is_set_up:
            self._options.setup()
            self._is_set_up = True
        devices, told = DeviceLog(loop.ledger.records.devices, lambda: [_DEVICE]), set[str]()
        devices.begin(time.time())
        try:
            while (number := loop.proposals.ask()) is not None:
                self._run_trial(number, loop, func, told)
        finally:
            devices.end(time.time())

    def _run_trial(
        self, number: int, loop: Loop, func: Callable[[Any], Any], told: set[str]
    ) -> None:
        session = _InlineSession(_order(number, self._options.seed, loop), loop, told)
        session.evaluator = EpochEvaluator(self._options, loop.ledger, maximize=loop.maximize)
        value, error, start = None, None, time.time()
        try:
            value = self._called(func, session)
        except BaseException as raised:  # `sys.exit()`, say: it has ended all the same
            error = raised
        flight = Flight(
            devices=(_DEVICE.index,),
            start=start,
            end=time.time(),
            round=1,
            ending=(Ending.RETURNED if error is None else Ending.RAISED).value,
            probing_s=0.0,
            profiling_s=0.0,
            data_wait_s=session.usage.data_wait_s,
        )
        loop.ledger.records.flight(number, flight)
        loop.ledger.settle(number, value, error)

    def _called(self, func: Callable[[Any], Any], session: _InlineSession) -> Any:
        def open_training() -> Any:
            from optuna_fleet.trainer.training import Training  # imports torch

            pipeline = self._options.pipeline
            return Training(session, pipeline.inline() if pipeline else None, "cpu")

        trial = FleetTrial(session, open_training)
        seed_run(session.run.seed, session.run.number)
        with _torch_set_up(session.run):
            try:
                return func(trial)
            finally:
                if trial.opened is not None:
                    session.usage = trial.opened.end(alone=False)

    def close(self) -> None:
        """There is nothing to end."""


def _order(number: int, seed: int, loop: Loop) -> RunTrial:
    return RunTrial(
        run_id=number,
        number=number,
        trial_id=compat.id_of(loop.proposals[number]),
        rank=0,
        world_size=1,
        seed=seed,
        objective_id=0,
        measure=False,
        group="",
        store=None,
        gc_after_trial=loop.gc_after_trial,
        maximize=loop.maximize,
    )


@contextmanager
def _torch_set_up(run: RunTrial) -> Iterator[None]:
    """As in a trainer: ``torch`` means this trial, where the script has no group of its own."""
    with ExitStack() as at_end:

        def set_up() -> None:
            from optuna_fleet.trainer.groups import has_group, join_group, leave_group

            if not has_group():
                join_group(run, "cpu")
                at_end.callback(leave_group)
            seed_torch(run.seed, run.number)

        with once_torch_is_imported(set_up):
            yield


class _InlineSession(Session):
    """Asks the study itself, which is in this process.

    Attributes:
        evaluator: Says whether the trial has converged.
        usage: Where its time went, once it has ended.
    """

    evaluator: EpochEvaluator

    def __init__(self, run: RunTrial, loop: Loop, told: set[str]) -> None:
        super().__init__(None, run)
        self.usage = Usage()
        self._loop, self._told = loop, told

    def ask(self, kind: type[RankCall], **fields: Any) -> Any:
        """See `Session`: an error is raised as it was where it came from."""
        number, ledger = self.run.number, self._loop.ledger
        with self._lock:
            match kind(run_id=number, index=0, rank=0, **fields):
                case Report() as report:
                    ledger.report(number, report.value, report.step)
                case ShouldPrune() as asked:
                    return ledger.should_prune(number, asked.last_step)
                case EndEpoch() as ended:
                    is_over = self.evaluator.has_converged(number, ended.last_step)
                    return AfterEpoch(EpochDecision.STOP if is_over else EpochDecision.GO)
                case Call() as call:
                    return ledger.carry_out(number, call)
        return None

    def send(self, message: Any) -> None:
        """See `Session`."""
        if isinstance(message, Remark) and not self._told.issuperset(message.keys or ("",)):
            self._told.update(message.keys)
            compat.fleet_logger.warning(f"Trial {self.run.number}: {message.text}")
