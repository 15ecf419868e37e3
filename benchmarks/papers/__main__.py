"""The papers' tables and figures beside what comes out here.

python -m benchmarks.papers fleet --quick                       # seconds
python -m benchmarks.papers bftrainer --trace FOLDER            # some minutes
python -m benchmarks.papers all --trace FOLDER                  # the page docs/papers.md

Of each row it says: reproduced, differs (and why), or can't be measured here (and why). FOLDER
has `summit_idle_week1.npz` and `bftrainer_jobs.json`, made from what was published with BFTrainer;
see `optuna_fleet/replay/trace.py` and `bftrainer.py` for the fields. Without it the rows that need
it say so.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

from benchmarks.papers import bftrainer, fleet, hetpipe, pittman
from benchmarks.papers.rows import as_markdown, summary

PAPERS: dict[str, ModuleType] = {
    "fleet": fleet,
    "pittman": pittman,
    "bftrainer": bftrainer,
    "hetpipe": hetpipe,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paper", choices=[*PAPERS, "all"])
    parser.add_argument("--quick", action="store_true", help="few seeds, short runs: seconds")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="BFTrainer's data")
    options = parser.parse_args()
    print(_INTRODUCTION)
    for paper in PAPERS.values() if options.paper == "all" else [PAPERS[options.paper]]:
        tables = list(paper.tables(options.quick, options.trace))
        print(f"## {paper.TITLE}\n\n{paper.ABOUT}\n\n{summary(tables)}.\n")
        for table in tables:
            print(as_markdown(table))


_INTRODUCTION = """\
# The papers, side by side

Made by `python -m benchmarks.papers all --trace FOLDER > docs/papers.md`; FOLDER has the data
published with BFTrainer.

What the papers publish, and what comes out of the same experiment here, mostly simulated by the
executor's own controller and policies. A number counts as *reproduced* within the tolerance that
the row states; where a paper says something in words ("similar", "at least"), the row has the
range that these are taken to mean. What *differs* says why. The bars of most figures are not in
the papers' texts: then only what the text says of them is compared.
"""


if __name__ == "__main__":
    main()
