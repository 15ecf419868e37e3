"""optuna-dashboard: where a trial was on the fleet, as the note on its page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial
from optuna_dashboard import get_note, save_note

from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.records import flights_of

_HEADING = "### On the fleet"


def note_flights(study: optuna.Study, trial: FrozenTrial) -> None:
    """Write down on which devices a trial was, and when, for optuna-dashboard to show.

    A callback: `study.optimize(..., callbacks=[note_flights])`. It may also be called later, with
    any trial of the study. What the note says already is kept.

    Args:
        study: The study.
        trial: A trial of it that has run on a fleet; of others there is nothing to say.
    """
    flights = flights_of(study).get(trial.number)
    if not flights:
        return
    noted = compat.bare_trial(study, trial)
    kept = get_note(noted).partition(_HEADING)[0].rstrip()
    save_note(noted, "\n\n".join(filter(None, [kept, _table(flights)])))


def _table(flights: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        f"| {len(f['devices'])} | {', '.join(map(str, f['devices']))} | {_clock(f['start'])} | "
        f"{f['end'] - f['start']:.1f} s | {f['data_wait_s']:.1f} s | {f['ending']} |"
        for f in flights
    ]
    head = "| width | devices | from | for | waited for data | ended |\n|--|--|--|--|--|--|"
    return "\n".join([_HEADING, "", head, *rows])


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
