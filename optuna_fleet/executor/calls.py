"""Calls of the ranks of one run: rank 0's is carried out, the others get the same answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from optuna_fleet.exceptions import TrialError
from optuna_fleet.messages import Call, Reply
from optuna_fleet.packing import pack_error

_RULE = "Every rank must make the same calls in the same order."


@dataclass(slots=True, kw_only=True)
class RunCalls:
    """Matches the calls of a run's ranks by their index."""

    world_size: int
    _names: dict[int, str] = field(default_factory=dict)
    _answers: dict[int, Reply] = field(default_factory=dict)
    _waiting: dict[int, list[Call]] = field(default_factory=dict)
    _is_closed: bool = False

    def answer(self, reply: Reply, name: str) -> list[tuple[int, Reply]]:
        """Rank 0's call was carried out; return (rank, reply) for all who wait for it."""
        if self.world_size > 1:
            self._answers[reply.index] = reply
            self._names[reply.index] = name
        waiting = self._waiting.pop(reply.index, [])
        return [(0, reply), *((call.rank, self._checked(call, reply)) for call in waiting)]

    def follow(self, call: Call) -> list[tuple[int, Reply]]:
        """Another rank makes its call; return its reply if there is one already."""
        reply = self._answers.get(call.index)
        if reply is not None:
            return [(call.rank, self._checked(call, reply))]
        if self._is_closed:
            return [(call.rank, _alone(call))]
        self._waiting.setdefault(call.index, []).append(call)
        return []

    def close(self) -> list[tuple[int, Reply]]:
        """Rank 0 makes no more calls; return what to tell those who wait for one."""
        self._is_closed = True
        waiting = [call for calls in self._waiting.values() for call in calls]
        self._waiting.clear()
        return [(call.rank, _alone(call)) for call in waiting]

    def _checked(self, call: Call, reply: Reply) -> Reply:
        expected = self._names[call.index]
        if expected == call.name:
            return reply
        return _refused(
            call,
            f"The ranks of a trial went different ways: rank 0 called `{expected}` where rank "
            f"{call.rank} called `{call.name}`. {_RULE}",
        )


def _alone(call: Call) -> Reply:
    return _refused(
        call,
        f"The ranks of a trial went different ways: rank {call.rank} called `{call.name}`, but "
        f"rank 0 had ended. {_RULE}",
    )


def _refused(call: Call, message: str) -> Reply:
    error = pack_error(TrialError(message))
    return Reply(run_id=call.run_id, index=call.index, error=error)
