"""How a call is getting on, as recorded with its study for those who watch it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import optuna

from optuna_fleet.sampler_bridge import compat

CALL_PREFIX = "optuna_fleet:call:"
CALL_KEY = CALL_PREFIX + "{began:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A trial that is on devices.

    Attributes:
        trial: Its number.
        devices: Numbers of the devices.
        start: When it was launched there, seconds since the epoch.
        epochs_done: Epochs that it is known to have done, since its beginning.
        max_epochs: Epochs of the loop it is in; None if it does not say.
        epoch_s: What its last epoch took there; None before the second, as the first is slower.
        samples_per_s: How fast it trains there; None while that is not known.
    """

    trial: int
    devices: tuple[int, ...]
    start: float
    epochs_done: int = 0
    max_epochs: int | None = None
    epoch_s: float | None = None
    samples_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallState:
    """One `optimize` call on a fleet, as it was when this was noted.

    Attributes:
        began: When it began, seconds since the epoch; its other records have that in their keys.
        noted: When this was written: a driver that lives writes it again and again.
        every_s: After how many seconds at the latest, if the storage lets it.
        ending: "done", "interrupted" (Ctrl-C) or "failed"; "" while it runs.
        n_trials: As given to the call.
        timeout: As given to the call.
        num_asked: Trials that it has asked the study for, those included that it took over.
        waiting: Trials that it has asked for and that have no devices now.
        runs: Those that have.
    """

    began: float
    noted: float
    every_s: float
    ending: str = ""
    n_trials: int | None = None
    timeout: float | None = None
    num_asked: int = 0
    waiting: tuple[int, ...] = ()
    runs: tuple[RunState, ...] = ()


def record_call(study: optuna.Study, state: CallState) -> None:
    """Store it in the place of what was recorded before, if that can be done at once."""
    # As a database gives it back: without tuples. `asdict` copies, which takes longer.
    record = {name: getattr(state, name) for name in CallState.__slots__}
    record["waiting"] = list(state.waiting)
    record["runs"] = [
        {name: getattr(run, name) for name in RunState.__slots__} | {"devices": list(run.devices)}
        for run in state.runs
    ]
    with contextlib.suppress(Exception):  # it may be missing: nobody waits for a storage for that
        compat.set_study_record(study, CALL_KEY.format(began=state.began), record)


def calls_of(study: optuna.Study) -> list[CallState]:
    """The calls that ran on a fleet, by their beginning."""
    calls = [
        CallState(
            **{
                **record,
                "waiting": tuple(record["waiting"]),
                "runs": tuple(
                    RunState(**{**run, "devices": tuple(run["devices"])}) for run in record["runs"]
                ),
            }
        )
        for record in compat.study_records(study, CALL_PREFIX).values()
    ]
    return sorted(calls, key=lambda call: call.began)
