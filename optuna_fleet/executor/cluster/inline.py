"""No cluster at all: trials one by one in the caller's process, for debugging with pdb."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from optuna_fleet.checkpoints.folder import StudyFolder
from optuna_fleet.events import DataRequested, Ending, EpochDecision, Launch
from optuna_fleet.executor.call.call_handler import CallHandler
from optuna_fleet.executor.call.call_log import CallLog
from optuna_fleet.executor.call.calls import RunCalls
from optuna_fleet.executor.call.outcomes import EpochEvaluator
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.executor.call.summary import FleetSummary
from optuna_fleet.executor.call.tally import DeviceLog
from optuna_fleet.executor.cluster.protocol import Options, Runner
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.resources import Device
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.loop import Loop
from optuna_fleet.sampler_bridge.records import Flight
from optuna_fleet.sampler_bridge.retention import CheckpointRetention
from optuna_fleet.trainer.seeding import seed_run, seed_torch
from optuna_fleet.trainer.session import Session
from optuna_fleet.trainer.torch_import import once_torch_is_imported
from optuna_fleet.trainer.trial import FleetTrial
from optuna_fleet.wire.calls import AfterEpoch, RankCall, Reply
from optuna_fleet.wire.messages import Ended, Remark, RunTrial, Usage

_DEVICE = Device(index=0, node=0, kind="cpu", node_name="inline")


class InlineCluster:
    """One CPU device, in the process that makes the call; no other device is looked for."""

    def new_runner(self, options: Options) -> Runner:
        """See `Cluster`."""
        return InlineRunner(options)


class InlineRunner:
    """A `Runner` without processes: it has nothing to place, so it runs calls by itself."""

    makes_checkpoints = False

    def __init__(self, options: Options) -> None:
        self.summary: FleetSummary | None = None
        self._options = options
        self._is_set_up = options.setup is None

    def run(self, loop: Loop, func: Callable[[Any], Any]) -> None:
        """See `Runner`; a failure is raised as it was in the objective."""
        options, replies = self._options, deque[Reply]()
        if options.setup is not None and not self._is_set_up:
            options.setup()
            self._is_set_up = True
        keeps_none = CheckpointRetention(loop.study, StudyFolder(Path(), ""), num_kept=0)
        calls = CallHandler(
            lambda _, reply: replies.append(reply), loop.ledger, keeps_none, in_process=True
        )
        evaluator = EpochEvaluator(options, loop.ledger, maximize=loop.maximize)
        with _recorded(loop) as log:
            while (number := loop.proposals.ask()) is not None:
                trial_id = compat.id_of(loop.proposals[number])
                run = _order(number, trial_id, options.seed, loop)
                session = _InlineSession(run, calls, evaluator, replies, loop, log)
                value, error = None, None
                try:
                    value = _run(func, session, options.pipeline)
                except BaseException as raised:  # `sys.exit()`, say: it has ended all the same
                    error = raised
                loop.ledger.records.flight(number, session.flight(error))
                log.done(number)
                loop.ledger.settle(number, value, error)

    def close(self) -> None:
        """See `Runner`."""


@contextmanager
def _recorded(loop: Loop) -> Iterator[CallLog]:
    """The call's record, for those who watch it."""
    log, devices = CallLog.of(loop.ledger, loop.proposals), DeviceLog(loop.ledger.records.devices)
    devices.begin([_DEVICE], time.time())
    ending = "failed"
    try:
        yield log
        ending = "done"
    except KeyboardInterrupt:
        ending = "interrupted"
        raise
    finally:
        log.end(ending, loop.proposals.num_asked)
        devices.end(time.time())


def _order(number: int, trial_id: int, seed: int, loop: Loop) -> RunTrial:
    return RunTrial(
        run_id=number,
        number=number,
        trial_id=trial_id,
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


def _run(
    func: Callable[[Any], Any], session: _InlineSession, pipeline: SharedPipeline | None
) -> Any:
    training: Any = None

    def open_training() -> Any:
        nonlocal training
        if training is None:
            from optuna_fleet.trainer.training import Training  # imports torch

            training = Training(session, pipeline.inline() if pipeline else None, "cpu")
        return training

    seed_run(session.run.seed, session.run.number)
    with _torch_set_up(session.run):
        try:
            return func(FleetTrial(session, open_training))
        finally:
            if training is not None:
                session.usage = training.end(alone=False)


@contextmanager
def _torch_set_up(run: RunTrial) -> Iterator[None]:
    """As in a trainer: ``torch`` means this trial, where the script has no group of its own."""
    with ExitStack() as at_end:

        def set_up() -> None:
            from optuna_fleet.trainer.groups import has_group, join_group_of, leave_group

            if not has_group():
                join_group_of(run, "cpu")
                at_end.callback(leave_group)
            seed_torch(run.seed, run.number)

        with once_torch_is_imported(set_up):
            yield


class _InlineSession(Session):
    """A session whose driver is the same process: what it says is answered before it goes on.

    Attributes:
        usage: Where its time went, once it has ended.
    """

    def __init__(
        self,
        run: RunTrial,
        calls: CallHandler,
        evaluator: EpochEvaluator,
        replies: deque[Reply],
        loop: Loop,
        log: CallLog,
    ) -> None:
        super().__init__(None, run)
        number = run.number
        launch = Launch(
            run_id=number, number=number, devices=(0,), probe=False, measure=False, round=1
        )
        self.usage = Usage()
        self._record = RunRecord(launch=launch, start=time.time(), calls=RunCalls(world_size=1))
        self._calls = calls
        self._evaluator = evaluator
        self._replies = replies
        self._proposals = loop.proposals
        self._log = log
        log.launched(launch, self._record.start)

    def send(self, message: Any) -> None:
        """Have it answered at once, and see whether it is time for a record."""
        if isinstance(message, DataRequested):
            self._log.defined(self.run.number, message.model)
        if isinstance(message, RankCall | Remark):
            self._take(message)
        if self._log.is_due:
            number = self.run.number
            self._log.note([number], [number], self._proposals.num_asked)

    def _take(self, message: RankCall | Remark) -> None:
        number = self.run.number
        if (ended := self._calls.take(self._record, message)) is not None:
            self._log.epoch_ended(number, ended.epoch + 1)
            has_converged = self._evaluator.has_converged(number, ended.last_step)
            decision = EpochDecision.STOP if has_converged else EpochDecision.GO
            self._calls.answer_epoch(self._record, AfterEpoch(decision))

    def flight(self, error: BaseException | None) -> Flight:
        """The record of its run, which has ended."""
        self._record.end_rank(
            Ended(
                run_id=self.run.run_id,
                rank=0,
                device=_DEVICE.index,
                time_s=time.monotonic(),
                ending=Ending.RETURNED if error is None else Ending.RAISED,
                usage=self.usage,
            )
        )
        return self._record.flight(end=time.time())

    def _await_reply(self, index: int) -> Reply:
        while (reply := self._replies.popleft()).index != index:
            pass  # nobody has waited for it
        return reply
