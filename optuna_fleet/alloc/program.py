"""What there is to choose from, and a choice that needs no solver."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from optuna_fleet.alloc.problem import SEVERAL, AllocationProblem, Candidate
from optuna_fleet.alloc.shares import Choice, Share, groups_of, kind_of_share, pinned_choice
from optuna_fleet.alloc.streams import affordable, demand, stream_limit
from optuna_fleet.alloc.windows import Key

FloatArray = NDArray[np.float64]

Worth = Callable[[Candidate, str], Iterable[tuple[int, float]]]
"""Numbers of devices of a type, ascending, and what each is worth above waiting."""

TIE = 1e-7
"""By how much of a gain that is preferred of what is worth as much."""

_MANY = 2_000  # options from which on it pays to rule some out beforehand
_HALVINGS = 40


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
    def of(cls, problem: AllocationProblem, worth: Worth, flotilla_cost: float) -> Program:
        """All options that are worth more than waiting, and than each with fewer devices."""
        fixed = pinned_choice(problem)
        room = dict(problem.num_by_kind)
        for share in fixed.values():
            for kind, m in share.items():
                room[kind] -= m
        options = [
            option
            for number, candidate in problem.by_number.items()
            if number not in fixed
            for kind in (*room, *([SEVERAL] if candidate.spans_types and len(room) > 1 else []))
            for option in _options(candidate, kind, worth(candidate, kind), _room(room, kind))
        ]
        options = [_preferred(problem, option) for option in options]
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

    def serves(self, choice: Choice) -> bool:
        """Whether the preprocessors can serve it."""
        if math.isinf(self.limit):
            return True
        return affordable(demand(*groups_of(self.problem, choice)), self.limit)

    def value(self, choice: Choice) -> float:
        """Sum of the gains, less the cost of the flotillas."""
        gain = sum(
            self.gains[number, kind_of_share(share), sum(share.values())]
            for number, share in choice.items()
            if number not in self.fixed
        )
        if not self.flotilla_cost:
            return gain
        return gain - self.flotilla_cost * len(groups_of(self.problem, choice)[1])

    def without_hopeless(self, reached: float) -> Program:
        """Without the options that are in no choice better than what is ``reached``.

        At any price of a device, the sum of what each trial likes best, with that of all devices,
        is a bound; an option that loses more at these prices than the gap is in no better choice.
        """
        if len(self.options) < _MANY:
            return self
        gains = np.array([o.gain for o in self.options])
        sizes = np.array([o.devices for o in self.options])
        kinds = [o.kind for o in self.options]
        starts = _starts([o.number for o in self.options])
        prices = _prices(gains, sizes, kinds, starts, self.room)
        reduced = gains - sizes * np.array([prices[kind] for kind in kinds])
        best = np.maximum(np.maximum.reduceat(reduced, starts), 0.0)
        bound = best.sum() + sum(prices[kind] * n for kind, n in self.room.items())
        lengths = np.diff([*starts, len(gains)])
        losses = np.repeat(best, lengths) - reduced
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


def by_slope(program: Program) -> Choice:
    """Gives devices where each is worth most, as long as there are any.

    Optimal but for what the last devices do, where a trial's next ones are worth ever less.
    """
    choice = {number: dict(share) for number, share in program.fixed.items()}
    free = dict(program.room)
    grows_on: dict[int, tuple[str, int]] = {}
    for _, number, kind, before, after in sorted(_steps(program.options)):
        if grows_on.get(number, (kind, 0)) != (kind, before):
            continue
        share = dict(choice.get(number, {}))
        left = dict(free)
        if not _take(left, share, program.problem.types_of(number, kind), after - before):
            continue
        if kind == SEVERAL and len(share) == 1:
            continue
        if program.serves({**choice, number: share}):
            choice[number], free, grows_on[number] = share, left, (kind, after)
    return choice


def _take(free: Share, share: Share, kinds: Iterable[str], m: int) -> bool:
    """Moves devices from those that are free, of the first types first."""
    for k in kinds:
        taken = min(m, free[k])
        if taken:
            free[k] -= taken
            share[k] = share.get(k, 0) + taken
            m -= taken
    return m == 0


def _steps(options: Sequence[Option]) -> list[tuple[float, int, str, int, int]]:
    """(-gain per device, trial, type, from, to) along each trial's least concave majorant."""
    hulls: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for o in options:
        hull = hulls.setdefault((o.number, o.kind), [(0, 0.0)])
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(
            hull[-1], (o.devices, o.gain)
        ):
            hull.pop()
        hull.append((o.devices, o.gain))
    return [
        (-_slope(before, after), number, kind, before[0], after[0])
        for (number, kind), hull in hulls.items()
        for before, after in pairwise(hull)
    ]


def _slope(before: tuple[int, float], after: tuple[int, float]) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])


def _starts(numbers: Sequence[int]) -> list[int]:
    """Where the options of each trial begin."""
    return [i for i, number in enumerate(numbers) if not i or number != numbers[i - 1]]


def _prices(
    gains: FloatArray,
    sizes: NDArray[np.int64],
    kinds: Sequence[str],
    starts: Sequence[int],
    room: Mapping[str, int],
) -> dict[str, float]:
    """A price per device of each type, at which what trials like best takes about all of them."""
    names = [*room, SEVERAL]
    of = np.array([names.index(kind) for kind in kinds])
    prices = np.zeros(len(names))
    trial = np.repeat(np.arange(len(starts)), np.diff([*starts, len(gains)]))

    def demanded(k: int) -> int:
        reduced = gains - sizes * prices[of]
        order = np.lexsort((-reduced, trial))
        first = order[np.asarray(starts)]
        likes = first[(reduced[first] > 0) & (of[first] == k)]
        return int(sizes[likes].sum())

    for k, kind in enumerate(room):
        low, high = 0.0, float((gains / sizes).max())
        for _ in range(_HALVINGS):
            prices[k] = (low + high) / 2
            low, high = (prices[k], high) if demanded(k) > room[kind] else (low, prices[k])
        prices[k] = high
    prices[-1] = prices[:-1].min()  # at the least: a bound, whatever it takes
    return dict(zip(names, prices.tolist(), strict=True))
