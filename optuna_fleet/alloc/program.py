"""What there is to choose from, and a choice that needs no solver."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from optuna_fleet.alloc.draft import Choice, Draft, kind_of_share, rates_of
from optuna_fleet.alloc.problem import SEVERAL, AllocationProblem, Candidate
from optuna_fleet.alloc.streams import flotillas_of, stream_limit

Key = tuple[int, str, int]
"""(trial number, device type, devices)."""

Worth = Callable[[Candidate, str], Iterable[tuple[int, float]]]
"""Numbers of devices of a type, ascending, and what each is worth above waiting."""

Hull = list[tuple[int, float]]
"""Devices and what they are worth, ascending."""

Step = tuple[float, int, str, int, int]
"""(-gain per device, trial, type, from, to)."""

Prices = Mapping[str, float]
"""Of a device of each type."""

_ANY = -1  # a step from whatever it has

TIE = 1e-7
"""By how much of a gain that is preferred of what is worth as much."""

_MANY = 100  # options from which on it pays to rule some out beforehand


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A trial could get these devices: ``gain`` is their worth above that of waiting."""

    number: int
    kind: str
    devices: int
    gain: float

    @property
    def key(self) -> Key:
        """What it is, but for the gain."""
        return self.number, self.kind, self.devices


@dataclass(frozen=True, kw_only=True)
class Program:
    """What can be chosen, and within what.

    Attributes:
        problem: Where it comes from.
        options: By trial, then type, then width.
        room: Devices of each type that trials which can't move leave.
        fixed: Trials that can't move, with their devices.
        flotilla_cost: c, in the unit of the gains; below any gain, so that nothing idles for it.
        limit: What all streams may draw, in samples/s.
    """

    problem: AllocationProblem
    options: Sequence[Option]
    room: Mapping[str, int]
    fixed: Choice
    flotilla_cost: float
    limit: float

    @classmethod
    def of(cls, problem: AllocationProblem, worth: Worth, flotilla_cost: float = 0.0) -> Program:
        """All options that are worth more than waiting, and than each with fewer devices."""
        draft = Draft(problem)
        fixed, room = draft.choice, draft.free
        options = [
            _preferred(problem, option)
            for number, candidate in problem.by_number.items()
            if number not in fixed
            for kind in (*room, *([SEVERAL] if candidate.spans_types and len(room) > 1 else []))
            for option in _options(candidate, kind, worth(candidate, kind), _room(room, kind))
        ]
        return cls(
            problem=problem,
            options=options,
            room=room,
            fixed=fixed,
            flotilla_cost=min([flotilla_cost, *(o.gain / 2 for o in options)]),
            limit=stream_limit(problem),
        )

    @cached_property
    def gains(self) -> Mapping[Key, float]:
        """Gain of each option."""
        return {o.key: o.gain for o in self.options}

    @property
    def has_flotillas(self) -> bool:
        """Whether it matters who shares a stream."""
        return self.flotilla_cost > 0 or math.isfinite(self.limit)

    def value(self, choice: Choice) -> float:
        """Sum of the gains, less the cost of the flotillas."""
        gain = sum(
            self.gains[number, kind_of_share(share), sum(share.values())]
            for number, share in choice.items()
            if number not in self.fixed
        )
        if not self.flotilla_cost:
            return gain
        flotillas = flotillas_of(self.problem, rates_of(self.problem, choice))
        return gain - self.flotilla_cost * len(flotillas)

    def without_hopeless(self, reached: float, prices: Prices) -> Program:
        """Without the options that are in no choice better than what is ``reached``.

        At any price of a device, the sum of what each trial likes best, with that of all devices,
        is a bound; an option that loses more at these prices than the gap is in no better choice.
        """
        if len(self.options) < _MANY:
            return self
        of_mixtures = min(prices.values())  # at the least: a bound, whatever they take
        reduced = np.array(
            [o.gain - o.devices * prices.get(o.kind, of_mixtures) for o in self.options]
        )
        numbers = [o.number for o in self.options]
        starts = [i for i, n in enumerate(numbers) if not i or n != numbers[i - 1]]
        best = np.maximum(np.maximum.reduceat(reduced, starts), 0.0)
        bound = best.sum() + sum(prices[kind] * n for kind, n in self.room.items())
        losses = np.repeat(best, np.diff([*starts, len(numbers)])) - reduced
        keeps = losses <= bound - reached + 1e-9 * abs(bound)
        return replace(self, options=[self.options[i] for i in np.flatnonzero(keeps).tolist()])


def _room(room: Mapping[str, int], kind: str) -> int:
    return sum(room.values()) if kind == SEVERAL else room[kind]


def _options(
    candidate: Candidate, kind: str, worth: Iterable[tuple[int, float]], room: int
) -> Iterator[Option]:
    most = 0.0
    for m, gain in worth:
        if most < gain and (kind == SEVERAL) < m <= room:
            most = gain
            yield Option(number=candidate.number, kind=kind, devices=m, gain=gain)


def _preferred(problem: AllocationProblem, option: Option) -> Option:
    """Among equals whoever flies there flies on, and rather as it is."""
    candidate = problem.by_number[option.number]
    if not candidate.devices or problem.kind_now(candidate) != option.kind:
        return option
    times = 1 + (option.devices == len(candidate.devices))
    return replace(option, gain=option.gain * (1 + times * TIE))


def by_slope(program: Program) -> tuple[Choice, Prices]:
    """Gives devices where each is worth most, as long as there are any.

    Optimal but for what the last devices do, where all are of one type and a trial's next ones are
    worth ever less. With several types, trials come first where they are not crowded.

    Returns:
        The choice, and the price of a device of each type: what the first that lacked was worth.
    """
    hulls = _hulls(program.options)
    steps = sorted(_steps(hulls))
    tried = [steps]
    if len(program.room) > 1:
        kinds = _uncrowded(hulls, program.room)
        tried.append(sorted(steps, key=lambda step: kinds[step[1]] != step[2]))
    last = sorted((-o.gain / o.devices, *o.key[:2], _ANY, o.devices) for o in program.options)
    filled = (_filled(program, (*order, *last)) for order in tried)
    return max(filled, key=lambda found: program.value(found[0]))


def _filled(program: Program, steps: Iterable[Step]) -> tuple[Choice, Prices]:
    """What all steps come to that can be made, in that order."""
    draft, prices = Draft(program.problem), dict.fromkeys(program.room, 0.0)
    grows_on: dict[int, tuple[str, int]] = {}
    for slope, number, kind, before, after in steps:
        there, now = grows_on.get(number, (kind, 0))
        if there != kind or before not in (now, _ANY) or now >= after:
            continue
        if draft.give(number, kind, after):
            grows_on[number] = kind, after
        elif before != _ANY and kind in prices:
            prices[kind] = prices[kind] or -slope
    return draft.choice, prices


def _uncrowded(hulls: Mapping[tuple[int, str], Hull], room: Mapping[str, int]) -> dict[int, str]:
    """The type where each trial's equal share is worth most, those first who care most."""
    crowd = dict.fromkeys(room, 1)

    def at_equal_share(number: int, kind: str) -> float:
        share = room.get(kind, 0) / crowd.get(kind, 1)
        devices, gains = zip(*hulls[number, kind], strict=True)
        return float(np.interp(share, devices, gains))

    of_trial: dict[int, list[str]] = {}
    for number, kind in hulls:
        of_trial.setdefault(number, []).append(kind)
    worth = {t: sorted(at_equal_share(t, k) for k in of_trial[t]) for t in of_trial}
    chosen = {}
    for number in sorted(of_trial, key=lambda t: worth[t][0] - worth[t][-1]):
        chosen[number] = max(of_trial[number], key=partial(at_equal_share, number))
        crowd[chosen[number]] = crowd.get(chosen[number], 1) + 1
    return chosen


def _hulls(options: Iterable[Option]) -> dict[tuple[int, str], Hull]:
    """Least concave majorant of what each trial's devices of a type are worth, from none on."""
    hulls: dict[tuple[int, str], Hull] = {}
    for o in options:
        hull = hulls.setdefault((o.number, o.kind), [(0, 0.0)])
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(
            hull[-1], (o.devices, o.gain)
        ):
            hull.pop()
        hull.append((o.devices, o.gain))
    return hulls


def _steps(hulls: Mapping[tuple[int, str], Hull]) -> Iterator[Step]:
    for (number, kind), hull in hulls.items():
        for before, after in pairwise(hull):
            yield -_slope(before, after), number, kind, before[0], after[0]


def _slope(before: tuple[int, float], after: tuple[int, float]) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])
