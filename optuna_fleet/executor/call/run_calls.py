"""Calls of the ranks of one run: rank 0's is carried out, the others get the same answer.

Joint calls are carried out when all ranks have made them, and only if all say the same.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from optuna_fleet.events import Ending
from optuna_fleet.exceptions import TrialError
from optuna_fleet.executor.call.ranks import unlike_values
from optuna_fleet.wire.calls import Call, RankCall, Reply, Report
from optuna_fleet.wire.messages import Ended
from optuna_fleet.wire.packing import Raised, pack_error, unpack

_RULE = "Every rank must make the same calls in the same order."


@dataclass(slots=True, kw_only=True)
class RunCalls:
    """Matches the calls of a run's ranks by their index.

    Attributes:
        replies: Answers that are to be sent, and to which rank.
    """

    world_size: int
    replies: list[tuple[int, Reply]] = field(default_factory=list)
    _queue: deque[RankCall] = field(default_factory=deque)  # rank 0's, not carried out yet
    _waiting: dict[int, list[RankCall]] = field(default_factory=dict)  # the others', by index
    _done: dict[int, tuple[str, Reply]] = field(default_factory=dict)  # until all have read it
    _reached: dict[int, int] = field(default_factory=dict)  # by rank, the index of its last call
    _errors: dict[int, Raised] = field(default_factory=dict)  # of ranks that did not wait for it
    _left: set[int] = field(default_factory=set)

    def take(self, call: RankCall) -> None:
        """A rank makes a call; `next_call` says what to carry out now."""
        self._reached[call.rank] = call.index
        if call.rank == 0:
            self._queue.append(call)
        elif call.is_awaited and call.rank in self._errors:
            self._give(call, call.reply())
        elif call.index in self._done:
            self._follow(call)
        elif 0 in self._left and all(call.index != made.index for made in self._queue):
            self._give(call, _refused(call, _alone(call, 0)))
        else:
            self._waiting.setdefault(call.index, []).append(call)
        self._forget()

    def next_call(self) -> RankCall | None:
        """Rank 0's next call, if it can be carried out now: `answer` is due."""
        while self._queue:
            if self._queue[-1].is_awaited and 0 in self._errors:  # whatever else it waits for
                last = self._queue.pop()
                self.answer(last, last.reply())
                continue
            call = self._queue[0]
            others = self._waiting.get(call.index, [])
            is_joint = self.world_size > 1 and _is_joint(call)
            if is_joint and (problem := self._problem(call, others)):
                self.answer(self._queue.popleft(), _refused(call, problem))
            elif is_joint and len(others) + 1 < self.world_size:
                return None
            else:
                return self._queue.popleft()
        return None

    def answer(self, call: RankCall, reply: Reply) -> None:
        """Rank 0's call was carried out: answer all that wait for it, now or later."""
        reply = self._due(call, reply)
        self._give(call, reply)
        if self.world_size > 1:
            self._done[call.index] = (call.name, reply)
            for other in self._waiting.pop(call.index, ()):
                self._follow(other)
            self._forget()

    def leave(self, rank: int) -> None:
        """A rank makes no more calls; who waits for one of its does so in vain."""
        self._left.add(rank)
        made = {call.index for call in self._queue}
        for index in [index for index in self._waiting if 0 in self._left and index not in made]:
            for call in self._waiting.pop(index):
                self._give(call, _refused(call, _alone(call, 0)))
        self._forget()

    def at_its_end(self, ended: Ended) -> Ended:
        """How a rank has left the objective: with an error that it did not wait for, if any."""
        error = self._errors.get(ended.rank)
        if error is None or not ended.progress.way_out:
            return ended
        # Later than those that were raised, of which it may be a consequence.
        return replace(
            ended,
            ending=Ending.RAISED,
            error=error,
            value=b"",
            time_s=math.inf,
            progress=replace(ended.progress, way_out=""),
        )

    def _problem(self, call: RankCall, others: list[RankCall]) -> str | None:
        """Why a joint call can't be carried out, however long it waits."""
        if other := next((one for one in others if one.name != call.name), None):
            return _differs(call.name, other)
        if gone := sorted(self._left - {0} - {other.rank for other in others}):
            return _alone(call, gone[0])
        if len(others) + 1 < self.world_size:
            return None
        values = {one.rank: _value(one) for one in (call, *others)}
        error = unlike_values(f"The value given to trial.{call.name}()", values)
        return None if error is None else str(error)

    def _follow(self, call: RankCall) -> None:
        name, reply = self._done[call.index]
        is_same = call.name == name
        self._give(call, reply if is_same else _refused(call, _differs(name, call)))

    def _give(self, call: RankCall, reply: Reply) -> None:
        """Answer a call; where its rank does not wait, keep an error for when it does."""
        if call.is_awaited:
            self.replies.append((call.rank, self._due(call, reply)))
            self._errors.pop(call.rank, None)
        elif reply.error is not None:
            self._errors.setdefault(call.rank, reply.error)
            waiting = self._waiting.get(self._reached[call.rank], [])
            for other in [one for one in waiting if one.rank == call.rank and one.is_awaited]:
                waiting.remove(other)
                self._give(other, reply)

    def _due(self, call: RankCall, reply: Reply) -> Reply:
        """The reply to a call: an error that its rank did not wait for comes first."""
        error = self._errors.get(call.rank) if call.is_awaited else None
        return replace(reply, index=call.index, error=error) if error is not None else reply

    def _forget(self) -> None:
        """Drop the answers that all other ranks have read, or need not read any more."""
        others = set(range(1, self.world_size)) - self._left
        read = min((self._reached.get(rank, -1) for rank in others), default=math.inf)
        while self._done and (index := next(iter(self._done))) <= read:
            del self._done[index]


def _is_joint(call: RankCall) -> bool:
    """Whether a call's value must be alike on all ranks."""
    return isinstance(call, Report) or (
        isinstance(call, Call) and (call.target, call.name) == ("trial", "set_constraint")
    )


def _value(call: RankCall) -> Any:
    if isinstance(call, Report):
        return call.value
    assert isinstance(call, Call)
    (_, value), _ = unpack(call.arguments)
    return value


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
    return call.reply(error=pack_error(TrialError(message)))
