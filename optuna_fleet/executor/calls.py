"""Calls of the ranks of one run: rank 0's is carried out, the others get the same answer.

Joint calls are carried out when all ranks have made them, and only if all say the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from optuna_fleet.exceptions import TrialError
from optuna_fleet.executor.ranks import unlike_values
from optuna_fleet.wire.calls import Call, RankCall, Reply
from optuna_fleet.wire.packing import pack_error, unpack

_JOINT = {("trial", "report"): 0, ("trial", "set_constraint"): 1}
"""Calls whose value must be alike on all ranks, and the position of that argument."""

_RULE = "Every rank must make the same calls in the same order."


@dataclass(slots=True, kw_only=True)
class RunCalls:
    """Matches the calls of a run's ranks by their index."""

    world_size: int
    _names: dict[int, str] = field(default_factory=dict)
    _answers: dict[int, Reply] = field(default_factory=dict)
    _waiting: dict[int, list[RankCall]] = field(default_factory=dict)
    _left: set[int] = field(default_factory=set)

    def is_joint(self, call: RankCall) -> bool:
        """Whether a call waits for those of all ranks."""
        return self.world_size > 1 and _key(call) in _JOINT

    def join(self, call: RankCall) -> tuple[RankCall | None, list[tuple[int, Reply]]]:
        """A rank makes a joint call.

        Returns:
            Rank 0's call if it is to be carried out now, and (rank, reply) for all who need not
            wait any longer.
        """
        if call.rank > 0 and (replies := self.follow(call)):
            return None, replies
        waiting = self._waiting.setdefault(call.index, [])
        if call.rank == 0:
            waiting.insert(0, call)
        if refused := self._refused_together(waiting):
            del self._waiting[call.index]
            return None, refused
        if len(waiting) < self.world_size:
            return None, []
        if error := _unlike(waiting):
            del self._waiting[call.index]
            return None, [(one.rank, _failed(one, error)) for one in waiting]
        return waiting.pop(0), []

    def _refused_together(self, waiting: list[RankCall]) -> list[tuple[int, Reply]]:
        """Replies to calls of one index of which not all can come, or that are not the same."""
        here = {call.rank for call in waiting}
        leader = next((call for call in waiting if call.rank == 0), None)
        for call in waiting:
            if leader is not None and call.name != leader.name:
                return [(one.rank, _refused(one, _differs(leader.name, call))) for one in waiting]
        if gone := sorted(self._left - here):
            return [(one.rank, _refused(one, _alone(one, gone[0]))) for one in waiting]
        return []

    def answer(self, reply: Reply, name: str) -> list[tuple[int, Reply]]:
        """Rank 0's call was carried out; return (rank, reply) for all who wait for it."""
        if self.world_size > 1:
            self._answers[reply.index] = reply
            self._names[reply.index] = name
        waiting = self._waiting.pop(reply.index, [])
        return [(0, reply), *((call.rank, self._checked(call, reply)) for call in waiting)]

    def follow(self, call: RankCall) -> list[tuple[int, Reply]]:
        """Another rank makes its call; return its reply if there is one already."""
        reply = self._answers.get(call.index)
        if reply is not None:
            return [(call.rank, self._checked(call, reply))]
        if 0 in self._left:
            return [(call.rank, _refused(call, _alone(call, 0)))]
        waiting = self._waiting.setdefault(call.index, [])
        waiting.append(call)
        if refused := self._refused_together(waiting) if waiting[0].rank == 0 else []:
            del self._waiting[call.index]
        return refused

    def leave(self, rank: int) -> list[tuple[int, Reply]]:
        """A rank makes no more calls; return what to tell those who wait for one of its."""
        self._left.add(rank)
        replies = []
        for index, waiting in list(self._waiting.items()):
            if waiting and (rank == 0 or self.is_joint(waiting[0])):
                replies += self._refused_together(waiting)
                del self._waiting[index]
        return replies

    def _checked(self, call: RankCall, reply: Reply) -> Reply:
        expected = self._names[call.index]
        return reply if expected == call.name else _refused(call, _differs(expected, call))


def _unlike(calls: list[RankCall]) -> TrialError | None:
    position = _JOINT[_key(calls[0])]
    values = {}
    for call in calls:
        assert isinstance(call, Call)
        args, _ = unpack(call.arguments)
        values[call.rank] = args[position]
    return unlike_values(f"The value given to trial.{calls[0].name}()", values)


def _key(call: RankCall) -> tuple[str, str]:
    return (call.target if isinstance(call, Call) else "", call.name)


def _differs(expected: str, call: RankCall) -> str:
    return (
        f"The ranks of a trial went different ways: rank 0 called `{expected}` where rank "
        f"{call.rank} called `{call.name}`. {_RULE}"
    )


def _alone(call: RankCall, gone: int) -> str:
    return (
        f"The ranks of a trial went different ways: rank {call.rank} called `{call.name}`, but "
        f"rank {gone} had ended. {_RULE}"
    )


def _refused(call: RankCall, message: str) -> Reply:
    return _failed(call, TrialError(message))


def _failed(call: RankCall, error: TrialError) -> Reply:
    return Reply(run_id=call.run_id, index=call.index, error=pack_error(error))
