"""Several training processes on one loader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.nursery import Nursery

EXAMPLES = Path(__file__).parents[2] / "examples"
# To spawn a process takes 5 s of CPU, all but a moment of it for imports.
FORKED = """
import pickle, runpy, sys, torch

def fork(function, args, nprocs):
    args = pickle.loads(pickle.dumps(args))  # as if it were spawned
    torch.multiprocessing.start_processes(function, args, nprocs, start_method="fork")

torch.multiprocessing.spawn = fork
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def test_models_trained_at_once_share_each_sample(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    (tmp_path / "forked.py").write_text(FORKED)
    options = ["--learning-rates", "0.05", "0.02", "--epochs", "2"]
    example = str(EXAMPLES / "shared_loader.py")
    done = nursery.run(tmp_path / "forked.py", example, *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    correct = [int(number) for number in re.findall(r": (\d+) of 360", done.stdout)]
    assert len(correct) == 2
    assert min(correct) > 200
    training, held_out = 1797 - 360, 360
    assert f"{2 * training + held_out} samples were preprocessed" in done.stdout
    assert "2.0 times each" in done.stdout
