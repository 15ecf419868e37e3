"""Seeds faults in a part of the package, one at a time, and says which of them some tests catch.

    python -m tests.faults optuna_fleet/executor/call/watchdog.py -n 20 \\
        --with tests/executor/test_limits.py --with "tests/chaos -k moments"

So a change to tests can be shown to lose nothing: the same seed makes the same faults, before it
and after. Each fault is made in a copy of its own, whose tests have a time limit; what hangs is
caught too. `--with` may be given once for each group of tests: the groups run one after the other
until one fails. With `--every` all run, and all that fail are named: what is alone in catching
something, and what never is.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True)
class Fault:
    """Text that takes the place of a part of a module, from a position to a position."""

    path: Path
    kind: str
    node: ast.expr | ast.stmt
    text: str

    def __str__(self) -> str:
        was = " ".join(ast.unparse(self.node).split())
        return f"{self.path}:{self.node.lineno} {self.kind}: {was[:60]} -> {self.text[:60]}"

    def make(self, root: Path) -> None:
        """Write it into the copy of the repository at `root`."""
        lines = (ROOT / self.path).read_bytes().splitlines(keepends=True)
        node = self.node
        assert node.end_lineno is not None
        begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
        end = sum(map(len, lines[: node.end_lineno - 1])) + (node.end_col_offset or 0)
        source = b"".join(lines)
        (root / self.path).write_bytes(source[:begin] + self.text.encode() + source[end:])


def faults_of(path: Path) -> Iterator[Fault]:
    """All that can be made in the functions of a module."""
    tree = ast.parse((ROOT / path).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                for part in _walk(statement):
                    yield from _faults_at(path, part)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """All below a statement, but for functions in it, texts and annotations."""
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_other = isinstance(child, ast.FunctionDef | ast.JoinedStr | ast.ClassDef)
            if isinstance(child, ast.AST) and not is_other and "annotation" not in name:
                yield from _walk(child)


def _faults_at(path: Path, node: ast.AST) -> Iterator[Fault]:
    match node:
        case ast.Compare(left, [op], others) if type(op) in FLIPPED:
            flipped = ast.Compare(left, [FLIPPED[type(op)]()], others)
            yield Fault(path, "comparison flipped", node, f"({ast.unparse(flipped)})")
        case ast.Constant(value) if isinstance(value, int | float) and value is not True:
            text = "True" if value is False else f"({value + 1})"
            yield Fault(path, "constant + 1", node, text)
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            yield Fault(path, "condition negated", test, f"(not ({ast.unparse(test)}))")
        case ast.Return(value) if value and not isinstance(value, ast.Constant):
            yield Fault(path, "returns None", node, "return None")
        case ast.Expr(ast.Call(function)) if "log" not in ast.unparse(function):
            yield Fault(path, "statement removed", node, "pass")
        case ast.AugAssign() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
            yield Fault(path, "statement removed", node, "pass")
        case ast.Assign([ast.Attribute() | ast.Subscript()], value) if not _is_name(value):
            yield Fault(path, "statement removed", node, "pass")


def _is_name(value: ast.expr) -> bool:
    """As where a constructor keeps what it is given: any test sees that it is missing."""
    return isinstance(value, ast.Name)


def chosen(parts: list[Path], number: int, seed: int) -> list[Fault]:
    """So many, spread over the modules as their possible faults are."""
    paths = [path for part in parts for path in (sorted(part.rglob("*.py")) or [part])]
    faults = [fault for path in paths for fault in faults_of(path.absolute().relative_to(ROOT))]
    drawn = random.Random(seed).sample(faults, min(number, len(faults)))
    return sorted(drawn, key=lambda fault: (fault.path, fault.node.lineno))


def run(options: argparse.Namespace, fault: Fault | None) -> tuple[list[str], float]:
    """Which tests failed, or "time" where the limit is over; and after how many seconds."""
    begin, failed = time.monotonic(), list[str]()
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        for path in ROOT.iterdir():
            if path.name in ("optuna_fleet", "tests"):
                shutil.copytree(path, root / path.name, ignore=shutil.ignore_patterns("__pyc*"))
            elif path.name != ".git":
                (root / path.name).symlink_to(path)
        if fault is not None:
            fault.make(root)
        for group in options.tests:
            if options.every or not failed:
                arguments = [*group, *([] if options.every else ["-x"])]
                failed += _failures(root, arguments, options.limit_s)
    return failed, time.monotonic() - begin


def _failures(root: Path, arguments: list[str], limit_s: float | None) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfE", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        told, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return ["time"]
    if process.returncode == 0:
        return []
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", told, re.MULTILINE)
    return found or [f"pytest's exit code {process.returncode}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", type=Path, help="modules or folders")
    parser.add_argument("--with", dest="tests", action="append", type=shlex.split, required=True)
    parser.add_argument("-n", type=int, default=20, help="how many faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit-s", type=float, help="for a group of tests; default: 4 times what all take"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", action="store_true", help="name all tests that fail")
    options = parser.parse_args()
    failed, seconds = run(options, None)
    if failed:
        parser.exit(2, f"without a fault, {', '.join(failed)} fail\n")
    options.limit_s = options.limit_s or 60 + 4 * seconds  # others may be at work beside it
    print(f"without a fault: {seconds:.0f} s", flush=True)
    faults = chosen(options.parts, options.n, options.seed)
    num_caught = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = pool.map(lambda fault: run(options, fault), faults)
        for fault, (caught_by, seconds) in zip(faults, runs, strict=True):
            num_caught += bool(caught_by)
            word = f"caught by {', '.join(caught_by)}" if caught_by else "NOT CAUGHT"
            print(f"{fault}: {word} ({seconds:.0f} s)", flush=True)
    print(f"{num_caught} of {len(faults)} faults are caught")


if __name__ == "__main__":
    main()
