"""One module knows accelerators: another kind is one entry of its table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOY = Path(__file__).parent / "toy"


def test_a_kind_of_which_there_is_only_an_entry_trains() -> None:
    """On all that there are, by default, each trial sees its own; loads, times and draws there."""
    where = {"PYTHONPATH": f"{TOY}:{TOY.parents[1]}", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, TOY / "sweep.py"], env={**os.environ, **where}, check=True)
