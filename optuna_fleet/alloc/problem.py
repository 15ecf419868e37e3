"""The allocation problem, its answer, and what every answer must keep to.

A *flotilla* is a set of trials that share one stream of preprocessed data, so their rates must be
close (FLEET, section 4.3). Several flotillas may fly at once on disjoint devices.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

from optuna_fleet.exceptions import FleetError

SEVERAL = "several types"
"""Stands for a device type where devices are of more than one."""


class AllocationFailed(FleetError):  # noqa: N818 - names what happened; the fallback takes over
    """An allocator has no answer; the caller takes that of its fallback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What whoever plans is told of a trial as it was said: another fact is another field here.

    Attributes:
        samples_per_epoch: Samples of one epoch; of one unit of work if that is not known.
        max_epochs: Epochs after which it ends at the latest; None if that is not known.
    """

    samples_per_epoch: float = 1.0
    max_epochs: int | None = None

    def facts(self) -> dict[str, Any]:
        """They, for what else is told of the trial."""
        return {field.name: getattr(self, field.name) for field in fields(Facts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Facts):
    """A trial that flies or could fly.

    Attributes:
        number: Trial number.
        rates: (r(1), ..., r(M)) in samples/s; widths beyond M are not considered. Where device
            types differ, those of the type it flies on, or any type's if it flies on none.
        devices: Devices it flies on now; empty if it waits.
        min_devices: Fewest devices it can fly on.
        max_devices: Most devices it can fly on; None for no limit but ``len(rates)``.
        waited_rounds: Decisions in which it has been passed over.
        epochs_done: Epochs it has finished; it is in the *phase* of this number.
        predicted_epochs: Epochs in all that somebody predicts; None if nobody does.
        movable: Whether its devices can change now; if not, it stays where it flies.
        is_within_epoch: Whether it flies, and its epoch has not ended.
        rescale_up_s: Seconds of training lost when it gets more devices, or its first.
        rescale_down_s: Seconds of training lost when it gets fewer devices.
        rates_by_kind: Device type -> rates there, as many as ``rates``; empty if those hold on
            all types. `SEVERAL` is among them, with rates expected on a mixture, if it can have
            devices of several types at once.
    """

    number: int
    rates: tuple[float, ...]
    devices: tuple[int, ...] = ()
    min_devices: int = 1
    max_devices: int | None = None
    waited_rounds: int = 0
    epochs_done: int = 0
    predicted_epochs: float | None = None
    movable: bool = True
    is_within_epoch: bool = False
    rescale_up_s: float = 0.0
    rescale_down_s: float = 0.0
    rates_by_kind: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for rates in (self.rates, *self.rates_by_kind.values()):
            assert len(rates) == len(self.rates) > 0, self
            assert 0 < min(rates) <= max(rates) < math.inf, self
        assert 1 <= self.min_devices <= self.widest, self
        assert self.movable or 1 <= len(self.devices) <= len(self.rates), self

    @property
    def widest(self) -> int:
        """Most devices it can fly on."""
        known = len(self.rates)
        return known if self.max_devices is None else min(known, self.max_devices)

    @property
    def spans_types(self) -> bool:
        """Whether it can have devices of several types at once."""
        return SEVERAL in self.rates_by_kind

    def rate(self, m: int) -> float:
        """r(m) in samples/s."""
        return self.rates[m - 1]

    def rates_on(self, kind: str) -> tuple[float, ...]:
        """(r(1), ..., r(M)) in samples/s on devices of that type."""
        return self.rates_by_kind.get(kind, self.rates)

    def as_on(self, kind: str) -> Candidate:
        """The same trial, as if all devices were of that type."""
        return replace(self, rates=self.rates_on(kind), rates_by_kind={})

    def useful_widths(self, limit: int, kind: str = "") -> tuple[int, ...]:
        """Admissible widths up to ``limit`` that are faster than every narrower one.

        The others waste devices: Eq. 5 of FLEET falls again beyond its peak.
        """
        widths = _useful_widths(self.rates_on(kind), self.min_devices, self.widest)
        return widths[: bisect_right(widths, limit)]


@lru_cache(maxsize=4096)
def _useful_widths(rates: tuple[float, ...], least: int, most: int) -> tuple[int, ...]:
    widths: list[int] = []
    for m in range(least, most + 1):
        if not widths or rates[m - 1] > rates[widths[-1] - 1]:
            widths.append(m)
    return tuple(widths)


@dataclass(frozen=True, kw_only=True)  # no slots: what follows from the fields is cached
class AllocationProblem:
    """What is to be decided: which candidates fly, on which devices.

    Attributes:
        candidates: Trials, flying or waiting, in any order.
        nodes: Indices of the devices that may be used now, per node; nodes may be uneven.
        rate_spread: Within one flotilla the fastest rate is at most this times the slowest one;
            ``math.inf`` for no bound.
        time_limit_s: Seconds a solver may take.
        preprocess_samples_per_s: What the preprocessors deliver to all streams together; None if
            that never limits. A stream runs as fast as its fastest trial. See
            :func:`optuna_fleet.alloc.streams.stream_limit` for a capacity nobody can keep to.
        phases: Whether all trials of one flotilla must be in the same phase (``epochs_done``).
        finished_epochs: Epochs of each trial that ended by itself, though it could go on.
        bounded_epochs: Epochs of each trial that ended because it was to have no more
            (`Candidate.max_epochs`).
        num_to_come: Trials that will be proposed later, as devices fall free.
        joined: Device -> when it joined the fleet, as an ordinal; those it lacks are the eldest.
        kinds: Device type of each node; empty if all are alike. A trial flies on devices of one
            type at a time, unless it spans types.
    """

    candidates: tuple[Candidate, ...]
    nodes: tuple[tuple[int, ...], ...]
    rate_spread: float = 2.0
    time_limit_s: float = 1.0
    preprocess_samples_per_s: float | None = None
    phases: bool = False
    finished_epochs: tuple[int, ...] = ()
    bounded_epochs: tuple[int, ...] = ()
    num_to_come: int = 0
    joined: Mapping[int, int] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert not repeated(c.number for c in self.candidates)
        assert not repeated(self.devices)
        assert not repeated(d for c in self.candidates if not c.movable for d in c.devices)
        assert not self.kinds or len(self.kinds) == len(self.nodes)
        for c in self.candidates if self.kinds else ():
            kind = self.kind_now(c)
            assert not c.rates_by_kind or c.rates_by_kind.keys() >= set(self.kinds), c
            assert kind != SEVERAL or c.spans_types, c
            assert not kind or c.rates_on(kind) == c.rates, c

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """Indices of all devices that may be used now, node by node."""
        return tuple(device for node in self.nodes for device in node)

    @cached_property
    def node_of(self) -> Mapping[int, int]:
        """Device -> position of its node in `nodes`."""
        return {device: n for n, node in enumerate(self.nodes) for device in node}

    @cached_property
    def _available(self) -> frozenset[int]:
        return frozenset(self.devices)

    @property
    def num_devices(self) -> int:
        """Number of devices that may be used now."""
        return len(self.devices)

    @cached_property
    def by_number(self) -> Mapping[int, Candidate]:
        """Candidates by trial number, in ascending order."""
        return {c.number: c for c in sorted(self.candidates, key=lambda c: c.number)}

    @cached_property
    def num_by_kind(self) -> Mapping[str, int]:
        """Number of devices of each type, in ascending order; of type "" if all are alike."""
        kinds = self.kinds or ("",) * len(self.nodes)
        totals = dict.fromkeys(sorted(set(kinds)), 0)
        for kind, node in zip(kinds, self.nodes, strict=True):
            totals[kind] += len(node)
        return totals

    @cached_property
    def _kind_of(self) -> Mapping[int, str]:
        pairs = zip(self.kinds, self.nodes, strict=True) if self.kinds else ()
        return {device: kind for kind, node in pairs for device in node}

    def kind_of_node(self, node: int) -> str:
        """Type of the devices at that position of `nodes`; "" if all are alike."""
        return self.kinds[node] if self.kinds else ""

    def kinds_of(self, devices: Iterable[int]) -> list[str]:
        """Types of those of the devices that may be used now; none if all are alike."""
        return sorted({self._kind_of[d] for d in devices if d in self._kind_of})

    def kind_of(self, devices: Iterable[int]) -> str:
        """Their type, or `SEVERAL`; "" if none of them may be used now, or all are alike."""
        kinds = self.kinds_of(devices) if self.kinds else ()
        return SEVERAL if len(kinds) > 1 else next(iter(kinds), "")

    def kind_now(self, candidate: Candidate) -> str:
        """Type of the devices it flies on; see `kind_of`."""
        return self.kind_of(candidate.devices)

    def types_of(self, number: int, kind: str) -> list[str]:
        """Types that a trial's devices may be of, the fastest first, if they are of that kind."""
        rates_on = self.by_number[number].rates_on
        kinds = sorted(self.num_by_kind, key=lambda k: -rates_on(k)[0])
        return kinds if kind == SEVERAL else [kind]

    def kept_width(self, candidate: Candidate) -> int | None:
        """Width at which it can go on where it is.

        None if it waits, if a device is gone, or if it may not have so few or so many.
        """
        m = len(candidate.devices)
        is_admissible = candidate.min_devices <= m <= candidate.widest
        return m if m and is_admissible and self._is_there(candidate) else None

    def widths(self, candidate: Candidate, kind: str) -> list[int]:
        """Widths to choose from on one type: the useful ones, and what it has there."""
        useful = candidate.useful_widths(self.num_devices, kind)
        kept = self.kept_width(candidate) if self.kind_now(candidate) == kind else None
        return sorted({*useful, *([kept] if kept else ())})

    @cached_property
    def pinned(self) -> Mapping[int, int]:
        """Trial number -> devices of each trial that must stay exactly where it is.

        One that lost a device can't stay; it is treated as if it could move.
        """
        staying = (c for c in self.by_number.values() if not c.movable and c.devices)
        return {c.number: len(c.devices) for c in staying if self._is_there(c)}

    def _is_there(self, candidate: Candidate) -> bool:
        return self._available.issuperset(candidate.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One trial's devices and the rate expected on them, in samples/s."""

    number: int
    devices: tuple[int, ...]
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flotilla:
    """Trials that share one stream of data."""

    assignments: tuple[Assignment, ...]

    @property
    def reference_rate(self) -> float:
        """Rate of the slowest trial, in samples/s; the others wait for it if the ring is full."""
        return min(a.rate for a in self.assignments)

    @property
    def stream_rate(self) -> float:
        """Rate of the fastest trial, in samples/s, which is what the stream draws; 0 without."""
        return max([a.rate for a in self.assignments], default=0.0)

    @property
    def num_devices(self) -> int:
        """Devices of all its trials."""
        return sum(len(a.devices) for a in self.assignments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A decision, and why.

    Attributes:
        flotillas: What flies; every candidate not in it waits.
        allocator: Name of the allocator that made it.
        reason: One sentence for people.
        status: How sure it is: "optimal", "feasible" (stopped at the time limit), "trivial",
            "heuristic", or "fallback: ..." with the cause.
        solver: Who solved the model, "CBC" or "HIGHS"; empty if nobody had to.
        gap: Relative distance to the solver's bound; None where there is no bound.
        solve_time_s: Seconds the decision took; two plans that differ only here are equal.
    """

    flotillas: tuple[Flotilla, ...]
    allocator: str
    reason: str
    status: str
    solver: str = ""
    gap: float | None = None
    solve_time_s: float = field(default=0.0, compare=False)

    @property
    def assignments(self) -> dict[int, Assignment]:
        """Assignments by trial number."""
        return {a.number: a for f in self.flotillas for a in f.assignments}


class Allocator(Protocol):
    """Decides which trials fly on which devices.

    ``allocate`` must be a pure function of the problem: equal problems, in any order of their
    candidates, give equal plans, and nothing is kept from call to call. A plan passes
    :func:`optuna_fleet.alloc.validate`.
    """

    @property
    def name(self) -> str:
        """Short name for logs and plans."""

    def allocate(self, problem: AllocationProblem) -> Plan:
        """Solves ``problem``.

        Raises:
            AllocationFailed: There is no answer; the caller takes its fallback.
        """


def repeated(items: Iterable[int]) -> list[int]:
    """Items that occur more than once, in ascending order."""
    return sorted(item for item, times in Counter(items).items() if times > 1)
