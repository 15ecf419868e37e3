"""What a trainer is told of a run, where little of it matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optuna_fleet.wire.messages import RunTrial


def run_trial(folder: Path | None = None, **more: Any) -> RunTrial:
    """The only rank of run 0, whose checkpoints are in this folder."""
    given: dict[str, Any] = {
        **dict.fromkeys(("run_id", "number", "trial_id", "rank", "seed", "objective_id"), 0),
        "world_size": 1,
        "measure": False,
        "group": "",
        "store": None,
        "gc_after_trial": False,
        "maximize": False,
        "run_name": "0123abcd-0",
        "folder": "" if folder is None else str(folder),
    }
    return RunTrial(**(given | more))
