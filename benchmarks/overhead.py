"""What optuna-fleet costs beyond the training itself, each quantity against a plain counterpart.

python benchmarks/overhead.py                        # all rows, about 20 minutes
python benchmarks/overhead.py --only trial --rounds 5
python benchmarks/overhead.py --quick                # every row once, short; for trying out

Every row is the median of several runs; where two things are compared they run in alternation,
each in processes of its own. Rows are printed as JSON as they are measured, and as a Markdown
table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pairing import Row, Served, note, print_table, ratios, row, run


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to measure."""

    rounds: int
    quick: bool

    def choose(self, full: float, quick: float) -> float:
        """One of two values."""
        return quick if self.quick else full


def side(name: str, *arguments: object) -> Any:
    """What a side measures in a process of its own."""
    return run(("overhead_side.py", name, *arguments)).answers[0]


def measure_trial(effort: Effort) -> list[Row]:
    """One trial of about a minute on one device against the bare loop, both warm.

    One thread computes on either side, one more process prepares the data, and the bare loop keeps
    its DataLoader's worker from run to run: neither side pays for a start. Each trial has a data
    set of its own, or its epochs would be in the pipeline's memory since the trial before.
    """
    ours, theirs = [], []
    with (
        Served("overhead_side.py", "fleet_loop", effort.rounds + 1) as fleet,
        Served("overhead_side.py", "bare_loop") as bare,
    ):
        fleet.ask(2)
        bare.ask(2)
        epoch_s = bare.ask(4).answers[0] / 4
        num_epochs = max(2, round(effort.choose(60.0, 6.0) / epoch_s))
        for number in range(effort.rounds):
            ours.append(fleet.ask(num_epochs).answers[0])
            theirs.append(bare.ask(num_epochs).answers[0])
            note(f"trial {number}: {ours[-1]:.2f} s / {theirs[-1]:.2f} s")
    what = f"One trial of {num_epochs} epochs / bare loop with a DataLoader"
    return [row(what, ratios(ours, theirs), "x", 1.02)]


def measure_instant(effort: Effort) -> list[Row]:
    """Objectives that return at once: what a trial costs over plain Optuna."""
    extra_s = side("instant", 2 * effort.rounds + 1, 100)
    return [row("Extra time per trial that returns at once", [1e3 * s for s in extra_s], "ms", 5)]


def measure_start(effort: Effort) -> list[Row]:
    """A cold executor up to its first training step against importing torch in four processes."""
    first, imported = [], []
    for number in range(effort.rounds):
        first.append(side("cold_training"))
        began = time.time()
        imported.append(max(run(*[("overhead_side.py", "import_torch")] * 4).answers) - began)
        note(f"start {number}: {first[-1]:.2f} s, import {imported[-1]:.2f} s")
    what = "optimize() to the first step, 4 slots / import of torch, torchvision in 4 processes"
    return [row(what, ratios(first, imported), "x", 1.5)]


def measure_plain_start(effort: Effort) -> list[Row]:
    """A cold executor up to the first line of an objective that needs no torch."""
    seconds = [side("cold_plain") for _ in range(effort.rounds)]
    return [row("optimize() to the start of an objective without torch", seconds, "s", 1)]


def measure_moves(effort: Effort) -> list[Row]:
    """Trials that are resumed on other devices at each round."""
    idle_s = side("moves", *((10, 20) if effort.quick else (30, 60)))
    return [row("End of a round to a moved trial's next step", idle_s, "s", 1)]


def measure_driver(effort: Effort) -> list[Row]:
    """The driver's share of a core while four trials train, and its memory."""
    answers = [side("driver_cost", effort.choose(30.0, 8.0)) for _ in range(effort.rounds)]
    return [
        row("Driver's share of a core", [100 * a["share"] for a in answers], "%", 1),
        row("Driver's memory beyond the script's", [a["memory_mb"] for a in answers], "MB", 400),
    ]


MEASURES: dict[str, Callable[[Effort], list[Row]]] = {
    "trial": measure_trial,
    "instant": measure_instant,
    "start": measure_start,
    "plain-start": measure_plain_start,
    "moves": measure_moves,
    "driver": measure_driver,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MEASURES, action="append", help="may be repeated")
    parser.add_argument("--rounds", type=int, help="runs per row; default: 5, or 1 if quick")
    parser.add_argument("--quick", action="store_true", help="short runs, for trying out")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    effort = Effort(rounds=rounds, quick=arguments.quick)
    rows = []
    for name in arguments.only or MEASURES:
        note(f"measuring {name}")
        rows += MEASURES[name](effort)
    print_table(rows)


if __name__ == "__main__":
    main()
