"""Calls of the ranks of one run: rank 0's is carried out, the others get the same answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from optuna_fleet.exceptions import TrialError
from optuna_fleet.messages import Call, Raised, Reply


@dataclass(slots=True, kw_only=True)
class RunCalls:
    """Matches the calls of a run's ranks by their index."""

    world_size: int
    _names: dict[int, str] = field(default_factory=dict)
    _answers: dict[int, Reply] = field(default_factory=dict)
    _waiting: dict[int, list[Call]] = field(default_factory=dict)

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
        if reply is None:
            self._waiting.setdefault(call.index, []).append(call)
            return []
        return [(call.rank, self._checked(call, reply))]

    def _checked(self, call: Call, reply: Reply) -> Reply:
        expected = self._names[call.index]
        if expected == call.name:
            return reply
        error = TrialError(
            f"The ranks of a trial went different ways: rank 0 called `{expected}` where rank "
            f"{call.rank} called `{call.name}`. Every rank must make the same calls in the same "
            "order."
        )
        raised = Raised(exception=error, traceback=str(error))
        return Reply(run_id=call.run_id, index=call.index, error=raised)
