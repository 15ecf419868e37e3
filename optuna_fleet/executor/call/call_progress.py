"""How one call is getting on: who is where, how far and how fast. Told to the study now and then.

Soon after a trial was launched; else often at first, and the seldomer the longer the call takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from optuna_fleet.events import (
    DataRequested,
    EpochEnded,
    FinishTrial,
    GiveUp,
    Launch,
    Model,
    RateMeasured,
)
from optuna_fleet.executor.call.journal import Entry
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.sampler_bridge.proposals import Proposals
from optuna_fleet.sampler_bridge.records import CallState, RunState, record_call

_SHORTEST_S, _LONGEST_S = 2.0, 15.0
_PART = 100
"""Without a launch, an interval is this part of the call so far, within these bounds. With one,
the shortest; none is less than this many times what the last record took to write."""


@dataclass(slots=True, kw_only=True)
class _Pace:
    """How far a trial is, and how fast where it is."""

    run: RunState
    samples_per_epoch: float = 0.0
    epoch_began: float | None = None
    has_done_one: bool = False  # on these devices


class Progress:
    """Knows how far runs are, as they say, and tells the study: a reader of the journal.

    Args:
        record: Stores a `CallState`, if it can.
        state: What is known of the call when it begins.
    """

    def __init__(
        self,
        record: Callable[[CallState], None],
        state: CallState,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._record = record
        self._state = state
        self._clock = clock
        self._began = clock()
        self._due = self._rested = self._began
        self._rest_s = 0.0
        self._paces: dict[int, _Pace] = {}  # by trial, until it is done

    @classmethod
    def of(cls, ledger: Ledger, proposals: Proposals) -> Progress:
        """That of a call that begins, kept with its study."""
        state = CallState(
            began=ledger.began,
            noted=ledger.began,
            every_s=0.0,
            n_trials=proposals.n_trials,
            timeout=proposals.timeout,
        )
        return cls(lambda state: record_call(ledger.study, state), state)

    # -- news -------------------------------------------------------------------------------------

    def take(self, entry: Entry, run: RunRecord | None, now: float) -> None:
        """This happens."""
        if run is None:
            return
        number = run.launch.number
        match entry:
            case Launch():
                self._launched(entry, now)
            case DataRequested():
                self._defined(self._paces[number], entry.model, now)
            case RateMeasured():
                pace = self._paces[number]
                pace.run = replace(pace.run, samples_per_s=entry.samples_per_s)
            case EpochEnded():
                self._epoch_ended(self._paces[number], entry.epochs_done, now)
            case FinishTrial() | GiveUp():
                self._paces.pop(number, None)

    def _launched(self, launch: Launch, now: float) -> None:
        run = RunState(trial=launch.number, devices=launch.devices, start=now)
        if (before := self._paces.get(launch.number)) is not None:
            done, most = before.run.epochs_done, before.run.max_epochs
            run = replace(run, epochs_done=done, max_epochs=most)
        self._paces[launch.number] = _Pace(run=run)
        self._due = min(self._due, self._rested)

    def _defined(self, pace: _Pace, model: Model, now: float) -> None:
        """It asks for data: from now on it trains."""
        pace.run = replace(pace.run, max_epochs=model.max_epochs)
        pace.samples_per_epoch = model.samples_per_epoch
        if not pace.run.epochs_done:  # else it may go on in the midst of an epoch
            pace.epoch_began = now

    def _epoch_ended(self, pace: _Pace, epochs_done: int, now: float) -> None:
        """So fast it is, evaluation and waiting for data included."""
        pace.run = replace(pace.run, epochs_done=epochs_done)
        if pace.epoch_began is not None:
            epoch_s = max(now - pace.epoch_began, 1e-9)
            rate = pace.samples_per_epoch / epoch_s or None
            pace.run = replace(pace.run, samples_per_s=rate)
            if pace.has_done_one:
                pace.run = replace(pace.run, epoch_s=epoch_s)
        pace.epoch_began, pace.has_done_one = now, True

    # -- the record -------------------------------------------------------------------------------

    @property
    def left_s(self) -> float:
        """Seconds until it is time to `note`, unless a launch comes first."""
        return self._due - self._clock()

    def note(self, on_devices: Iterable[int], asked: Collection[int], num_asked: int) -> None:
        """Write down how it goes: `asked` are trials that were asked for and are not done."""
        began = self._clock()
        every_s = min(_LONGEST_S, max(_SHORTEST_S, (began - self._began) / _PART))
        every_s = max(every_s, self._rest_s)
        flying = sorted(on_devices)
        state = replace(
            self._state,
            noted=round(time.time(), 3),
            every_s=round(every_s, 3),
            num_asked=num_asked,
            waiting=tuple(sorted(set(asked).difference(flying))),
            runs=tuple(self._paces[number].run for number in flying),
        )
        self._record(state)
        ended = self._clock()
        self._rest_s = _PART * (ended - began)
        self._due = ended + max(every_s, self._rest_s)
        self._rested = ended + max(_SHORTEST_S, self._rest_s)

    def end(self, ending: str, num_asked: int) -> None:
        """The call is over; see `CallState.ending`."""
        self._state = replace(self._state, ending=ending)
        self.note((), (), num_asked)
