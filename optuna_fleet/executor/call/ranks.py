"""What the ranks of a run have in common: their calls, one sequence of steps, and what they say.

Rank 0's calls are carried out, the others get the same answers. Joint calls are carried out when
all ranks have made them, and only if all say the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any

from optuna_fleet.events import Ending
from optuna_fleet.exceptions import TrialError
from optuna_fleet.wire.calls import Call, RankCall, Reply, Report
from optuna_fleet.wire.messages import Ended, Progress
from optuna_fleet.wire.packing import Raised, pack_error, unpack

_TOLERANCE = 1e-4  # the same evaluation, by each rank for itself, on a GPU

_RULE = "Every rank must make the same calls in the same order."
_ADVICE = (
    "Each rank sees its part of the data only, so what is reported, returned or decided on must "
    "be made alike first: `trial.sum(correct) / trial.sum(total)`, or `trial.mean(loss, "
    "weight=trial.shard_size)`."
)


def unlike_values(what: str, values: Mapping[int, Any]) -> TrialError | None:
    """The error for what each rank has reported or returned, if that differs between ranks.

    Args:
        what: How the message begins, as "The value that the objective returned".
        values: By rank: numbers, or sequences of them; what is neither is not compared.
    """
    (first, said), *others = sorted(values.items())
    for rank, value in others:
        if not _alike(said, value):
            return TrialError(
                f"{what} is {said!r} on rank {first}, but {value!r} on rank {rank}. {_ADVICE}"
            )
    return None


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    try:
        one, other = float(one), float(other)
    except (TypeError, ValueError):
        return True  # Optuna will say what it wants
    both_nan = math.isnan(one) and math.isnan(other)
    return both_nan or math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-12)


def parted(ended: Sequence[Ended]) -> TrialError | None:
    """The error for ranks of an ended run that left the objective in different ways, if any did.

    A rank that leaves alone makes the others fail in whatever they have in common with it: that
    is no error of theirs.
    """
    ways = {one.rank: one.progress.way_out for one in ended if one.progress.way_out}
    if not ways:
        return None
    if error := out_of_step({one.rank: one.progress for one in ended}):
        return error
    kinds = set(ways.values())
    has_returned = any(one.ending is Ending.RETURNED for one in ended)
    if len(ways) < len(ended) and has_returned and len(kinds) == 1:
        return None  # the others' errors are their own
    if len(ways) == len(ended) and len(kinds) == 1:
        returned = {one.rank: unpack(one.value) for one in ended if one.value}
        return (
            unlike_values("The value that the objective returned", returned) if returned else None
        )
    said = ", ".join(f"rank {one.rank} {ways.get(one.rank, 'failed')}" for one in ended)
    return TrialError(f"The ranks of the trial went different ways: {said}. {_ADVICE}")


def out_of_step(progress: Mapping[int, Progress]) -> TrialError | None:
    """The error for ranks that went different ways, if any did.

    All ranks make the same calls and collectives in the same order, so each is at some place of
    one sequence: none can be behind another in calls and ahead of it in collectives, nor have come
    by a call with more of them than another, nor be in another collective of the same number, nor
    go beyond the end of one that has left.

    Each rank is looked at a few times, and compared with one other: there may be hundreds, of
    which each tells where it is several times a minute.
    """
    ordered = {rank: it for rank, it in progress.items() if it.is_ordered}
    places = sorted((it.num_collectives, it.num_calls, rank) for rank, it in ordered.items())
    return (
        _gone_beyond_an_end(ordered, places)
        or _passed_otherwise(ordered)
        or _behind_and_ahead(ordered, places)
        or _at_unlike_collectives(ordered)
    )


def _gone_beyond_an_end(
    ordered: Mapping[int, Progress], places: Sequence[tuple[int, int, int]]
) -> TrialError | None:
    left = {rank: it for rank, it in ordered.items() if it.way_out}
    if not left:
        return None
    in_collectives, in_calls = places[-1], max(places, key=itemgetter(1))
    for rank, it in left.items():
        for num_collectives, num_calls, other in (in_collectives, in_calls):
            if num_collectives > it.num_collectives or num_calls > it.num_calls:
                return _parting(f"rank {rank} {it.way_out}", it, other, ordered[other])
    return None


def _passed_otherwise(ordered: Mapping[int, Progress]) -> TrialError | None:
    first: dict[int, tuple[int, int]] = {}  # by call, who has come by it, after how many of them
    for rank, it in ordered.items():
        call, num_collectives = it.passed
        other, num_others = first.setdefault(call, (rank, num_collectives))
        if num_others != num_collectives:
            early, late = (rank, other) if num_collectives < num_others else (other, rank)
            return _called_early(ordered, early, late)
    return None


def _behind_and_ahead(
    ordered: Mapping[int, Progress], places: Sequence[tuple[int, int, int]]
) -> TrialError | None:
    for (_, num_calls, early), (_, num_others, late) in pairwise(places):
        if num_others < num_calls:
            return _called_early(ordered, early, late)
    return None


def _called_early(ordered: Mapping[int, Progress], early: int, late: int) -> TrialError:
    who = f"rank {early} left its loop, or made a call to the trial,"
    return _parting(who, ordered[early], late, ordered[late])


def _at_unlike_collectives(ordered: Mapping[int, Progress]) -> TrialError | None:
    first: dict[int, tuple[int, str]] = {}  # by number, who was at it, and what it is for
    for rank, it in ordered.items():
        for number, purpose in it.collectives:
            other, theirs = first.setdefault(number, (rank, purpose))
            if theirs != purpose:
                who = f"rank {other} is at {theirs}"
                return _parting(who, ordered[other], rank, it, purpose)
    return None


def _parting(who: str, it: Progress, one: int, other: Progress, purpose: str = "") -> TrialError:
    place = purpose or (other.collectives[-1][1] if other.collectives else "its next call")
    return TrialError(
        f"The ranks of the trial went different ways: {who} in epoch {it.epoch}, while rank {one} "
        f"went on, in epoch {other.epoch}, to {place}. {_ADVICE}"
    )


# -- calls ----------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class RunCalls:
    """Matches the calls of a run's ranks by their index.

    Attributes:
        send: Sends a rank the answer to its call.
        queue: Calls of rank 0 that are not carried out yet.
    """

    world_size: int
    send: Callable[[int, Reply], None]
    queue: deque[RankCall] = field(default_factory=deque)
    _waiting: dict[int, list[RankCall]] = field(default_factory=dict)  # the others', by index
    _done: dict[int, tuple[str, Reply]] = field(default_factory=dict)  # until all have read it
    _reached: dict[int, int] = field(default_factory=dict)  # by rank, the index of its last call
    _errors: dict[int, Raised] = field(default_factory=dict)  # of ranks that did not wait for it
    _left: set[int] = field(default_factory=set)

    def take(self, call: RankCall) -> RankCall | None:
        """A rank makes a call; return one of rank 0's that can be carried out now, if any can.

        Its `answer` is due, and then `next_call` may have another one.
        """
        self._reached[call.rank] = call.index
        if call.rank == 0:
            if self.world_size == 1 and not self._errors:
                return call  # there is nobody to agree with
            self.queue.append(call)
            return self.next_call()
        if call.is_awaited and call.rank in self._errors:
            self._give(call, call.reply())
        elif call.index in self._done:
            self._follow(call)
        elif 0 in self._left and all(call.index != made.index for made in self.queue):
            self._give(call, _refused(call, _alone(call, 0)))
        else:
            self._waiting.setdefault(call.index, []).append(call)
        self._forget()
        return self.next_call()

    def next_call(self) -> RankCall | None:
        """Rank 0's next call, if it can be carried out now: `answer` is due."""
        while self.queue:
            if self.queue[-1].is_awaited and 0 in self._errors:  # whatever else it waits for
                last = self.queue.pop()
                self.answer(last, last.reply())
                continue
            call = self.queue[0]
            others = self._waiting.get(call.index, [])
            is_joint = self.world_size > 1 and _is_joint(call)
            if is_joint and (problem := self._problem(call, others)):
                self.answer(self.queue.popleft(), _refused(call, problem))
            elif is_joint and len(others) + 1 < self.world_size:
                return None
            else:
                return self.queue.popleft()
        return None

    def answer(self, call: RankCall, reply: Reply) -> None:
        """Rank 0's call was carried out: answer all that wait for it, now or later."""
        reply = self._give(call, reply)
        if self.world_size > 1:
            self._done[call.index] = (call.name, reply)
            for other in self._waiting.pop(call.index, ()):
                self._follow(other)
            self._forget()

    def leave(self, rank: int) -> None:
        """A rank makes no more calls; who waits for one of its does so in vain."""
        self._left.add(rank)
        made = {call.index for call in self.queue}
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

    def _give(self, call: RankCall, reply: Reply) -> Reply:
        """Answer a call; return how: an error that its rank did not wait for comes first.

        Where the rank does not wait, an error is kept for when it does.
        """
        if call.is_awaited:
            if (error := self._errors.pop(call.rank, None)) is not None:
                reply = replace(reply, index=call.index, error=error)
            self.send(call.rank, reply)
        elif reply.error is not None:
            self._errors.setdefault(call.rank, reply.error)
            waiting = self._waiting.get(self._reached[call.rank], [])
            for other in [one for one in waiting if one.rank == call.rank and one.is_awaited]:
                waiting.remove(other)
                self._give(other, reply)
        return reply

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
