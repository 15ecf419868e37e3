"""Answers the calls that runs make: on the study, on its storage, on the fleet."""

from __future__ import annotations

from optuna_fleet.events import EpochDecision
from optuna_fleet.executor.runs import RunRecord
from optuna_fleet.executor.runtime import Runtime
from optuna_fleet.messages import Call, Reply
from optuna_fleet.packing import pack, pack_error, unpack
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.ledger import Ledger


class Desk:
    """Carries out rank 0's calls, and gives the other ranks the same answers."""

    def __init__(self, runtime: Runtime, ledger: Ledger) -> None:
        self._runtime = runtime
        self._ledger = ledger

    def take(self, run: RunRecord, call: Call) -> int | None:
        """Take a call and answer it, unless it asks what to do after an epoch.

        Returns:
            That epoch; its answer is due later.
        """
        if call.rank > 0:
            self._reply(run, run.calls.follow(call))
        elif (call.target, call.name) == ("fleet", "end_epoch"):
            run.pending_epoch = call
            (epoch,), _ = unpack(call.arguments)
            return int(epoch)
        else:
            self._reply(run, run.calls.answer(self._carried_out(run, call), call.name))
        return None

    def answer_epoch(self, run: RunRecord, decision: EpochDecision) -> None:
        """Tell a run what to do after its epoch."""
        call, run.pending_epoch = run.pending_epoch, None
        assert call is not None
        reply = Reply(run_id=call.run_id, index=call.index, value=pack(decision))
        self._reply(run, run.calls.answer(reply, call.name))

    def close(self, run: RunRecord) -> None:
        """Rank 0 has left the objective: nobody makes the calls any more that others wait for."""
        self._reply(run, run.calls.close())

    def _carried_out(self, run: RunRecord, call: Call) -> Reply:
        number = run.launch.number
        try:
            if (call.target, call.name) == ("fleet", "warn"):
                (text,), _ = unpack(call.arguments)
                compat.fleet_logger.warning(f"Trial {number}: {text}")
                value = None
            else:
                value = self._ledger.carry_out(number, call)
            return Reply(run_id=call.run_id, index=call.index, value=pack(value))
        except Exception as error:
            return Reply(run_id=call.run_id, index=call.index, error=pack_error(error))

    def _reply(self, run: RunRecord, replies: list[tuple[int, Reply]]) -> None:
        for rank, reply in replies:
            self._runtime.send(run.launch.devices[rank], reply)
