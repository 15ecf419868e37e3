"""What is recorded with a study: where its trials ran, its devices, how a call is going."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import optuna

from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.patience import Patience

FLIGHTS_PREFIX = "optuna_fleet:flights:"
FLIGHTS_KEY = FLIGHTS_PREFIX + "{began:.3f}:{index}"
CALL_PREFIX = "optuna_fleet:call:"
CALL_KEY = CALL_PREFIX + "{began:.3f}"
DEVICES_PREFIX = "optuna_fleet:devices:"
DEVICES_KEY = DEVICES_PREFIX + "{began:.3f}:{index}"

_PER_RECORD = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """One stay of a trial on its devices, as recorded with the study.

    Times are seconds since the epoch; durations are summed over the devices. `began_anew` says
    what the trial did not go on with when it was resumed, as a pre-flight check has found.
    """

    devices: tuple[int, ...]
    start: float
    end: float
    round: int
    ending: str
    probing_s: float
    profiling_s: float
    data_wait_s: float
    began_anew: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpan:
    """When a device was there, as recorded with the study, in seconds since the epoch.

    From when it joined, or the call began, until it was gone, or the call ended: None if that is
    not known.
    """

    device: int
    node: str
    kind: str
    start: float
    end: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A trial that is on devices since `start`, in seconds since the epoch.

    `epochs_done` counts from its beginning, `max_epochs` is of the loop it is in. `epoch_s` is
    what its last epoch took there: None before the second, as the first is slower.
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
    """One `optimize` call on a fleet, as it was when this was `noted`.

    A driver that lives notes it again and again, after `every_s` seconds at the latest if the
    storage lets it. When it `began` is in the keys of its other records.

    Attributes:
        ending: "done", "interrupted" (Ctrl-C) or "failed"; "" while it runs.
        num_asked: Trials that it has asked the study for, those included that it took over.
        waiting: Those of them that have no devices now.
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


def flights_of(study: optuna.Study) -> dict[int, list[dict[str, Any]]]:
    """Each trial's flights by its number, in order: `Flight`'s fields, and in which `call`."""
    flights: dict[int, list[dict[str, Any]]] = defaultdict(list)
    records = compat.study_records(study, FLIGHTS_PREFIX).items()
    flown = ({**record, "call": key.partition(":")[0]} for key, few in records for record in few)
    for record in sorted(flown, key=lambda record: record["start"]):
        flights[record["trial"]].append(record)
    return flights


def device_spans_of(study: optuna.Study, began: float | None = None) -> list[DeviceSpan]:
    """When which device was there, as recorded, by start; in the call that `began` then."""
    prefix = DEVICES_PREFIX if began is None else f"{DEVICES_PREFIX}{began:.3f}:"
    records = compat.study_records(study, prefix).values()
    return sorted((DeviceSpan(**r) for few in records for r in few), key=lambda span: span.start)


def record_call(study: optuna.Study, state: CallState) -> None:
    """Store it in the place of what was recorded before, if that can be done at once."""
    record = asdict(state)  # but as a database gives it back: without tuples
    record["waiting"] = list(state.waiting)
    record["runs"] = [{**run, "devices": list(run["devices"])} for run in record["runs"]]
    with contextlib.suppress(Exception):  # it may be missing: nobody waits for a storage for that
        compat.set_study_record(study, CALL_KEY.format(began=state.began), record)


def calls_of(study: optuna.Study) -> list[CallState]:
    """The calls that ran on a fleet, by their beginning."""
    calls = []
    for record in compat.study_records(study, CALL_PREFIX).values():
        runs = (RunState(**{**run, "devices": tuple(run["devices"])}) for run in record["runs"])
        waiting = tuple(record["waiting"])
        calls.append(CallState(**{**record, "waiting": waiting, "runs": tuple(runs)}))
    return sorted(calls, key=lambda call: call.began)


class Records:
    """Writes the records of one call.

    With the study, because what is stored with a trial shows in `Study.trials_dataframe`.

    Args:
        study: The study.
        began: When the call began, seconds since the epoch; it is in each record's key.
        patiently: Waits for the study's storage.
    """

    def __init__(self, study: optuna.Study, began: float, patiently: Patience) -> None:
        self._study = study
        self._patiently = patiently
        self._began = began
        self._flights: list[dict[str, Any]] = []
        self._num_flight_records = 0

    def flight(self, number: int, flight: Flight) -> None:
        """Where and when a trial ran.

        A few to a record, so that neither their number nor their size grows with the sweep.
        """
        devices = list(flight.devices)  # as it comes out of storages
        self._flights.append({"trial": number, **asdict(flight), "devices": devices})
        self._write(FLIGHTS_KEY, list(self._flights), index=self._num_flight_records)
        if len(self._flights) == _PER_RECORD:
            self._flights = []
            self._num_flight_records += 1

    def devices(self, spans: Sequence[DeviceSpan], changed: Iterable[int]) -> None:
        """When devices were there, as far as that has changed; a few to a record."""
        for index in sorted({position // _PER_RECORD for position in changed}):
            few = spans[index * _PER_RECORD : (index + 1) * _PER_RECORD]
            self._write(DEVICES_KEY, [asdict(span) for span in few], index=index)

    def _write(self, key: str, record: Any, **numbers: int) -> None:
        whole = key.format(began=self._began, **numbers)
        self._patiently(lambda: compat.set_study_record(self._study, whole, record))
