"""Pittman et al. (SC18): Figures 8 to 12, Tables I, III to V.

CPU time is measured, by `benchmarks/sharing.py`; peak(n) is calculated, and measured on a few
nodes by `benchmarks/exchange.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.papers.peak import Measured, peak, work_s
from benchmarks.papers.rows import Row, Span, Table, at_least, at_most
from optuna_fleet.pipeline.exchange.plan import Scheme

TITLE = "Pittman et al."
ABOUT = (
    "SC18. CPU time is measured on this machine, with trials that read and do "
    "nothing else; peak(n) is the paper's, of our schemes."
)

REDUCTION = {"Alexnet": 10.8, "Inception": 3.5, "VGG": 2.4}
"""Section VI.B, of Fig. 10."""
SLOWDOWN = {
    "baseline": {"Alexnet": 9.61, "Inception": 3.49, "VGG": 1.83},
    "All-Shared": {"Alexnet": 1.54, "Inception": 1.06, "VGG": 1.02},
}
"""Table III: with 1 core instead of 16."""
SAVINGS = {"Alexnet": 15.8, "Inception": 10.0, "VGG": 4.5}
"""Table V, per cent of the energy beyond idling."""
ALONE_PER_S = 2000 * 128 / 1132.3
"""Table I: what a node's 16 cores preprocess, as they are Alexnet's bottleneck (Fig. 2, 3)."""

_SAMPLE_BYTES = 4 * 3 * 224 * 224
_LINK_BYTES_PER_S = 1e9  # assumed; what is compared does not depend on it
_TRIALS = 8
_SHARING = Path(__file__).parents[1] / "sharing.py"
_LITTLE: Span = (0.8, 1.25)
_GPUS = "needs training on GPUs with a node of 16 cores for each"


def tables(quick: bool, folder: Path | None = None) -> Iterator[Table]:
    """All of them; nothing is measured if quick."""
    yield Table(
        title="Figure 8: peak(n)",
        rows=tuple(_figure8()),
        note="With what one of Titan's nodes preprocesses (Table I). Ratios only: what Titan's "
        "network carried isn't published.",
    )
    yield Table(title="Figure 9: CPU use of the schemes", rows=tuple(_figure9()))
    yield Table(
        title="Figures 10 and 11, Tables I and III: CPU",
        rows=tuple(_cpu(None if quick else _times_less())),
    )
    yield Table(title="Figure 12, Tables IV and V: energy", rows=tuple(_energy()))


def _measured(num_nodes: int) -> Measured:
    return Measured(
        num_nodes=num_nodes,
        samples_per_s=ALONE_PER_S,
        sample_s=16 / ALONE_PER_S,
        sample_bytes=_SAMPLE_BYTES,
        bytes_per_s=_LINK_BYTES_PER_S,
    )


def _peak(scheme: Scheme, num_makers: int, num_nodes: int) -> float:
    return peak(scheme, num_makers, _measured(num_nodes))


def _figure8() -> Iterator[Row]:
    for n in (50, 100, 150):
        shared = _peak("all-shared", n, n)
        yield Row(
            place="Fig. 8a",
            what=f"All-Shared / Single-Broadcast, {n} nodes",
            paper=at_least(1.0),
            ours=shared / _peak("single-broadcast", 1, n),
            unit="x",
        )
        yield Row(
            place="Fig. 8a",
            what=f"All-Shared / Multi-Broadcast with p = 20, {n} nodes",
            paper=at_least(1.0),
            ours=shared / _peak("multi-broadcast", 20, n),
            unit="x",
        )
    yield Row(
        place="Fig. 8a",
        what="Single-Broadcast, 150 nodes / 50: falls",
        paper=at_most(1.0),
        ours=_peak("single-broadcast", 1, 150) / _peak("single-broadcast", 1, 50),
        unit="x",
    )
    yield Row(
        place="Fig. 8a",
        what="Multi-Broadcast, 100 nodes, p = 20 / p = 5: does little",
        paper=_LITTLE,
        ours=_peak("multi-broadcast", 20, 100) / _peak("multi-broadcast", 5, 100),
        unit="x",
        why="here nodes fetch from all owners at the same time, each over its own link; a "
        "broadcast of MPI involves all nodes",
    )
    yield Row(
        place="Fig. 8a",
        what="Single-Broadcast with p = 5 and 20",
        paper="does little",
        why="our single-broadcast has one owner",
    )
    yield Row(
        place="Fig. 8b",
        what="4 cores instead of 16: All-Shared; the others",
        paper="unchanged; markedly less",
        why="depends on what Titan's network carried, which isn't published",
    )


def _figure9() -> Iterator[Row]:
    n = 50
    alike = work_s("all-shared", _measured(n))
    yield Row(
        place="Fig. 9",
        what=f"Single-Broadcast / All-Shared, {n} nodes: marginally more",
        paper=(1.0, 1.1),
        ours=work_s("single-broadcast", _measured(n)) / alike,
        unit="x",
    )
    yield Row(
        place="Fig. 9",
        what=f"Multi-Broadcast / All-Shared, {n} nodes: far more",
        paper=at_least(1.5),
        ours=work_s("multi-broadcast", _measured(n)) / alike,
        unit="x",
        why="both fetch the same chunks in the same way here; there it is a series of broadcasts",
    )


def _times_less() -> float:
    """CPU time of so many DataLoaders over that of a shared pipeline, with as many trials."""
    options = "--only epoch --systems dataloader --systems ours --dtype uint8 --rounds 1 --warm 0"
    command = [sys.executable, str(_SHARING), *options.split(), "--samples", "512"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    (found,) = (
        line["value"] for line in lines if line["trials"] == _TRIALS and line["unit"] == "x"
    )
    return float(found)


def _cpu(times_less: float | None) -> Iterator[Row]:
    most, least = max(REDUCTION.values()), min(REDUCTION.values())
    yield Row(
        place="Fig. 10, VI.B",
        what=f"CPU time of {_TRIALS} DataLoaders / shared: Alexnet, Inception, VGG at most "
        + ", ".join(f"{x}" for x in REDUCTION.values()),
        paper=(least, most),
        ours=times_less,
        unit="x",
        why="takes a minute: not with `--quick`" if times_less is None else "",
    )
    yield Row(
        place="Fig. 11",
        what="speed-up of All-Shared with 1 core per node, 100 networks",
        paper="up to 10 x (Alexnet)",
        why=_GPUS,
    )
    for pipeline, slowdowns in SLOWDOWN.items():
        for name, slowdown in slowdowns.items():
            yield Row(
                place="Table III",
                what=f"{pipeline}, {name}: slower with 1 core than with 16",
                paper=f"{slowdown} x",
                why=_GPUS,
            )
    yield Row(
        place="Table I",
        what="2,000 steps of Alexnet, one node; each of 1,000",
        paper="1,132.3 s; 1,132.2 s",
        why="needs 1,000 nodes",
    )


def _energy() -> Iterator[Row]:
    why = "no meter of power here; CPU seconds stand for it, see Fig. 10's row"
    for name, percent in SAVINGS.items():
        what = f"{name}: energy saved, beyond idling"
        yield Row(place="Table V", what=what, paper=f"{percent} %", why=why)
    yield Row(
        place="Table IV, Fig. 12", what="power of a cabinet", paper="19.0 to 32.8 kW", why=why
    )
