"""What is known of training rates, and what allocation may expect of a trial."""

from __future__ import annotations

import statistics
from dataclasses import replace

from optuna_fleet.alloc.problem import SEVERAL
from optuna_fleet.alloc.rates import RateProfile, pooled_scaling, profile_key
from optuna_fleet.executor.deciding.state import Presence

# A rate this far below what its plan was made for is a reason to decide again at once.
_SHORTFALL = 0.75


class Profiles:
    """Rate profiles by model structure and device type, and the rates that follow from them.

    What was never measured on a device type is estimated from another one: times the median of how
    much faster the one is than the other, over all structures measured on both; if there are none,
    they count as equally fast. A rate on several nodes that was never measured is that on one,
    times the median of what the other rates on so many nodes came to; 1 where there are none.

    A rate on devices of several types is taken to be the sum of what its devices add to the rates
    on their own types, in the proportion in which the fleet has them; times what the measured ones
    came to, in the median. They are measured anew for each mixture, and the last one counts.

    Args:
        known: Profiles by `profile_key`; grows with each measurement and may outlive this object.
    """

    def __init__(self, known: dict[str, RateProfile], devices: Presence) -> None:
        self._known = known
        self._devices = devices
        self._rates: dict[tuple[str, str, tuple[int, ...]], tuple[float, ...]] = {}
        self._shares: dict[int, float] = {}
        self._mixtures: set[tuple[str, frozenset[tuple[str, int]]]] = set()
        self._ratios: dict[tuple[str, str], tuple[int, float]] = {}
        self._scaling: float | None = None

    def is_measured(self, structure: str, devices: tuple[int, ...]) -> bool:
        """Whether the structure's rate on so many devices of their type was measured."""
        kind = self._devices.kind_of_all(devices)
        if kind == SEVERAL:
            return self._mixture(structure, devices) in self._mixtures
        profile = self._known.get(profile_key(structure, kind))
        num_nodes = len(self._devices.nodes_of(devices))
        return profile is not None and profile.is_measured(len(devices), num_nodes)

    def measure(self, structure: str, devices: tuple[int, ...], samples_per_s: float) -> bool:
        """Take a measurement; say whether it is far below what was expected."""
        width, kind = len(devices), self._devices.kind_of_all(devices)
        is_mixture = kind == SEVERAL
        if is_mixture:
            self._mixtures.add(self._mixture(structure, devices))
        num_nodes = 1 if is_mixture else len(self._devices.nodes_of(devices))
        is_known = bool(self._profiles_of(structure))
        expected = self._rates_on(structure, kind, (num_nodes,) * width)[-1] if is_known else 0.0
        key = profile_key(structure, kind)
        if profile := self._known.get(key):
            self._known[key] = profile.with_measurement(width, samples_per_s, num_nodes)
        else:
            on_one = {width: samples_per_s} if num_nodes == 1 else {}
            across = {} if on_one else {(width, num_nodes): samples_per_s}
            self._known[key] = RateProfile(
                structure=structure,
                measured=on_one,
                kind=kind,
                across=across,
                anywhere=is_mixture,
            )
        self._rates.clear()
        self._shares.clear()
        self._ratios.clear()
        self._scaling = None
        return samples_per_s < _SHORTFALL * expected

    def rates(self, structure: str, width: int, kind: str) -> tuple[float, ...]:
        """(r(1), r(2), ...) in samples/s up to a width on one device type, on the fewest nodes.

        Or on `SEVERAL`.
        """
        return self._rates_on(structure, kind, self._devices.fewest_nodes(kind, width))

    def _rates_on(self, structure: str, kind: str, nodes: tuple[int, ...]) -> tuple[float, ...]:
        """(r(1), r(2), ...), each on so many nodes."""
        if kind == SEVERAL:
            return self._on_several(structure, len(nodes))
        key = structure, kind, nodes
        if key not in self._rates:
            profile = self._known.get(profile_key(structure, kind))
            profile = profile or self._estimate(structure, kind)
            on_one = self._on_one_node(profile).rates(len(nodes), self._pooled_scaling())
            shares = {n: 1.0 if profile.anywhere else self._share(n) for n in set(nodes)}
            self._rates[key] = tuple(
                profile.across.get((m, n)) or rate * shares[n]
                for m, (n, rate) in enumerate(zip(nodes, on_one, strict=True), 1)
            )
        return self._rates[key]

    def _on_several(self, structure: str, width: int) -> tuple[float, ...]:
        """On as many devices of each type as the fleet has, in proportion."""
        num_by_kind = self._devices.num_by_kind
        total = sum(num_by_kind.values())
        parts = [
            [number / total * rate for rate in self.rates(structure, width, kind)]
            for kind, number in num_by_kind.items()
        ]
        expected = [sum(of_width) for of_width in zip(*parts, strict=True)]
        profile = self._known.get(profile_key(structure, SEVERAL))
        measured = {m: r for m, r in profile.measured.items() if m <= width} if profile else {}
        came_to = [rate / expected[m - 1] for m, rate in measured.items()]
        factor = statistics.median(came_to) if came_to else 1.0
        return tuple(measured.get(m, factor * rate) for m, rate in enumerate(expected, 1))

    def _mixture(
        self, structure: str, devices: tuple[int, ...]
    ) -> tuple[str, frozenset[tuple[str, int]]]:
        return structure, frozenset(self._devices.num_of_each(devices).items())

    def _on_one_node(self, profile: RateProfile) -> RateProfile:
        """What it would be on one node, also at widths that were only measured on several."""
        if not profile.across:
            return profile
        guessed = {m: rate / self._share(n) for (m, n), rate in profile.across.items()}
        return replace(profile, measured={**guessed, **profile.measured})

    def _share(self, num_nodes: int) -> float:
        """What is left on so many nodes of a rate on one."""
        if num_nodes not in self._shares:
            shares = [
                rate / p.rates(m, self._pooled_scaling())[-1]
                for p in self._known.values()
                for (m, n), rate in p.across.items()
                if n == num_nodes and p.measured
            ]
            self._shares[num_nodes] = statistics.median(shares) if shares else 1.0
        return self._shares[num_nodes]

    def _estimate(self, structure: str, kind: str) -> RateProfile:
        elsewhere = self._profiles_of(structure)
        if not elsewhere:  # it needs several devices, or was lost too soon: as good as any
            rates = [self._on_one_node(p).rates(1)[0] for p in self._known.values()] or [1.0]
            usual = statistics.median(rates)
            return RateProfile(structure=structure, measured={1: usual}, kind=kind)
        source = max(elsewhere, key=lambda p: self._ratio(kind, p.kind)[0])
        _, ratio = self._ratio(kind, source.kind)
        measured = {m: ratio * rate for m, rate in source.measured.items()}
        across = {key: ratio * rate for key, rate in source.across.items()}
        return replace(source, measured=measured, across=across)

    def _profiles_of(self, structure: str) -> list[RateProfile]:
        profiles = (p for p in self._known.values() if p.structure == structure)
        return sorted(profiles, key=lambda profile: (profile.kind == SEVERAL, profile.kind))

    def _ratio(self, kind: str, other: str) -> tuple[int, float]:
        """How many structures say how much faster one type is than the other, and how much."""
        if (kind, other) not in self._ratios:
            rates = self._single_rates(kind), self._single_rates(other)
            ratios = [rates[0][s] / rates[1][s] for s in rates[0].keys() & rates[1].keys()]
            ratio = statistics.median(ratios) if ratios else 1.0
            self._ratios[kind, other] = len(ratios), ratio
        return self._ratios[kind, other]

    def _single_rates(self, kind: str) -> dict[str, float]:
        return {
            p.structure: self._on_one_node(p).rates(1)[0]
            for p in self._known.values()
            if p.kind == kind
        }

    def _pooled_scaling(self) -> float:
        if self._scaling is None:
            self._scaling = pooled_scaling(self._known.values())
        return self._scaling
