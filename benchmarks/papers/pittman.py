"""Pittman et al. (SC18): Figures 8 to 12, Tables I, III to V.

CPU time is measured, by `benchmarks/sharing.py`; peak(n) is calculated, and measured on a few
nodes by `benchmarks/exchange.py`.
Limits of cores, and energy, follow from CPU seconds: a trial gets no more samples per second than
one over the CPU seconds of a sample; and what isn't idle power is, in part, CPU seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.papers.peak import Measured, peak
from benchmarks.papers.rows import Row, Span, Table, at_least, at_most
from optuna_fleet.pipeline.exchange import Scheme

TITLE = "Pittman et al."
ABOUT = (
    "SC18. CPU time is measured on this machine, with trials that read and do "
    "nothing else; peak(n) is the paper's, of our schemes."
)

REDUCTION = {"Alexnet": 10.8, "Inception": 3.5, "VGG": 2.4}
"""Section VI.B, of Fig. 10: at most."""
SLOWDOWN = {"Alexnet": (9.61, 1.54), "Inception": (3.49, 1.06), "VGG": (1.83, 1.02)}
"""Table III: with 1 core instead of 16; the baseline, and All-Shared."""
SAVINGS = {"Alexnet": 15.8, "Inception": 10.0, "VGG": 4.5}
"""Table V, per cent of the energy beyond idling."""
ALONE_PER_S = 2000 * 128 / 1132.3
"""Table I: what a node's 16 cores preprocess, as they are Alexnet's bottleneck (Fig. 2, 3)."""
ONE_CORE_PER_S = ALONE_PER_S / SLOWDOWN["Alexnet"][0]
"""What one core preprocesses."""
DEMAND_PER_S = {
    "Alexnet": ALONE_PER_S / 0.66,  # section I: preprocessing limits it to 66 % of its peak
    "Inception": SLOWDOWN["Inception"][0] * ONE_CORE_PER_S,
    "VGG": SLOWDOWN["VGG"][0] * ONE_CORE_PER_S,
}
"""What their GPU can take; of the latter two by what one core slows down."""

_SAMPLE_BYTES = 4 * 3 * 224 * 224
_LINK_BYTES_PER_S = 2 * DEMAND_PER_S["Alexnet"] * _SAMPLE_BYTES
"""With which All-Shared gives Alexnet "up to 2X" (section I) of what it demands."""
_TRIALS = 8
_AS_IN_NUMBERS = "--only epoch --rounds 2"
"""The command of docs/numbers.md, so that both pages have one figure."""
_SHARING, _EXCHANGE = (
    Path(__file__).parents[1] / f"{name}.py" for name in ("sharing", "exchange")
)
_LITTLE: Span = (0.8, 1.25)
_QUICK = "takes some minutes: not with `--quick`"
_AT_ONCE = (
    "here nodes fetch from all owners at the same time, each over its own link; a broadcast of "
    "MPI involves all nodes"
)
_ALIKE_FETCHED = (
    "nodes fetch the same chunks in the same way in each scheme here; there it is broadcasts"
)
_FEW = f"{_TRIALS} trials share here, up to 100 there"
_ALIKE = (
    "trials here only read. Those of Inception and VGG use CPU time for training as well, which "
    "can't be saved"
)


def tables(quick: bool, folder: Path | None = None) -> Iterator[Table]:
    """All of them; nothing is measured if quick."""
    times_less = None if quick else _times_less()
    exchanged = [] if quick else _records(_EXCHANGE, "--nodes 2 4")
    yield Table(
        title="Figure 8: peak(n)",
        rows=tuple(_figure8()),
        note="With what one of Titan's nodes preprocesses (Table I), and a link with which "
        "All-Shared has the published throughput: what Titan's network carried isn't published.",
    )
    yield from measured_tables(exchanged)
    yield Table(title="Figure 10, Table I: CPU", rows=tuple(_cpu(times_less)))
    yield Table(
        title="Figure 11, Table III: one core for each network",
        rows=tuple(_one_core(times_less)),
        note="Computed: the paper's demand for samples (by the baseline's slowdown), over what "
        f"a core makes with the CPU seconds measured for {_TRIALS} trials.",
    )
    yield Table(
        title="Figure 12, Tables IV and V: energy, as CPU seconds",
        rows=tuple(_energy(times_less)),
        note="The paper's CPU seconds are those of its Fig. 10; its energy is in brackets.",
    )


def _measured(num_nodes: int, num_cores: int = 16) -> Measured:
    per_s = ALONE_PER_S * num_cores / 16
    return Measured(
        num_nodes=num_nodes,
        samples_per_s=per_s,
        sample_bytes=_SAMPLE_BYTES,
        bytes_per_s=_LINK_BYTES_PER_S,
    )


def _peak(scheme: Scheme, num_makers: int, num_nodes: int, num_cores: int = 16) -> float:
    return peak(scheme, num_makers, _measured(num_nodes, num_cores))


def _figure8() -> Iterator[Row]:
    shown: tuple[tuple[Scheme, int], ...] = (("single-broadcast", 1), ("multi-broadcast", 20))
    for n in (50, 100, 150):
        shared = _peak("all-shared", n, n)
        for scheme, p in shown:
            yield Row(
                place="Fig. 8a",
                what=f"All-Shared / {scheme} with p = {p}, {n} nodes: above",
                paper=at_least(1.0),
                ours=shared / _peak(scheme, p, n),
                unit="x",
            )
    yield Row(
        place="Fig. 8a",
        what="single-broadcast, 150 nodes / 50: falls",
        paper=at_most(1.0),
        ours=_peak("single-broadcast", 1, 150) / _peak("single-broadcast", 1, 50),
        unit="x",
    )
    for name, paper in (("Alexnet", at_most(1.0)), ("Inception", at_least(1.0))):
        yield Row(
            place="Fig. 8a",
            what=f"multi-broadcast with p = 20, 150 nodes / the demand of {name}",
            paper=paper,
            ours=_peak("multi-broadcast", 20, 150) / DEMAND_PER_S[name],
            unit="x",
            why=_AT_ONCE,
        )
    for scheme in ("multi-broadcast", "single-broadcast"):
        yield Row(
            place="Fig. 8a",
            what=f"{scheme}, 100 nodes, p = 20 / p = 5: does little",
            paper=_LITTLE,
            ours=_peak(scheme, 20, 100) / _peak(scheme, 5, 100),
            unit="x",
            why=_AT_ONCE,
        )
    limited: tuple[tuple[Scheme, int, str, Span], ...] = (
        ("all-shared", 50, "unchanged", (0.95, 1.05)),
        ("multi-broadcast", 5, "markedly less", at_most(0.8)),
    )
    for scheme, p, words, paper in limited:
        yield Row(
            place="Fig. 8b",
            what=f"{scheme}, 50 nodes, p = {p}, 4 cores / 16: {words}",
            paper=paper,
            ours=_peak(scheme, p, 50, 4) / _peak(scheme, p, 50),
            unit="x",
            why="the model's links take no cores; MPI's broadcasts do",
        )


def measured_tables(exchanged: list[dict[str, Any]]) -> Iterator[Table]:
    """Of what `benchmarks/exchange.py` printed; of nothing if quick."""
    peaks = tuple(
        Row(
            place="V.A",
            what=f"{one['scheme']}, {one['nodes']} nodes, link: {one['mbit_per_s'] or 'no limit'}",
            paper=one["predicted"],
            ours=one["samples_per_s"],
            unit="samples/s",
            tolerance=0.25,
            why="nodes share this machine's cores, and its other work",
        )
        for one in exchanged
    )
    missing = Row(place="V.A", what="peak(n) of few nodes", paper="the formula", why=_QUICK)
    yield Table(
        title="peak(n), measured on few nodes",
        rows=peaks or (missing,),
        note="By `benchmarks/exchange.py`: nodes are network namespaces of this machine, links in "
        "Mbit/s. For the paper stands its formula, with what one node reaches alone.",
    )
    yield Table(
        title="Figure 9: CPU use of the schemes",
        rows=tuple(_figure9(exchanged)),
        note="CPU seconds of all nodes' processes in the same runs. Making a sample takes none "
        "there, so what sharing takes weighs more than in the paper.",
    )


def _figure9(exchanged: list[dict[str, Any]]) -> Iterator[Row]:
    most = max((one["nodes"] for one in exchanged), default=50)
    used = {
        one["scheme"]: sum(one["cpu_s"])
        for one in exchanged
        if one["nodes"] == most and one["mbit_per_s"] is None
    }
    for scheme, words, paper in (
        ("single-broadcast", "marginally more", (1.0, 1.1)),
        ("multi-broadcast", "far more", at_least(1.5)),
    ):
        yield Row(
            place="Fig. 9",
            what=f"{scheme} / all-shared, {most} nodes: {words}",
            paper=paper,
            ours=used[scheme] / used["all-shared"] if used else None,
            unit="x",
            why=_ALIKE_FETCHED if used else _QUICK,
        )


def _times_less() -> float:
    """CPU time of so many DataLoaders over that of a shared pipeline, with as many trials."""
    lines = _records(_SHARING, _AS_IN_NUMBERS)
    wanted = f"one epoch, {_TRIALS} trials: times less than DataLoaders"
    (found,) = (line["value"] for line in lines if line["what"] == wanted)
    return float(found)


def _records(script: Path, options: str) -> list[dict[str, Any]]:
    """The JSON lines that a benchmark prints."""
    command = [sys.executable, str(script), *options.split()]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _cpu(times_less: float | None) -> Iterator[Row]:
    yield Row(
        place="Fig. 10, VIII",
        what=f"CPU time of {_TRIALS} DataLoaders / shared (with more than 5 nodes)",
        paper=(2.0, 11.0),
        ours=times_less,
        unit="x",
        why=_QUICK,
    )
    yield Row(
        place="Table I",
        what="2,000 steps of Alexnet, one node; each of 1,000",
        paper="1,132.3 s; 1,132.2 s",
        why="needs 1,000 nodes",
    )


def _one_core(times_less: float | None) -> Iterator[Row]:
    """What is slower, and by how much All-Shared is faster than the baseline."""
    for name, (baseline, shared) in SLOWDOWN.items():
        demand = DEMAND_PER_S[name] / ONE_CORE_PER_S
        slower = times_less and max(1.0, demand / times_less)
        why = _FEW if times_less else _QUICK
        yield Row(
            place="Table III",
            what=f"All-Shared, {name}: slower with 1 core (baseline: {baseline} x)",
            paper=shared,
            ours=slower,
            unit="x",
            why=why,
        )
        yield Row(
            place="Fig. 11, III",
            what=f"{name}: All-Shared over baseline, each with 1 core",
            paper=10.0 if name == "Alexnet" else baseline / shared,
            ours=slower and demand / slower,
            unit="x",
            why=why,
        )


def _energy(times_less: float | None) -> Iterator[Row]:
    saved = times_less and 100 * (1 - 1 / times_less)
    for name, percent in SAVINGS.items():
        why = _FEW if name == "Alexnet" else _ALIKE
        yield Row(
            place="Table V",
            what=f"{name}: CPU seconds saved (energy: {percent} %)",
            paper=100 * (1 - 1 / REDUCTION[name]),
            ours=saved,
            unit="%",
            why=why if times_less else _QUICK,
        )
    yield Row(
        place="Fig. 12",
        what="Alexnet, 80 nodes, whole run: CPU seconds, baseline / All-Shared",
        paper=REDUCTION["Alexnet"],
        ours=times_less,
        unit="x",
        why=_FEW if times_less else _QUICK,
    )
    yield Row(
        place="Table IV",
        what="power of an idle cabinet; most that was seen",
        paper="19.0 kW; 32.8 kW",
        why="no meter of power here, and idling takes no CPU seconds",
    )
