"""`benchmarks/gpu.py` writes its report, whatever becomes of its parts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_parts_that_fail_or_hang_are_told_of_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    gpu = importlib.import_module("gpu")

    def part(code: str, **options: Any) -> Any:
        command = (sys.executable, "-c", code)
        return gpu.Part(**{"name": "part", "command": command, "limit_s": 60.0, **options})

    hangs = "import time; print('begun', flush=True); time.sleep(600)"
    report = tmp_path / "new" / "report.md"
    parts = [
        part("print('so far'); raise KeyError('meant')"),
        part(hangs, limit_s=2.0),
        part("", command=("/no/such/program",)),
        part("print('| a table |')"),
    ]
    assert not gpu.write_report(report, parts)
    failed, hung, missing, good = report.read_text().split("\n## ")[1:]
    assert "so far" in failed
    assert "KeyError: 'meant'" in failed
    assert "**not done** within 2 s" in hung
    assert "No such file" in missing
    assert "done" in good
    assert "| a table |" in good
    assert gpu.write_report(report, parts[-1:])
