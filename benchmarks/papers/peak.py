"""``peak(n)`` of Pittman et al. (SC18, V.A): what *each* of n nodes can receive of all samples.

With r the samples that a node preprocesses per second, s the bytes of a sample, b the bytes per
second that a node can send, and receive, at a time, and p makers (all-shared: n):

    local              r
    single-broadcast   min(p r, b / (s (n - p + (p - 1) / p)), and b / s if p < n)
    others             min(p r, b p / (s (n - 1)), and b / s if p < n)
"""

from __future__ import annotations

from dataclasses import dataclass

from optuna_fleet.pipeline.exchange import Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What it depends on.

    Attributes:
        num_nodes: How many there are (n).
        samples_per_s: What each can preprocess, with all its preprocessors (r).
        sample_bytes: Of a preprocessed sample (s).
        bytes_per_s: Of the link (b).
    """

    num_nodes: int
    samples_per_s: float
    sample_bytes: float
    bytes_per_s: float


def peak(scheme: Scheme, num_makers: int, measured: Measured) -> float:
    """Return the samples per second that every node can receive."""
    if scheme == "local":
        return measured.samples_per_s
    link = measured.bytes_per_s / measured.sample_bytes
    made, others = num_makers * measured.samples_per_s, measured.num_nodes - num_makers
    own = (num_makers - 1) / num_makers  # of a sample that it made, to the other makers
    each = others + own if scheme == "single-broadcast" else others / num_makers + own
    return min(made, link / each, link) if others else min(made, link / each)
