"""Training rates r(m): what a trial does per second on m devices (FLEET, appendix B.3).

A rate is in samples per second over the *global* batch, on one device type. Few widths are
measured; the others are interpolated or follow FLEET's Eq. 5.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

DEFAULT_SCALING = 0.95
"""r(m+1)/r(m) * m/(m+1) where nothing is known: how one more device lowers the rate per device."""

PROFILE_BATCHES = 48
"""Batches a profile takes at most (B.3)."""

TIMED_BATCHES = 20
"""Of these, the last ones that are timed (B.3)."""

_LEAST_SCALING = 0.3
_OUTLIER = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RateProfile:
    """Measured rates of one model structure on one device type.

    Attributes:
        structure: Name of the structure (parameter shapes, batch size); trials of equal structure
            share one profile.
        measured: Devices m of one node -> samples/s.
        kind: Device type it was measured on.
        across: Devices m, and more than one node that they are on -> samples/s.
        anywhere: `measured` holds on any number of nodes, as in a simulation.
    """

    structure: str
    measured: Mapping[int, float]
    kind: str = ""
    across: Mapping[tuple[int, int], float] = field(default_factory=dict)
    anywhere: bool = False

    def __post_init__(self) -> None:
        assert self.measured or self.across
        for rate in (*self.measured.values(), *self.across.values()):
            assert 0 < rate < math.inf, self

    def rates(self, max_devices: int, scaling: float = DEFAULT_SCALING) -> tuple[float, ...]:
        """Rates on one node for every width up to ``max_devices``.

        Measured where measured, linear between two measured widths, proportional to m below the
        smallest one, and Eq. 5 beyond the largest: ``r(m) = m * r(w)/w * factor**(m - w)``. The
        factor comes from the two largest measured widths and is kept within [0.3, 1], because
        noise would compound.

        Args:
            max_devices: Number of widths wanted.
            scaling: Factor of Eq. 5 when only one width was measured, see :func:`pooled_scaling`.

        Returns:
            (r(1), ..., r(max_devices)) in samples/s, all finite and > 0.
        """
        factor = _step_factor(self.measured)
        factor = _clip_scaling(scaling if factor is None else factor)
        widths = sorted(self.measured)
        last = min(widths[-1], max_devices)
        known = [0.0, *(self.measured[m] for m in widths)]
        rates: list[float] = np.interp(range(1, last + 1), [0, *widths], known).tolist()
        per_device = self.measured[widths[-1]] / widths[-1]
        rates += [m * per_device * factor ** (m - last) for m in range(last + 1, max_devices + 1)]
        least, most = sys.float_info.min, sys.float_info.max
        return tuple(min(max(rate, least), most) for rate in rates)

    def is_measured(self, m: int, num_nodes: int = 1) -> bool:
        """Whether r(``m``) on so many nodes was measured."""
        on_one = num_nodes == 1 or self.anywhere
        return m in self.measured if on_one else (m, num_nodes) in self.across

    def with_measurement(self, m: int, samples_per_s: float, num_nodes: int = 1) -> RateProfile:
        """The same profile with r(``m``) set to ``samples_per_s``, replacing an older value."""
        if num_nodes == 1 or self.anywhere:
            return replace(self, measured={**self.measured, m: samples_per_s})
        return replace(self, across={**self.across, (m, num_nodes): samples_per_s})


def profile_key(structure: str, kind: str) -> str:
    """What a profile is filed under."""
    return f"{structure} on {kind}"


def pooled_scaling(profiles: Iterable[RateProfile]) -> float:
    """What a further device leaves of the rate per device, as seen over all profiles.

    Args:
        profiles: Those with one width only are passed over.

    Returns:
        The median of the profiles' factors of Eq. 5, within [0.3, 1]; ``DEFAULT_SCALING`` if no
        profile has two widths.
    """
    factors = [f for p in profiles if (f := _step_factor(p.measured)) is not None]
    return _clip_scaling(statistics.median(factors)) if factors else DEFAULT_SCALING


def rate_of(durations_s: Sequence[float], samples: Sequence[int]) -> float:
    """Training rate from the timed batches of a profile (B.3).

    Only the last ``TIMED_BATCHES`` of the first ``PROFILE_BATCHES`` batches count, and never the
    first batch if there is another (it pays for warming up). The slowest batch is left out if it
    took over twice the median time per sample: one pause of the machine is not the trial's rate.

    Args:
        durations_s: Seconds of each batch.
        samples: *Global* size of each batch.

    Returns:
        Samples per second.
    """
    batches = list(zip(durations_s, samples, strict=True))[:PROFILE_BATCHES]
    timed = _without_pause((batches[1:] or batches)[-TIMED_BATCHES:])
    return sum(n for _, n in timed) / sum(seconds for seconds, _ in timed)


def _without_pause(batches: list[tuple[float, int]]) -> list[tuple[float, int]]:
    per_sample = [seconds / n for seconds, n in batches]
    slowest = per_sample.index(max(per_sample))
    if per_sample[slowest] <= _OUTLIER * statistics.median(per_sample):
        return batches
    return batches[:slowest] + batches[slowest + 1 :]


def _step_factor(measured: Mapping[int, float]) -> float | None:
    if len(measured) < 2:
        return None
    before, last = sorted(measured)[-2:]
    per_device = (measured[last] / last) / (measured[before] / before)
    return float(per_device ** (1 / (last - before)))


def _clip_scaling(factor: float) -> float:
    return min(max(factor, _LEAST_SCALING), 1.0)
