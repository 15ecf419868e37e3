"""What the ranks of a trial must have in common: one sequence of steps, and what they say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

from optuna_fleet.events import Ending
from optuna_fleet.exceptions import TrialError
from optuna_fleet.wire.messages import Ended, Progress
from optuna_fleet.wire.packing import unpack

_TOLERANCE = 1e-4  # the same evaluation, by each rank for itself, on a GPU

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
