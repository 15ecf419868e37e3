"""``python -m tests.conformance``: how far Optuna's own tests pass through `executor=`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.conformance.upstream import TIERS, fetch, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--tier", choices=TIERS, action="append", help="default: all")
    parser.add_argument("--width", type=int, default=1, help="devices of the executor")
    parser.add_argument("--verbose", action="store_true", help="with the tracebacks")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="optuna-fleet-") as folder:
        root = fetch(Path(folder))
        for tier in options.tier or ("core", "samplers"):
            report = run(root, tier, options.width)
            print(report, flush=True)
            failed = failed or bool(report.of("failed"))
            if options.verbose:
                for test in [*report.of("failed"), *report.of("differs")]:
                    print(f"\n{report.outcomes[test]}: {test}\n{report.texts[test]}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
