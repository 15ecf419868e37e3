"""What runs in a process of Ray's; and Ray itself, where it is installed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.processes import dying_with_parent


class Placed:
    """An actor, in a process of its own on some node."""

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start the agent, which dies with this process; return its exit code."""
        paths = [str(Path(__file__).parents[4]), os.environ.get("PYTHONPATH", "")]
        given = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return subprocess.call(dying_with_parent(sys.executable, *arguments), env=given)

    def is_there(self) -> None:
        """Return as soon as there is room for this actor."""


def ray_module() -> Any:
    """Ray, if it is installed.

    Raises:
        FleetConfigError: It is not.
    """
    try:
        importlib.import_module("ray.util.scheduling_strategies")
        return importlib.import_module("ray")
    except ImportError as error:
        raise FleetConfigError(
            f"RayCluster needs Ray, which can't be imported ({error}): "
            "`pip install 'optuna-fleet[ray]'`."
        ) from error
