"""``peak(n)`` of Pittman et al. (SC18, V.A) for each scheme, and the choice of the cheapest. Pure.

peak(n) is the rate at which *each* of n nodes can receive all samples. With r_i the samples that
node i preprocesses per second, s the bytes of a sample and b the bytes per second that a node can
send, and receive, at a time, and p makers (all-shared: n, single-broadcast: 1):

    local    min r_i
    others   min(p min_{i<p} r_i, b p / (s (n - 1)), and b / s if p < n)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from optuna_fleet.pipeline.exchange.plan import Scheme

EQUAL = 0.95
"""Plans that reach this part of the best count as equally fast."""

WORTH_A_CHANGE = 1.25
"""A plan that is faster, or works less, by less than this does not replace the present one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the choice depends on.

    Attributes:
        samples_per_s: What each node can preprocess, with all its preprocessors (r_i).
        sample_s: Seconds of a core for a sample, in the mean.
        wanted_per_s: What the trials of the node that wants most would take (r_c).
        sample_bytes: Of a preprocessed sample (s).
        bytes_per_s: Of the fastest chunk that was received (b).
    """

    samples_per_s: tuple[float, ...]
    sample_s: float
    wanted_per_s: float
    sample_bytes: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A scheme, the places of the nodes that preprocess for all, and why."""

    scheme: Scheme
    makers: tuple[int, ...]
    reason: str


def peak(scheme: Scheme, makers: tuple[int, ...], measured: Measured) -> float:
    """Returns the samples per second that every node can receive."""
    rates, num_nodes, num_makers = measured.samples_per_s, len(measured.samples_per_s), len(makers)
    if scheme == "local":
        return min(rates)
    link = measured.bytes_per_s / measured.sample_bytes
    limits = [
        num_makers * min(rates[node] for node in makers),
        link * num_makers / (num_nodes - 1),
    ]
    return min([*limits, link] if num_makers < num_nodes else limits)


def work_s(scheme: Scheme, measured: Measured) -> float:
    """Returns the seconds of cores, over all nodes, for one sample that each of them gets."""
    num_nodes = len(measured.samples_per_s)
    if scheme == "local":
        return num_nodes * measured.sample_s
    return measured.sample_s + (num_nodes - 1) * measured.sample_bytes / measured.bytes_per_s


def _candidates(measured: Measured) -> Iterator[tuple[Scheme, tuple[int, ...]]]:
    nodes = range(len(measured.samples_per_s))
    yield "all-shared", tuple(nodes)
    yield "local", tuple(nodes)
    fastest = sorted(nodes, key=lambda node: -measured.samples_per_s[node])
    for count in reversed(nodes[2:]):
        yield "multi-broadcast", tuple(sorted(fastest[:count]))
    yield "single-broadcast", (0,)


def choose(measured: Measured, now: tuple[Scheme, tuple[int, ...]] | None = None) -> Choice:
    """Returns what costs least of what gives trials all they want; if nothing does, the fastest.

    The scheme and makers of the present plan stay unless others are clearly better.
    """
    rated = {
        (scheme, makers): min(peak(scheme, makers, measured), measured.wanted_per_s)
        for scheme, makers in _candidates(measured)
    }

    most = max(rated.values())
    fast = [one for one, rate in rated.items() if rate >= EQUAL * most]
    best = min(fast, key=lambda one: work_s(one[0], measured))
    if (
        now in rated
        and WORTH_A_CHANGE * rated[now] >= most
        and work_s(now[0], measured) <= WORTH_A_CHANGE * work_s(best[0], measured)
    ):
        best = now
    rates = measured.samples_per_s
    reason = (
        f"{best[0]}, peak({len(rates)}) {peak(*best, measured):.0f} samples/s per node where "
        f"{measured.wanted_per_s:.0f} are wanted; each for itself: {min(rates):.0f}"
    )
    return Choice(scheme=best[0], makers=best[1], reason=reason)
