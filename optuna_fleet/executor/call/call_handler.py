"""Answers the calls that runs make: on the study, on its storage, on the fleet."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Any

from optuna_fleet.events import Event
from optuna_fleet.exceptions import StorageLostError
from optuna_fleet.executor.call import outcomes
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.executor.call.sweep import Sweep
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.patience import is_gone
from optuna_fleet.sampler_bridge.proposals import BackgroundSampler
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
from optuna_fleet.wire.packing import pack, pack_error, unpack

_SLOW_S = 0.1


class CallHandler:
    """Carries out rank 0's calls, and gives the other ranks the same answers."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._ledger = sweep.ledger
        self._sampler: BackgroundSampler | None = None
        self._is_sampling = False
        self._waiting: deque[tuple[RunRecord, Call]] = deque()

    def carry_out(self, run: RunRecord, call: RankCall | None) -> EndEpoch | None:
        """Carry out and answer a call of rank 0, and those after it that wait for no other rank.

        Return the one that asks what to do after an epoch, if it is among them.
        """
        ended, calls = None, run.calls
        while call is not None:
            if isinstance(call, EndEpoch):
                run.pending_epoch = ended = call
            elif isinstance(call, Call) and call.is_suggestion:
                self._waiting.append((run, call))
                self._suggest()
            else:
                calls.answer(call, self._carried_out(run, call))
            call = calls.next_call() if calls.queue else None
        return ended

    def _carried_out(self, run: RunRecord, call: RankCall) -> Reply:
        """What is asked of the study."""
        number, value = run.launch.number, None
        try:
            match call:
                case Report():
                    self._ledger.report(number, call.value, call.step)
                    return call.reply()
                case ShouldPrune():
                    value = self._ledger.should_prune(number, call.last_step)
                case IsAmongBest():
                    value = self._sweep.retention.is_among_best(unpack(call.value))
                case Call():
                    value = self._ledger.carry_out(number, call)
            return call.reply(pack(value))
        except StorageLostError:  # no matter of this trial's
            raise
        except Exception as error:
            return call.reply(error=pack_error(error))

    def answer_epoch(self, run: RunRecord, answer: AfterEpoch) -> None:
        """Tell a run what to do after its epoch."""
        call, run.pending_epoch = run.pending_epoch, None
        assert call is not None
        run.calls.answer(call, call.reply(pack(answer)))

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
                sampled = self._sampler.sample(trial)
                self._sweep.when_done(sampled, partial(self._go_on, sampled))
                return
            self._waiting.popleft()
            began = time.monotonic()
            run.calls.answer(call, self._carried_out(run, call))
            is_slow = trial is not None and time.monotonic() - began > _SLOW_S
            if is_slow and not compat.is_bound_to_thread(self._ledger.study):
                self._sampler = BackgroundSampler(self._ledger.study)

    def _go_on(self, sampled: Future[Any]) -> list[Event]:
        """Answer the trial that the sampler has thought for, and then those in line.

        If a storage is gone, the trial samples when it suggests, and waits for it.
        """
        self._is_sampling = False
        run, call = self._waiting.popleft()
        error = sampled.exception()
        failed = None if error is None or is_gone(error) else call.reply(error=pack_error(error))
        run.calls.answer(call, failed or self._carried_out(run, call))
        self._suggest()
        return outcomes.propose(self._sweep, again=True)

    def end(self) -> None:
        """The call is over."""
        if self._sampler is not None:
            self._sampler.close()
