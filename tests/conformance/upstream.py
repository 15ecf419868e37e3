"""Gets the tests of the installed Optuna and runs them through `executor=`."""

from __future__ import annotations

import csv
import json
import os
import re
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
OTHERS = ("visualization_tests", "test_cli.py")
QUICK = (
    *(path for path in CORE if path != "storages_tests"),
    "storages_tests/test_heartbeat.py::test_fail_stale_trials_with_optimize",
    "storages_tests/test_heartbeat.py::test_heartbeat_stale_trial_callback",
)
TIERS = {"quick": QUICK, "core": CORE, "samplers": SAMPLERS, "others": OTHERS}
QUICK_STORAGES = ["inmemory", "sqlite"]  # one of them: `tests.behaviour` has all of them

_LIMIT_S = {"quick": 1800, "core": 1800, "samplers": 3600, "others": 1800}


class NotFetchedError(Exception):
    """The source distribution is not to be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A row of declared.tsv: a test of Optuna's that is not simply to pass.

    Attributes:
        rule: "left out", because it can't apply; "inline", because its objective writes into
            objects of the caller's process, so that it runs with ``cluster="inline"``; "differs",
            because it may fail where several trials run at a time; or "numbers", because it may
            fail with the numbers that a fleet draws from a seed, at any number of devices.
        test: Its name, without parameters.
        failure: Regular expression of the failure let off: the statement that fails, then on a
            line of its own what pytest says of it.
        reason: Why, as it is in the documentation.
    """

    rule: str
    test: str
    failure: str
    reason: str

    def covers(self, text: str) -> bool:
        """Whether this traceback, as printed by pytest, is of the failure let off."""
        return re.search(self.failure, failed_statement(text)) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of the tests of a tier that call `Study.optimize`.

    Attributes:
        outcomes: "passed", "passed inline", "failed", "differs" (failed, as declared for this
            number of devices), "left out" or "skipped" by test.
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
        what = failed_statement(self.texts[test]) or self.texts[test].strip()
        return f"  {self.outcomes[test]}: {test}: {what.replace(chr(10), ': ')[-200:]}"


def fetch(folder: Path) -> Path:
    """Unpack the tests of the installed version of Optuna into `folder`; return their root.

    Raises:
        NotFetchedError: There is no access to the package registry.
    """
    name = f"optuna-{optuna.__version__}"
    order = ["download", "--quiet", "--no-deps", "--no-binary", "optuna", "--dest", str(folder)]
    pip = [sys.executable, "-m", "pip", *order, f"optuna=={optuna.__version__}"]
    # With what is installed, if that will do, else pip first fetches what would build it.
    for options in (["--no-build-isolation"], []):
        done = subprocess.run([*pip, *options], capture_output=True, text=True)
        if not done.returncode:
            break
    if done.returncode:
        raise NotFetchedError(f"The source of {name} can't be fetched: {done.stderr.strip()}")
    with tarfile.open(folder / f"{name}.tar.gz") as archive:
        wanted = (f"{name}/tests/", f"{name}/pyproject.toml")  # not its package: it is installed
        members = [m for m in archive.getmembers() if m.name.startswith(wanted)]
        archive.extractall(folder, members, filter="data")
    return folder / name


def run(root: Path, tier: str, width: int) -> Report:
    """Run the tests of a tier on an executor of so many devices."""
    orders, report = root / "orders.json", root / "report.json"
    orders.write_text(
        json.dumps(
            {
                "left out": {row.test: row.reason for row in declared("left out")},
                "inline": [row.test for row in declared("inline")],
                "storages": QUICK_STORAGES if tier == "quick" else [],
            }
        )
    )
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
    return judged(json.loads(report.read_text()), tier, width)


def declared(rule: str | None = None) -> list[Declared]:
    """The rows of declared.tsv, or those of one rule."""
    with DECLARED.open() as file:
        rows = [Declared(**row) for row in csv.DictReader(file, delimiter="\t")]
    return [row for row in rows if rule in (None, row.rule)]


def failed_statement(text: str) -> str:
    """The statement at the end of a traceback printed by pytest, and the first line about it."""
    lines = text.splitlines()
    at = max((i for i, line in enumerate(lines) if line.startswith(">")), default=None)
    if at is None:
        return ""
    error = next((line for line in lines[at:] if line.startswith("E ")), "")
    return f"{lines[at][1:].strip()}\n{error[1:].strip()}"


def judged(found: dict[str, dict[str, Any]], tier: str, width: int) -> Report:
    """What the outcomes that the plugin reports are by the rules of declared.tsv."""
    inline = {row.test for row in declared("inline")}
    rows = [*declared("numbers"), *(declared("differs") if width > 1 else [])]
    differing = {row.test: row for row in rows}
    outcomes = {test: what["outcome"] for test, what in found.items()}
    for test, outcome in outcomes.items():
        name = test.partition("[")[0]
        if outcome == "passed" and name in inline:
            outcomes[test] = "passed inline"
        row = differing.get(name)
        if outcome == "failed" and row is not None and row.covers(found[test]["text"]):
            outcomes[test] = "differs"
    texts = {test: what["text"] for test, what in found.items()}
    return Report(tier=tier, width=width, outcomes=outcomes, texts=texts)
