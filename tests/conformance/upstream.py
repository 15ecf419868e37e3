"""Gets the tests of the installed Optuna and runs them through `executor=`."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna

import optuna_fleet

HERE = Path(__file__).parent
DECLARED = HERE / "declared.tsv"
CORE = (
    "study_tests",
    "trial_tests",
    "pruners_tests",
    "search_space_tests",
    "terminator_tests",
    "storages_tests",
    "artifacts_tests/test_download_artifact.py",
    "artifacts_tests/test_upload_artifact.py",
    "test_callbacks.py",
    "test_multi_objective.py",
)
SAMPLERS = ("samplers_tests", "importance_tests")
TIERS = {"quick": CORE, "core": CORE, "samplers": SAMPLERS}
QUICK_STORAGES = ["inmemory", "sqlite"]

_LIMIT_S = {"quick": 600, "core": 1800, "samplers": 3600}


class NotFetchedError(Exception):
    """The source distribution is not to be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of the tests of a tier that call `Study.optimize`.

    Attributes:
        outcomes: "passed", "failed", "differs" (failed, as declared for several devices),
            "excluded" or "skipped" by test.
        texts: The traceback or the reason by test, where there is one.
    """

    tier: str
    width: int
    outcomes: dict[str, str]
    texts: dict[str, str]

    def of(self, outcome: str) -> list[str]:
        """The tests with this outcome."""
        return [test for test, what in self.outcomes.items() if what == outcome]

    def __str__(self) -> str:
        counts = Counter(self.outcomes.values())
        numbers = ", ".join(f"{counts[outcome]} {outcome}" for outcome in sorted(counts))
        head = f"Optuna {optuna.__version__}, {self.tier} tests, {self.width} device(s): {numbers}"
        return "\n".join([head, *map(self._line, [*self.of("failed"), *self.of("differs")])])

    def _line(self, test: str) -> str:
        last = self.texts[test].strip().splitlines() or [""]
        return f"  {self.outcomes[test]}: {test}: {last[-1]}"


def fetch(folder: Path) -> Path:
    """Unpack the tests of the installed version of Optuna into `folder`; return their root.

    Raises:
        NotFetchedError: There is no access to the package registry.
    """
    name = f"optuna-{optuna.__version__}"
    order = ["download", "--quiet", "--no-deps", "--no-binary", "optuna", "--dest", str(folder)]
    pip = [sys.executable, "-m", "pip", *order, f"optuna=={optuna.__version__}"]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        raise NotFetchedError(f"The source of {name} can't be fetched: {done.stderr.strip()}")
    with tarfile.open(folder / f"{name}.tar.gz") as archive:
        wanted = (f"{name}/tests/", f"{name}/pyproject.toml")  # not its package: it is installed
        members = [m for m in archive.getmembers() if m.name.startswith(wanted)]
        archive.extractall(folder, members, filter="data")
    return folder / name


def run(root: Path, tier: str, width: int) -> Report:
    """Run the tests of a tier on an executor of so many devices."""
    excluded, differing = declared()
    orders, report = root / "orders.json", root / "report.json"
    storages = QUICK_STORAGES if tier == "quick" else None
    orders.write_text(json.dumps({"excluded": excluded, "storages": storages}))
    report.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "pytest", "-p", "fleet_plugin", "-p", "no:cacheprovider"),
        *("-o", "addopts=", "-q", "--timeout=300", f"--fleet-width={width}"),
        *(f"--fleet-orders={orders}", f"--fleet-report={report}"),
        *(f"tests/{path}" for path in TIERS[tier]),
    ]
    path = os.pathsep.join([str(HERE), str(Path(optuna_fleet.__file__).parents[1])])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        command,
        cwd=root,
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S[tier],
    )
    if done.returncode > 1 or not report.exists():  # 1: some failed
        raise RuntimeError(f"Optuna's tests did not run:\n{done.stdout}\n{done.stderr}")
    return _judged(json.loads(report.read_text()), differing if width > 1 else {}, tier, width)


def declared() -> tuple[dict[str, str], dict[str, str]]:
    """Reasons by test: of those that can't apply, and of the differences of several devices."""
    with DECLARED.open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    excluded, differing = (
        {row["test"]: row["reason"] for row in rows if row["devices"] == kind}
        for kind in ("any", "several")
    )
    return excluded, differing


def _judged(
    found: dict[str, dict[str, Any]], differing: dict[str, str], tier: str, width: int
) -> Report:
    outcomes = {test: what["outcome"] for test, what in found.items()}
    for test, outcome in outcomes.items():
        if outcome == "failed" and test.partition("[")[0] in differing:
            outcomes[test] = "differs"
    texts = {test: what["text"] for test, what in found.items()}
    return Report(tier=tier, width=width, outcomes=outcomes, texts=texts)
