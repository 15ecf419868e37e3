"""Several training processes on one loader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.nursery import Nursery

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_models_trained_at_once_share_each_sample(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    options = ["--learning-rates", "0.05", "0.02", "--epochs", "2"]
    done = nursery.run(EXAMPLES / "shared_loader.py", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    correct = [int(number) for number in re.findall(r": (\d+) of 360", done.stdout)]
    assert len(correct) == 2
    assert min(correct) > 200
    training, held_out = 1797 - 360, 360
    assert f"{2 * training + held_out} samples were preprocessed" in done.stdout
    assert "2.0 times each" in done.stdout
