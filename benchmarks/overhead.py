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

from pairing import Row, Served, note, print_table, ratios, row, run


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to measure."""

    rounds: int
    quick: bool

    def choose(self, full: float, quick: float) -> float:
        """One of two values."""
        return quick if self.quick else full


def measure_trial(effort: Effort) -> list[Row]:
    """One trial of about a minute on one device against the bare loop, both warm.

    One thread computes on either side, one more process prepares the data, and the bare loop keeps
    its DataLoader's worker from run to run: neither side pays for a start. Each trial has a data
    set of its own, or its epochs would be in the pipeline's memory since the trial before.
    """
    ours, theirs = [], []
    with Served("fleet_loop.py", effort.rounds + 1) as fleet, Served("bare_loop.py") as bare:
        fleet.ask(2)
        bare.ask(2)
        epoch_s = bare.ask(4).answers[0]["wall_s"] / 4
        num_epochs = max(2, round(effort.choose(60.0, 6.0) / epoch_s))
        for number in range(effort.rounds):
            ours.append(fleet.ask(num_epochs))
            theirs.append(bare.ask(num_epochs))
            note(f"trial {number}: {ours[-1]} / {theirs[-1]}")
    wall = ratios(
        [cost.answers[0]["wall_s"] for cost in ours],
        [cost.answers[0]["wall_s"] for cost in theirs],
    )
    cpu = ratios([cost.cpu_s for cost in ours], [cost.cpu_s for cost in theirs])
    waited = [cost.answers[0]["waited_s"] / cost.answers[0]["busy_s"] for cost in ours]
    return [
        row(f"One trial of {num_epochs} epochs / bare loop with a DataLoader", wall, "x", 1.02),
        row("CPU seconds of the same", cpu, "x"),
        row("Share of that trial's time it waited for data", waited, "x"),
    ]


def measure_instant(effort: Effort) -> list[Row]:
    """Objectives that return at once: what a trial costs over plain Optuna."""
    num_rounds = 2 * effort.rounds + 1
    extra_s = run(("instant.py", num_rounds, 100)).answers[0]
    return [row("Extra time per trial that returns at once", [1e3 * s for s in extra_s], "ms", 5)]


def measure_start(effort: Effort) -> list[Row]:
    """A cold executor up to its first training step against importing torch in four processes."""
    first, last, imported = [], [], []
    for number in range(effort.rounds):
        steps = run(("cold_training.py",)).answers[0]
        first.append(steps["first_s"])
        last.append(steps["last_s"])
        began = time.time()
        imported.append(max(run(*[("import_torch.py",)] * 4).answers) - began)
        note(f"start {number}: {steps}, import {imported[-1]:.2f} s")
    return [
        row(
            "optimize() to the first step, 4 slots / import of torch, torchvision in 4 processes",
            ratios(first, imported),
            "x",
            1.5,
        ),
        row("The same for the last slot's first step", ratios(last, imported), "x"),
        row("optimize() to the first training step", first, "s"),
    ]


def measure_plain_start(effort: Effort) -> list[Row]:
    """A cold executor up to the first line of an objective that needs no torch."""
    seconds = [run(("cold_plain.py",)).answers[0] for _ in range(effort.rounds)]
    return [row("optimize() to the start of an objective without torch", seconds, "s", 1)]


def measure_moves(effort: Effort) -> list[Row]:
    """Trials that are resumed on other devices at each round."""
    answer = run(("moves.py", *((10, 20) if effort.quick else (30, 60)))).answers[0]
    return [
        row("End of a round to a moved trial's next step", answer["idle_s"], "s", 1),
        row("A moved trial's last step to its next one", answer["own_s"], "s"),
    ]


def measure_driver(effort: Effort) -> list[Row]:
    """The driver's share of a core while four trials train, and its memory."""
    seconds = effort.choose(30.0, 8.0)
    answers = [run(("driver_cost.py", seconds)).answers[0] for _ in range(effort.rounds)]
    note(f"driver: {answers}")
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
