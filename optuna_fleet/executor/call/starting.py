"""Carries out launches, at once or when what they wait for is there."""

from __future__ import annotations

import time

from optuna_fleet.events import Event
from optuna_fleet.executor.call.calls import RunCalls
from optuna_fleet.executor.call.handovers import Start
from optuna_fleet.executor.call.parts import Parts
from optuna_fleet.sampler_bridge import compat


def start(parts: Parts, what: Start) -> list[Event]:
    """Tell the trainers; return what is news to the controller."""
    launch, run = what.launch, parts.runs[what.launch.run_id]
    run.launch = launch
    if what.follows is not None:
        world_size = len(launch.devices)
        run.calls = RunCalls(world_size=world_size, beginning=what.beginning, has_begun=True)
    if what.saved_at is not None:
        run.saved = what.saved_at
    is_due = run.unsaved_s >= parts.job.options.checkpoints.interval_s
    if is_due and what.inherits is None:  # else it is made at the end of the epoch
        run.saved = time.monotonic()
    run.is_movable = what.follows is not None
    parts.watchdog.launched(launch)
    parts.launcher.launch(
        launch,
        trial_id=compat.id_of(parts.proposals[launch.number]),
        parameters=parts.ledger.suggested(launch.number),
        follows=what.follows,
        num_stay=what.num_stay,
        inherits=what.inherits,
        saves=is_due,
    )
    if what.saved is None:
        return []
    parts.retention.folder.saved(what.saved.location)
    return [what.saved]
