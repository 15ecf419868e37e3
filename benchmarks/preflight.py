"""The pre-flight check on all objectives of the tables, wrong and good ones: misses, false alarms.

python benchmarks/preflight.py                    # 15 minutes or so
python benchmarks/preflight.py --only scheduler   # those with that in their names
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from optuna_fleet.preflight.checker import Checker
from tests.preflight.cases_good import GOOD
from tests.preflight.cases_wrong import WRONG
from tests.preflight.table import pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    for table in (WRONG, GOOD):
        names = [name for name in table if given.only in name]
        num_others, began = 0, time.perf_counter()
        with Checker() as checker:
            for name in names:
                case = table[name]
                verdict = checker.check(case.objective, pipeline(), case.params)
                if verdict.outcome is not case.outcome:
                    num_others += 1
                    print(f"{name}: {case.outcome.value} is right, but: {verdict}")
        each_s = (time.perf_counter() - began) / max(len(names), 1)
        print(
            f"{len(names)} objectives, {num_others} otherwise than is right; {each_s:.1f} s each"
        )


if __name__ == "__main__":
    main()
