"""The count problem: how many devices of which kind each trial gets (BFTrainer, Eq. 16).

Devices of one kind are interchangeable, so the paper's binaries per node and its constraints
against migration (Eq. 5 to 10) are not needed: who shrinks keeps some of what he has, who grows
all of it, and the rest suffices exactly if the widths sum to at most the devices. What remains is
a multiple-choice knapsack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

MAX_CELLS = 10_000_000
"""Trials x (devices + 1) of each kind up to which :func:`solve_exactly` takes several kinds."""

_TOLERANCE = 1e-12  # relative to the bound: what rounding may hide
_GROWTH = 2  # of the number of options that are tried

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Option = tuple[int, int, float]
"""(kind, devices, gain), of a trial or on top of its least."""

_NOTHING: Option = (0, 0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CountProblem:
    """What is to be shared out, and what it is worth.

    Attributes:
        values: One float64 array ``[num_kinds, max_width + 1]`` per trial: ``[k, n]`` is the worth
            of n devices of kind k, -inf where that is not admissible. All kinds agree on column 0,
            the worth of waiting, which is finite. Not to be changed afterwards.
        capacities: Devices of each kind.
    """

    values: tuple[Array, ...]
    capacities: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.values:  # all trials at once: a replay builds a problem at each of many events
            waiting = np.array([v[:, 0] for v in self.values])
            assert waiting.shape[1] == self.num_kinds
            assert (waiting == waiting[:, :1]).all()
            assert (waiting > -np.inf).all()
            assert (np.concatenate(self.values, axis=None) < np.inf).all()

    @property
    def num_kinds(self) -> int:
        """Number of kinds of devices."""
        return len(self.capacities)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many devices each trial gets.

    Attributes:
        widths: (kind, devices) per trial; (0, 0) if it waits.
        status: "optimal", or "feasible" if the time limit came first.
        gap: Relative distance to the solver's bound; None if it has none.
    """

    widths: tuple[tuple[int, int], ...]
    status: Literal["optimal", "feasible"]
    gap: float | None


def solve_exactly(problem: CountProblem) -> Counts:
    """The optimum, by Lagrangian bound and dynamic programming.

    For one kind, a Lagrangian multiplier (the price of a device) gives an upper bound and, filled
    up greedily, often a solution that reaches it. If not, it rules out most options: one whose
    loss at this price exceeds the gap is in no better solution. Dynamic programming decides about
    the rest. Several kinds take dynamic programming over all their capacities at once; where that
    is more than ``MAX_CELLS`` cells, use ``solve_by_mip``.

    Equal problems have equal answers; which of several optima that is depends on the order of the
    trials. Sums that differ by less than 1e-12 of the gains over waiting count as equal.
    """
    if problem.values and problem.num_kinds == 1:
        widths = [(0, n) for n in _solve_one_kind(problem.values, problem.capacities[0])]
    else:
        widths = _solve_many_kinds(problem)
    return Counts(widths=tuple(widths), status="optimal", gap=0.0)


def useful_options(gains: Array) -> tuple[list[int], list[int], list[float]]:
    """Rows, widths and gains of the options with more gain than 0 and than all narrower ones."""
    narrower = np.maximum.accumulate(np.maximum(gains, 0.0), axis=1)
    rows, columns = np.nonzero(gains[:, 1:] > narrower[:, :-1])
    worth = gains[rows, columns + 1]
    return rows.tolist(), (columns + 1).tolist(), worth.tolist()


def _solve_many_kinds(problem: CountProblem) -> list[tuple[int, int]]:
    most = sum(values.shape[1] - 1 for values in problem.values)
    room = tuple(min(capacity, most) for capacity in problem.capacities)
    assert len(problem.values) * math.prod(n + 1 for n in room) <= MAX_CELLS
    tables = [[_NOTHING, *zip(*useful_options(v - v[0, 0]), strict=True)] for v in problem.values]
    return [(kind, n) for kind, n, _ in _best_choice(tables, room)]


def _solve_one_kind(values: Sequence[Array], capacity: int) -> list[int]:
    gains = _gains(values, capacity)
    price, widths = _best_price(gains, capacity)
    reduced = gains - price * np.arange(gains.shape[1])
    best = reduced.max(axis=1)
    losses = best[:, None] - reduced
    losses[np.arange(len(losses)), widths] = 0.0  # but for rounding; so the least fit together
    bound = float(best.sum()) + price * capacity
    slack = _TOLERANCE * bound
    gap = bound - _total(gains, widths)
    if gap > slack:
        widths = _fill(losses <= slack, capacity)
        gap = bound - _total(gains, widths)
    if gap > slack:
        widths = _search(gains, losses, capacity, bound, gap)
    return [int(n) for n in widths]


def _search(gains: Array, losses: Array, capacity: int, bound: float, gap: float) -> Ints:
    """The best widths, by dynamic programming over the options that lose least.

    The best choice among some options is the best of all if it loses no more than the least that
    another option would lose alone. So few options are tried first, then more.
    """
    slack = _TOLERANCE * bound
    ascending = np.sort(losses, axis=None)
    num_tried = len(gains)
    while True:
        more = min(_GROWTH * num_tried, losses.size - 1)
        limit = min(gap, float(ascending[more])) + slack
        widths = _choose(gains, losses <= limit, capacity)
        gap = bound - _total(gains, widths)
        num_tried = int(np.searchsorted(ascending, limit, side="right"))
        if num_tried == losses.size or gap <= ascending[num_tried]:
            return widths


def _gains(values: Sequence[Array], capacity: int) -> Array:
    """Gains over waiting, one row per trial, padded with -inf to the widest one."""
    lengths = np.array([v.shape[1] for v in values])
    columns = np.arange(lengths.max())
    gains = np.full((len(values), len(columns)), -np.inf)
    gains[columns < lengths[:, None]] = np.concatenate(values, axis=None)
    above: Array = gains[:, : capacity + 1] - gains[:, :1]
    return above


def _total(gains: Array, widths: Ints) -> float:
    return float(gains[np.arange(len(gains)), widths].sum())


def _best_price(gains: Array, capacity: int) -> tuple[float, Ints]:
    """The price per device with the least upper bound, by cutting planes in one dimension.

    At each price, what every trial likes best adds up to a line of the bound; the next price is
    where the flattest lines of both sides meet. Each new line lies between these, so this ends.
    Any price >= 0 gives a valid bound; should rounding stop it early, less is ruled out.

    Returns:
        The price, and what the trials like best there and fits.
    """
    columns = np.arange(gains.shape[1])
    price, fitting = 0.0, np.zeros(len(gains), np.int64)
    plenty, scarce = (0, 0.0), (math.inf, math.inf)
    while True:
        widths = (gains - price * columns).argmax(axis=1)
        line = int(widths.sum()), _total(gains, widths)
        if line[0] <= capacity and (price == 0 or line[0] == capacity):
            return price, widths
        if not plenty[0] < line[0] < scarce[0]:
            return price, fitting
        if line[0] < capacity:
            plenty, fitting = line, widths
        else:
            scarce = line
        price = max(0.0, (scarce[1] - plenty[1]) / (scarce[0] - plenty[0]))


def _fill(tied: NDArray[np.bool_], capacity: int) -> Ints:
    """Widens trial after trial as far as it is indifferent and devices are left."""
    widths: Ints = tied.argmax(axis=1)
    spare = capacity - int(widths.sum())
    for j in np.flatnonzero(tied.sum(axis=1) > 1):
        fitting = tied[j, : widths[j] + spare + 1]
        wider = len(fitting) - 1 - int(fitting[::-1].argmax())
        spare -= wider - int(widths[j])
        widths[j] = wider
        if not spare:
            break
    return widths


def _choose(gains: Array, allowed: NDArray[np.bool_], capacity: int) -> Ints:
    """The best widths among the allowed ones; the narrowest of each trial must fit together."""
    widths: Ints = allowed.argmax(axis=1)
    open_ = np.flatnonzero(allowed.sum(axis=1) > 1)
    least = widths[open_]
    extra = gains[open_] - gains[open_, least][:, None]
    tables = [[_NOTHING] for _ in open_]
    for row, n, gain in zip(
        *useful_options(np.where(allowed[open_], extra, -np.inf)), strict=True
    ):
        tables[row].append((0, n - int(least[row]), gain))
    room = min(capacity - int(widths.sum()), sum(table[-1][1] for table in tables))
    widths[open_] += [n for _, n, _ in _best_choice(tables, (room,))]
    return widths


def _best_choice(tables: Sequence[Sequence[Option]], room: tuple[int, ...]) -> list[Option]:
    """One option of each table, which fit in ``room`` together and gain most."""
    stages = [np.zeros([n + 1 for n in room])]
    for table in tables:
        stages.append(_stage(stages[-1], table))
    left, chosen = list(room), []
    for table, before, after in zip(reversed(tables), stages[-2::-1], stages[:0:-1], strict=True):
        most = after[tuple(left)]
        for kind, n, gain in table:
            left[kind] -= n
            if left[kind] >= 0 and before[tuple(left)] + gain == most:  # the same sum as before
                chosen.append((kind, n, gain))
                break
            left[kind] += n
    assert len(chosen) == len(tables)
    return chosen[::-1]


def _stage(before: Array, table: Sequence[Option]) -> Array:
    """Most gain within each room, of the tables before and this one."""
    after: Array = before.copy()
    views = [(before.swapaxes(0, kind), after.swapaxes(0, kind)) for kind in range(before.ndim)]
    for kind, n, gain in table[1:]:
        old, new = views[kind]
        if n < len(old):
            np.maximum(new[n:], old[:-n] + gain, out=new[n:])
    return after
