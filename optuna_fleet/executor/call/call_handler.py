"""Answers the calls that runs make: on the study, on its storage, on the fleet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from optuna_fleet.exceptions import StorageLostError
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.sampler_bridge.patience import is_gone
from optuna_fleet.sampler_bridge.proposals import BackgroundSampler
from optuna_fleet.sampler_bridge.retention import CheckpointRetention
from optuna_fleet.wire.calls import (
    AfterEpoch,
    Call,
    EndEpoch,
    IsAmongBest,
    RankCall,
    Reply,
    Report,
    ShouldPrune,
)
from optuna_fleet.wire.messages import Remark
from optuna_fleet.wire.packing import pack, pack_error, unpack

_SLOW_S = 0.1


class CallHandler:
    """Carries out rank 0's calls, and gives the other ranks the same answers.

    Args:
        send: Sends an answer to the trial on a device.
        go_on_after: Sees to it that `go_on` is called once a slow sampler has proposed.
    """

    def __init__(
        self,
        send: Callable[[int, Any], None],
        ledger: Ledger,
        retention: CheckpointRetention,
        go_on_after: Callable[[Future[None]], None],
    ) -> None:
        self._send = send
        self._go_on_after = go_on_after
        self._ledger = ledger
        self._retention = retention
        self._told: set[str] = set()  # what remarks were about
        self._sampler: BackgroundSampler | None = None
        self._is_sampling = False
        self._waiting: deque[tuple[RunRecord, Call]] = deque()

    def take(self, run: RunRecord, call: RankCall | Remark) -> EndEpoch | None:
        """Take a call and answer it; or return one that asks what to do after an epoch."""
        if isinstance(call, RankCall):
            run.calls.take(call)
            return self._carry_out(run)
        if not (call.keys and self._told.issuperset(call.keys)):  # once, though each may find it
            self._told.update(call.keys)
            compat.fleet_logger.warning(f"Trial {run.launch.number}: {call.text}")
        return None

    def _carry_out(self, run: RunRecord) -> EndEpoch | None:
        """Carry out those of rank 0's calls that wait for no other rank."""
        ended = None
        while run.calls.queue and (call := run.calls.next_call()) is not None:
            match call:
                case EndEpoch():
                    run.pending_epoch = ended = call
                case Call() if call.is_suggestion:
                    self._waiting.append((run, call))
                    self._suggest()
                case _:
                    run.calls.answer(call, self._carried_out(run, call))
        self._send_replies(run)
        return ended

    def _answer(self, run: RunRecord, call: RankCall, reply: Reply) -> None:
        run.calls.answer(call, reply)
        self._send_replies(run)

    def _send_replies(self, run: RunRecord) -> None:
        for rank, reply in run.calls.replies:
            self._send(run.launch.devices[rank], reply)
        run.calls.replies.clear()

    # -- the sampler ------------------------------------------------------------------------------

    def _suggest(self) -> None:
        """Carry out suggestions in turn; one for which a slow sampler must think ends this.

        So the sampler serves one trial at a time; all other calls go on meanwhile.
        """
        while self._waiting and not self._is_sampling:
            run, call = self._waiting[0]
            trial = self._ledger.unsampled(run.launch.number, call)
            if trial is not None and self._sampler is not None:
                self._is_sampling = True
                self._go_on_after(self._sampler.sample(trial))
                return
            self._waiting.popleft()
            began = time.monotonic()
            self._answer(run, call, self._carried_out(run, call))
            is_slow = trial is not None and time.monotonic() - began > _SLOW_S
            if is_slow and not compat.is_bound_to_thread(self._ledger.study):
                self._sampler = BackgroundSampler(self._ledger.study)

    def go_on(self, error: BaseException | None) -> None:
        """Answer the trial that the sampler has thought for, and then those in line.

        If a storage is gone, the trial samples when it suggests, and waits for it.
        """
        self._is_sampling = False
        run, call = self._waiting.popleft()
        failed = None if error is None or is_gone(error) else call.reply(error=pack_error(error))
        self._answer(run, call, failed or self._carried_out(run, call))
        self._suggest()

    def end(self) -> None:
        """The call is over."""
        if self._sampler is not None:
            self._sampler.close()

    # -- other calls ------------------------------------------------------------------------------

    def answer_epoch(self, run: RunRecord, answer: AfterEpoch) -> None:
        """Tell a run what to do after its epoch."""
        call, run.pending_epoch = run.pending_epoch, None
        assert call is not None
        self._answer(run, call, call.reply(pack(answer)))

    def leave(self, run: RunRecord, rank: int) -> None:
        """A rank has left the objective: it makes no more calls that others wait for."""
        run.calls.leave(rank)
        self._carry_out(run)

    def _carried_out(self, run: RunRecord, call: RankCall) -> Reply:
        """What is asked of the study."""
        number = run.launch.number
        try:
            value: Any = None
            match call:
                case Report():
                    self._ledger.report(number, call.value, call.step)
                    return call.reply()
                case ShouldPrune():
                    value = self._ledger.should_prune(number, call.last_step)
                case IsAmongBest():
                    value = self._retention.is_among_best(unpack(call.value))
                case Call():
                    value = self._ledger.carry_out(number, call)
            return call.reply(pack(value))
        except StorageLostError:  # no matter of this trial's
            raise
        except Exception as error:
            return call.reply(error=pack_error(error))
