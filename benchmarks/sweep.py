"""The digits sweep on a fleet against the same trials by plain Optuna in one process per core.

python benchmarks/sweep.py                   # 24 trials on 4 slots, 3 rounds
python benchmarks/sweep.py --trials 8 --rounds 1

In each round the fleet sweeps first; then plain Optuna trains the very same trials (parameters,
number of epochs) in two processes that take them from a shared journal, each trial with
DataLoaders of its own. That runs once with `num_workers=0` and once with 1, and counts with
whichever is faster. Both sides start cold, from `python` to the end of the last process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from pairing import Cost, Row, note, print_table, ratios, row, run

NUM_PROCESSES = 2
NUM_SLOTS = 4


def sweep_fleet(num_trials: int, seed: int) -> Cost:
    return run(("sweep_fleet.py", num_trials, NUM_SLOTS, seed))


def sweep_plain(trials: list[dict[str, Any]], num_workers: int) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        journal = str(Path(folder) / "journal.log")
        study = optuna.create_study(
            study_name="digits",
            direction="maximize",
            storage=JournalStorage(JournalFileBackend(journal)),
        )
        for trial in trials:
            attributes = {"num_epochs": trial["num_epochs"]}
            study.enqueue_trial(trial["params"], user_attrs=attributes)
        cost = run(*[("sweep_plain.py", journal, num_workers)] * NUM_PROCESSES)
    assert sum(cost.answers) == len(trials)
    return cost


def measure(num_trials: int, rounds: int) -> list[Row]:
    ours: list[Cost] = []
    theirs: dict[int, list[Cost]] = {0: [], 1: []}
    for number in range(rounds):
        ours.append(sweep_fleet(num_trials, seed=number))
        note(f"fleet: {ours[-1].wall_s:.1f} s, CPU {ours[-1].cpu_s:.1f} s")
        for num_workers, costs in theirs.items():
            costs.append(sweep_plain(ours[-1].answers[0]["trials"], num_workers))
            cost = costs[-1]
            note(f"plain, {num_workers=}: {cost.wall_s:.1f} s, CPU {cost.cpu_s:.1f} s")
    return rows(num_trials, ours, theirs)


def rows(num_trials: int, ours: list[Cost], theirs: dict[int, list[Cost]]) -> list[Row]:
    wall = {n: ratios((c.wall_s for c in ours), (c.wall_s for c in t)) for n, t in theirs.items()}
    fastest = max(wall, key=lambda n: statistics.median(wall[n]))
    cpu = ratios((c.cpu_s for c in ours), (c.cpu_s for c in theirs[fastest]))
    summaries = [cost.answers[0]["summary"] for cost in ours]
    other = f"plain Optuna in {NUM_PROCESSES} processes, num_workers={fastest}"
    return [
        row(f"Makespan of {num_trials} trials / {other}", wall[fastest], "x", 1.0),
        row("CPU seconds of the same", cpu, "x", 1.0),
        row("Share of device time spent probing", map(probing_percent, summaries), "%", 10),
        row("... profiling (batches that are kept)", map(profiling_percent, summaries), "%"),
        row("Sharing factor", map(sharing_factor, summaries), "x"),
    ]


def sharing_factor(summary: dict[str, Any]) -> float:
    """Samples consumed per sample preprocessed."""
    return float(summary["pipeline"]["consumed"]) / summary["pipeline"]["preprocessed"]


def probing_percent(summary: dict[str, Any]) -> float:
    return 100 * float(summary["probing_share"])


def profiling_percent(summary: dict[str, Any]) -> float:
    """The batches that are timed are training batches: none of this is lost."""
    device_s = summary["num_devices"] * summary["duration_s"]
    return 100 * float(summary["profiling_s"]) / device_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    print_table(measure(arguments.trials, arguments.rounds))


if __name__ == "__main__":
    main()
