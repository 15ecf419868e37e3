"""``peak(n)`` of Pittman et al. (SC18) for each scheme, and the choice of the cheapest. Pure.

peak(n) is the rate at which *each* of n nodes can receive all samples. With r_i the samples that
node i preprocesses per second, s the bytes of a sample and b the bytes per second that a node can
send, and receive, at a time:

    self              min r_i
    all-shared        min(n min r_i,        b / (s (n - 1) / n))
    multi-broadcast   min(p min_{i<p} r_i,  b / (s max_i max(in_i, out_i)))
    single-broadcast  the same with its own in and out

where in_i and out_i are how often a node receives and sends each sample on average, counted from
the routes themselves (``scheme.traffic``): all-shared has in = out = (n - 1) / n everywhere; in a
broadcast a node that preprocesses nothing has in = 1; single-broadcast's leader has up to 2 copies
to send, which in multi-broadcast all nodes share. A link on which at most L chunks of k samples
travel at a time, each taking latency + k s / b, carries at most L k / (latency + k s / b) samples
per second; a plan is no faster than its busiest link.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from optuna_fleet.pipeline.exchange.scheme import Plan, Scheme, makers, traffic

EQUAL_SHARE = 0.95
"""Plans that reach this part of the best peak count as equally fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the choice depends on.

    Attributes:
        samples_per_s: Decode rate of each node, with all its preprocessors.
        sample_bytes: Bytes of a preprocessed sample.
        chunk_samples: Samples of a chunk.
        bytes_per_s: What a node can receive, and send, of the slowest node.
        latency_s: Time of a request without data, there and back.
        num_lanes: Chunks on their way between two nodes at a time.
    """

    samples_per_s: tuple[float, ...]
    sample_bytes: float
    chunk_samples: int
    bytes_per_s: float
    latency_s: float
    num_lanes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan and why."""

    plan: Plan
    peak_samples_per_s: float
    reason: str


def peak(plan: Plan, measured: Measured) -> float:
    """Returns the samples per second that every node can receive."""
    p = makers(plan)
    at_work = measured.samples_per_s[: p if plan.scheme != "self" else None]
    return min([p * min(at_work), *_network_limits(plan, measured)])


def _network_limits(plan: Plan, measured: Measured) -> list[float]:
    links = traffic(plan)
    copies: Counter[tuple[str, int]] = Counter()
    for (sender, receiver), share in links.items():
        copies["out", sender] += share  # type: ignore[assignment]
        copies["in", receiver] += share  # type: ignore[assignment]
    if not links:
        return []
    transfer_s = measured.chunk_samples * measured.sample_bytes / measured.bytes_per_s
    per_link = measured.num_lanes * measured.chunk_samples / (measured.latency_s + transfer_s)
    return [
        measured.bytes_per_s / (measured.sample_bytes * max(copies.values())),
        per_link / max(links.values()),
    ]


def work_s(plan: Plan, measured: Measured) -> float:
    """Returns the seconds that all nodes together spend on one sample that each of them gets."""
    rates = measured.samples_per_s
    if plan.scheme == "self":
        return sum(1 / rate for rate in rates)
    p = makers(plan)
    decode_s = sum(1 / rate for rate in rates[:p]) / p
    return decode_s + sum(traffic(plan).values()) * measured.sample_bytes / measured.bytes_per_s


def plans(num_nodes: int) -> list[Plan]:
    """Returns every plan there is for so many nodes."""

    def plan(scheme: Scheme, p: int) -> Plan:
        return Plan(scheme=scheme, num_nodes=num_nodes, num_preprocessor_nodes=p, version=1)

    found = [plan("all-shared", num_nodes), plan("self", num_nodes)]
    for p in range(1, num_nodes):
        found += [plan("multi-broadcast", p), plan("single-broadcast", p)]
    return found


def choose(measured: Measured) -> Choice:
    """Returns the fastest plan; of those about equally fast, the one with the least work."""
    peaks = {plan: peak(plan, measured) for plan in plans(len(measured.samples_per_s))}
    best = max(peaks.values())
    fast = [plan for plan, value in peaks.items() if value >= EQUAL_SHARE * best]
    chosen = min(fast, key=lambda plan: work_s(plan, measured))
    by_scheme: dict[str, float] = {}
    for plan, value in peaks.items():
        by_scheme[plan.scheme] = max(value, by_scheme.get(plan.scheme, 0.0))
    each = ", ".join(f"{scheme} {value:.0f}" for scheme, value in by_scheme.items())
    reason = (
        f"samples/s that each node can get: {each} (decode {min(measured.samples_per_s):.0f} to "
        f"{max(measured.samples_per_s):.0f} samples/s per node, {measured.sample_bytes:.0f} bytes "
        f"per sample, network {measured.bytes_per_s / 1e6:.0f} MB/s, "
        f"latency {measured.latency_s * 1e3:.1f} ms)"
    )
    return Choice(plan=chosen, peak_samples_per_s=peaks[chosen], reason=reason)
