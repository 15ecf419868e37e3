"""Sweeps that are struck at random while they run, compared with one that is not.

python benchmarks/chaos.py                          # 24 sweeps, 240 faults
python benchmarks/chaos.py --sweeps 3 --seed 7 --kinds "kill the agent" "disk full"
python benchmarks/chaos.py --seed 0 --only 7 11     # these two of the 24 again

Each sweep is a process of its own that trains 16 small networks on 4 CPU slots, up to 3 at a time,
every third on two devices, with checkpoints as often as can be. The seed decides which faults
strike, and at which logical moments ("trial 5 in epoch 3", "the 4th decision") or how long after
them; see `tests/chaos/faults.py`. The study is in a journal file, in SQLite or, where there is a
server, in PostgreSQL, in turn. Prints one JSON line per sweep, then a table per kind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import optuna

from tests.chaos.faults import KINDS
from tests.chaos.harness import (
    Result,
    differences,
    drawn,
    has_postgres,
    playable,
    run,
    storage_for,
)

NUM_TRIALS = 16
STORAGES = ["journal", "postgres" if has_postgres() else "journal", "journal", "sqlite"]


@dataclass(slots=True)
class Row:
    """What became of the faults of one kind."""

    injected: int = 0
    unreached: int = 0
    recovered: int = 0
    equal: int = 0
    recoveries_s: list[float] = field(default_factory=list)


def hands(kinds: list[str], per_sweep: int, chance: random.Random) -> Iterator[list[str]]:
    """Faults for one sweep after the other: one that is costly, and others in turn."""
    costly = shuffled([k for k in kinds if KINDS[k].alone], chance)
    others = shuffled([k for k in kinds if not KINDS[k].alone], chance)
    while True:
        hand = list(itertools.islice(costly, 1))
        yield hand + list(itertools.islice(others, per_sweep - len(hand)))


def shuffled(names: list[str], chance: random.Random) -> Iterator[str]:
    """All of the names, again and again, in another order each time."""
    while names:
        yield from chance.sample(names, len(names))


def note(table: dict[str, Row], result: Result, wrong: dict[int, str]) -> None:
    for fault in result.unreached:
        table[fault.kind].unreached += 1
    for strike in result.strikes:
        row = table[strike.fault.kind]
        row.injected += 1
        mine = {strike.trial} if strike.trial is not None else wrong.keys()
        ended = not result.problems and not any(
            wrong.get(number, "").startswith("state") for number in mine
        )
        row.recovered += ended
        row.equal += ended and not any(number in wrong for number in mine)
        if strike.recovered_s is not None:
            row.recoveries_s.append(strike.recovered_s - strike.began_s)


def as_json(result: Result, wrong: dict[int, str], **more: Any) -> str:
    record = {
        **more,
        "wall_s": round(result.wall_s, 1),
        "strikes": [
            [s.fault.kind, s.trial, s.fault.at, s.recovered_s and s.recovered_s - s.began_s]
            for s in result.strikes
        ],
        "unreached": [[fault.kind, fault.trial, fault.at] for fault in result.unreached],
        "problems": result.problems,
        "differences": wrong,
    }
    return json.dumps(record)


def print_table(table: dict[str, Row]) -> None:
    print("| fault | injected | recovered as expected | records equal | slowest recovery, s |")
    print("|---|---|---|---|---|")
    for name in (name for name in KINDS if name in table):
        row = table[name]
        slowest = f"{max(row.recoveries_s):.1f}" if row.recoveries_s else ""
        print(f"| {name} | {row.injected} | {row.recovered} | {row.equal} | {slowest} |")
    rows = table.values()
    sums = [sum(getattr(row, key) for row in rows) for key in ("injected", "recovered", "equal")]
    slowest = max((s for row in rows for s in row.recoveries_s), default=0.0)
    print(f"| all | {sums[0]} | {sums[1]} | {sums[2]} | {slowest:.1f} |")
    print(f"\nMoments that never came: {sum(row.unreached for row in rows)}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweeps", type=int, default=24)
    parser.add_argument("--faults", type=int, default=10, help="per sweep")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", type=int, help="of the sweeps, play these alone")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(playable()))
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    began_s = time.monotonic()
    reference = run(num_trials=NUM_TRIALS, faults=[])
    if reference.problems:
        raise SystemExit(f"The undisturbed sweep failed: {reference.problems}\n{reference.log}")
    table: dict[str, Row] = defaultdict(Row)
    chance = random.Random(arguments.seed)
    deal = hands(arguments.kinds, arguments.faults, chance)
    played = range(arguments.sweeps) if arguments.only is None else arguments.only
    for index, kinds in enumerate(itertools.islice(deal, max(played) + 1)):
        if index not in played:
            continue
        seed = 1000 * arguments.seed + index
        storage = storage_for(kinds, STORAGES[index % len(STORAGES)])
        faults = drawn(kinds, reference, seed)
        result = run(num_trials=NUM_TRIALS, faults=faults, seed=seed, storage=storage)
        wrong = differences(result, reference)
        note(table, result, wrong)
        print(as_json(result, wrong, seed=seed, storage=storage), flush=True)
        if result.problems or wrong:
            print(result.log, file=sys.stderr, flush=True)
    print_table(table)
    print(f"{len(played)} sweeps took {time.monotonic() - began_s:.0f} s.")


if __name__ == "__main__":
    main()
