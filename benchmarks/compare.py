"""The same small sweep by a fleet, by plain Optuna with `n_jobs`, and by Ray Tune.

python benchmarks/compare.py                 # 12 trials of 6 epochs on 2 cores, 3 rounds
python benchmarks/compare.py --trials 4 --epochs 2 --rounds 1

All three train the same networks on the digits of `examples/digits.py`: parameters drawn ahead,
no pruning, two trials at once, one thread each. Plain Optuna and Ray Tune give each trial
DataLoaders of its own. Each starts cold, from `python` to the end of the last process; which goes
first changes from round to round. Ray Tune needs `pip install 'ray[tune]'`.
"""

from __future__ import annotations

import argparse
import os

from pairing import Cost, Row, note, print_table, ratios, row, run

SIDES = {
    "fleet": "optuna-fleet",
    "optuna": "plain Optuna, n_jobs=2",
    "tune": "Ray Tune, OptunaSearch, 2 at once",
}


def measure(sides: list[str], num_trials: int, num_epochs: int, rounds: int) -> list[Row]:
    costs: dict[str, list[Cost]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            load = os.getloadavg()[0]
            cost = run(("compare_side.py", side, num_trials, num_epochs, number))
            assert cost.answers[0]["num_trials"] == num_trials
            costs[side].append(cost)
            note(
                f"{side}: {cost.wall_s:.1f} s, CPU {cost.cpu_s:.1f} s, best "
                f"{cost.answers[0]['best']:.3f}; the load before it was {load:.1f}"
            )
    rows = []
    for side, theirs in costs.items():
        rows.append(row(f"{SIDES[side]}: seconds", (c.wall_s for c in theirs), "s"))
        if side != "tune":  # Ray's processes are not descendants of the script's
            rows.append(row("... CPU seconds", (c.cpu_s for c in theirs), "s"))
        if side != "fleet":
            ours = [c.wall_s for c in costs["fleet"]]
            rows.append(
                row("... fleet's time / its", ratios(ours, (c.wall_s for c in theirs)), "x")
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    arguments = parser.parse_args()
    sides = ["fleet", *(side for side in arguments.sides if side != "fleet")]
    print_table(measure(sides, arguments.trials, arguments.epochs, arguments.rounds))


if __name__ == "__main__":
    main()
