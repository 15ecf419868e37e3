"""Several training processes on one loader."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_models_trained_at_once_share_each_sample(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "shared_loader.py")]
    command += ["--learning-rates", "0.05", "0.02", "--epochs", "2"]
    done = subprocess.run(
        command, check=True, timeout=240, cwd=tmp_path, capture_output=True, text=True
    )
    correct = [int(number) for number in re.findall(r": (\d+) of 360", done.stdout)]
    assert len(correct) == 2
    assert min(correct) > 200
    training, held_out = 1797 - 360, 360
    assert f"{2 * training + held_out} samples were preprocessed" in done.stdout
    assert "2.0 times each" in done.stdout
