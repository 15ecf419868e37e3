"""What a worker of another scheduler runs on a node: the agent, as its child."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from optuna_fleet.processes import dying_with_parent


class Placed:
    """In a process of its own, with which the agent dies."""

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start Python with these arguments; return its exit code."""
        paths = [str(Path(__file__).parents[4]), os.environ.get("PYTHONPATH", "")]
        given = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return subprocess.call(dying_with_parent(sys.executable, *arguments), env=given)
