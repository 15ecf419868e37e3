"""The benchmark of the exchange runs; what it measures is not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from network_namespaces import NotPermittedError, Switch
from pipeline_harness import Forked

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "exchange.py"


def what_forbids_namespaces():
    try:
        Switch(1).close()
    except NotPermittedError as error:
        return str(error)
    return ""


def test_quick_form_has_a_row_for_each_scheme():
    if reason := Forked(what_forbids_namespaces).result():
        pytest.skip(f"network namespaces: {reason}")
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--quick"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    made = [(row["nodes"], row["scheme"], row["preprocessed_per_sample"]) for row in rows]
    assert made == [(2, "self", 2.0), (2, "all-shared", 1.0)]
    assert all(row["samples_per_s"] > 0 and row["predicted"] > 0 for row in rows)
