"""Measuring two things in alternation, in processes of their own, and saying how they compare."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "benchmarks" / "scripts"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured quantity; its value is the median of the runs, a ratio's `unit` is "x"."""

    what: str
    runs: tuple[float, ...]
    unit: str
    aim: str

    @property
    def value(self) -> float:
        """The median."""
        return statistics.median(self.runs)


def row(
    what: str,
    runs: Iterable[float],
    unit: str,
    most: float | None = None,
    *,
    least: float | None = None,
) -> Row:
    """Make a row and print it at once, as a line of JSON."""
    aims = {"<=": most, ">=": least}
    asked = "".join(f"{sign} {aim:g} {unit}" for sign, aim in aims.items() if aim is not None)
    made = Row(what=what, runs=tuple(runs), unit=unit, aim=asked)
    shown = {"what": what, "value": float(f"{made.value:.4g}"), "unit": unit, "aim": made.aim}
    print(json.dumps(shown | {"runs": [float(f"{run:.4g}") for run in made.runs]}), flush=True)
    return made


def print_table(rows: Iterable[Row]) -> None:
    """Print the rows as a Markdown table."""
    print("\n| Measured | Median | Smallest .. largest run | Aim |\n|---|---|---|---|")
    for one in rows:
        extremes = f"{min(one.runs):.3g} .. {max(one.runs):.3g}"
        print(f"| {one.what} | {one.value:.3g} {one.unit} | {extremes} | {one.aim} |")


def ratios(ours: Iterable[float], theirs: Iterable[float]) -> list[float]:
    """Pair by pair: what drifts on the machine hits both halves of a pair."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


# -- processes --------------------------------------------------------------------------------


def note(text: str) -> None:
    """Tell the person who waits, on standard error."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def environment() -> dict[str, str]:
    """This process', with the package and the examples of this checkout."""
    path = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Start one of `scripts`."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS / script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment(), "OMP_NUM_THREADS": "1"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What it took to run scripts from start to end.

    Attributes:
        wall_s: Seconds until the last of them had ended.
        cpu_s: CPU seconds, user and system, of them and all their descendants.
        answers: The last line each printed, parsed from JSON.
    """

    wall_s: float
    cpu_s: float
    answers: tuple[Any, ...]


def run(*commands: tuple[object, ...]) -> Cost:
    """Run scripts at the same time: one (name, arguments...) each."""
    began = time.perf_counter()
    processes = [start(str(name), *arguments) for name, *arguments in commands]
    outputs, cpu_s = [], 0.0
    for process in processes:
        assert process.stdout is not None
        outputs.append(process.stdout.read())
        # Not Popen.wait, which throws away what the process and its descendants used.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        cpu_s += usage.ru_utime + usage.ru_stime
    wall_s = time.perf_counter() - began
    for process in processes:
        if process.returncode:
            raise RuntimeError(f"{process.args!r} ended with code {process.returncode}.")
    answers = tuple(json.loads(output.splitlines()[-1]) for output in outputs)
    return Cost(wall_s=wall_s, cpu_s=cpu_s, answers=answers)


class Served:
    """A script that stays warm and does what it is asked, line by line."""

    def __init__(self, script: str, *arguments: object) -> None:
        self._process = start(script, *arguments)

    def ask(self, request: Any) -> Cost:
        """Send a request and wait for its answer; CPU seconds are those used in between."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        cpu_s, began = tree_cpu_s(self._process.pid), time.perf_counter()
        print(json.dumps(request), file=stdin, flush=True)
        answer = stdout.readline()
        wall_s = time.perf_counter() - began
        if not answer:
            raise RuntimeError(f"{self._process.args!r} ended unexpectedly.")
        cpu_s = tree_cpu_s(self._process.pid) - cpu_s
        return Cost(wall_s=wall_s, cpu_s=cpu_s, answers=(json.loads(answer),))

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def tree_cpu_s(root: int) -> float:
    """CPU seconds so far of a process, its descendants, and the dead ones they waited for."""
    stats = dict(filter(None, map(_stat, filter(str.isdigit, os.listdir("/proc")))))
    tree = {root}
    while grown := {pid for pid, (parent, _) in stats.items() if parent in tree} - tree:
        tree |= grown
    return sum(stats[pid][1] for pid in tree if pid in stats)


def _stat(pid: str) -> tuple[int, tuple[int, float]] | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return None
    return int(pid), (int(fields[1]), sum(map(int, fields[11:15])) / _TICKS_PER_S)
