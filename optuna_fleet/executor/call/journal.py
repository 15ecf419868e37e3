"""What happened in one call, in order: the one record, of which all that is told of it is made."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, TypeAlias

from optuna_fleet.alloc import Plan
from optuna_fleet.events import (
    DataRequested,
    DeviceGone,
    DeviceJoined,
    Ending,
    EpochEnded,
    Event,
    FinishTrial,
    GiveUp,
    Instruction,
    Launch,
    Model,
    MoveMeasured,
    RateMeasured,
    Requeue,
    ReturnToQueue,
    StartRound,
)
from optuna_fleet.executor.call.runs import RunRecord
from optuna_fleet.executor.call.summary import Decision, FleetSummary, mean_of
from optuna_fleet.pipeline.pipeline_messages import PipelineStats
from optuna_fleet.resources import Device
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.sampler_bridge.proposals import Proposals
from optuna_fleet.sampler_bridge.records import (
    CallState,
    DeviceSpan,
    Flight,
    RunState,
    record_call,
)

Entry: TypeAlias = Event | Instruction
"""What the controller hears and wants."""

_STORY = 40
_SHORTEST_S, _LONGEST_S = 2.0, 15.0
_PART = 100
"""An interval between records is this part of the call so far, within these bounds; and as many
times what the last one took to write, at least."""
_PLAIN = (bool, int, float, str, tuple, Enum)


class Journal:
    """Notes what happens, and tells each reader of it.

    Args:
        runs: Those that have begun and not ended, by run id.
        readers: Each is told of it, and of the run that it is about if that has not ended.
    """

    def __init__(
        self,
        runs: Mapping[int, RunRecord],
        *readers: Callable[[Entry, RunRecord | None, float], None],
    ) -> None:
        self._runs = runs
        self._readers = readers
        self._zero = time.time() - time.monotonic()
        self._last: deque[tuple[float, Entry]] = deque(maxlen=_STORY)

    def now(self) -> float:
        """Seconds since the epoch, by a clock that nobody sets meanwhile."""
        return self._zero + time.monotonic()

    def note(self, entry: Entry) -> None:
        """This happens now."""
        now = self.now()
        self._last.append((now, entry))
        if fleet_logger.isEnabledFor(logging.DEBUG):
            fleet_logger.debug(_in_words(entry))
        run = self._runs.get(getattr(entry, "run_id", -1))
        for tell in self._readers:
            tell(entry, run, now)

    def attach_to(self, error: BaseException) -> None:
        """What happened last is shown below this error, a line each."""
        end = self.now()
        story = [f"{at - end:9.3f} s  {_in_words(entry)}" for at, entry in self._last]
        note = "\n".join(["What happened last in the fleet:", *story])
        vars(error).setdefault("__notes__", []).append(note)  # as `add_note` of Python 3.11


def _in_words(entry: Entry) -> str:
    """As "RankEnded(run_id=3, device=1, ending=RETURNED)": what is long is left out."""
    said = ", ".join(f"{name}={value}" for name, value in _short(entry))
    return f"{type(entry).__name__}({said})"


def _short(entry: Any) -> Iterator[tuple[str, object]]:
    for field in fields(entry):
        value = getattr(entry, field.name)
        if isinstance(value, Enum):
            yield field.name, value.name
        elif isinstance(value, _PLAIN):
            yield field.name, value


class DeviceLog:
    """From when to when each device was there: a reader of the journal.

    Args:
        record: Given all spans, and the positions of those that have changed.
        there: The devices of all nodes: where one trainer is ready, its node is there.

    Attributes:
        spans: One for each time that a device was there; while it is, without an end.
    """

    def __init__(
        self,
        record: Callable[[Sequence[DeviceSpan], Sequence[int]], None],
        there: Callable[[], Iterable[Device]],
    ) -> None:
        self.spans: list[DeviceSpan] = []
        self._record = record
        self._there = there
        self._open: dict[int, int] = {}  # position of the span without an end, by device
        self._changed: list[int] = []

    def begin(self, now: float) -> None:
        """The call begins with the devices that are there."""
        self._join(self._there(), now)
        self.write()

    def take(self, entry: Entry, run: RunRecord | None, now: float) -> None:
        """This happens; `write` what comes of it."""
        if isinstance(entry, DeviceJoined):
            known = {span.device for span in self.spans}
            new = (device for device in self._there() if device.index not in known)
            self._join([entry.device, *new], now)
        elif isinstance(entry, DeviceGone):
            self._leave(entry.device, now)

    def write(self) -> None:
        """Record what has changed."""
        if self._changed:
            changed, self._changed = self._changed, []
            self._record(self.spans, changed)

    def end(self, now: float) -> None:
        """The call is over."""
        for device in list(self._open):
            self._leave(device, now)
        self.write()

    def _join(self, devices: Iterable[Device], now: float) -> None:
        for device in devices:
            if device.index in self._open:
                continue
            self._open[device.index] = len(self.spans)
            self._changed.append(len(self.spans))
            name = device.node_name or f"node {device.node}"
            self.spans.append(
                DeviceSpan(device=device.index, node=name, kind=device.kind, start=now)
            )

    def _leave(self, device: int, now: float) -> None:
        position = self._open.pop(device, None)
        if position is not None:
            self.spans[position] = replace(self.spans[position], end=now)
            self._changed.append(position)

    def there_s(self, now: float) -> dict[int, float]:
        """Seconds that each device was there, up to now."""
        seconds: dict[int, float] = {}
        for span in self.spans:
            lasted = (now if span.end is None else span.end) - span.start
            seconds[span.device] = seconds.get(span.device, 0.0) + max(0.0, lasted)
        return seconds


class Tally:
    """Adds up what happens: a reader of the journal.

    Args:
        began: When the call did, in seconds since the epoch.

    Attributes:
        flights: Runs that have ended on all their devices.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._startup_s: float | None = None
        self.flights: list[Flight] = []
        self._decisions: list[Decision] = []
        self._num_given_back = self._rescales = 0
        self._moves_s: list[float] = []

    def take(self, entry: Entry, run: RunRecord | None, now: float) -> None:
        """This happens."""
        match entry:
            case Launch() if self._startup_s is None:
                self._startup_s = now - self._began
            case Requeue() if run is not None:
                self._rescales += {ended.ending for ended in run.ended} == {Ending.YIELDED}
            case ReturnToQueue():
                self._num_given_back += 1
            case MoveMeasured():
                self._moves_s.append(entry.seconds)
            case StartRound():
                self._decided(entry, now)

    def _decided(self, started: StartRound, now: float) -> None:
        """A plan is carried out: say so where anything moves."""
        made: dict[str, Any] = {one.name: getattr(started.plan, one.name) for one in fields(Plan)}
        about = made | {"flotillas": ()}
        decision = Decision(time=now, round=started.round, moves=started.moves, **about)
        self._decisions.append(decision)
        level = logging.INFO if started.moves or started.round == 1 else logging.DEBUG
        fleet_logger.log(level, f"Round {decision.round}: {decision.reason}")

    def summary(
        self,
        devices: DeviceLog,
        now: float,
        *,
        trials: Mapping[str, int],
        left_out: Mapping[str, str],
        pipeline: PipelineStats | None = None,
        exchange: str = "",
    ) -> FleetSummary:
        """The summary of everything up to now."""
        there_s = devices.there_s(now)
        busy_s, waited_s = defaultdict[int, float](float), defaultdict[int, float](float)
        for flight in self.flights:
            for device in flight.devices:
                busy_s[device] += flight.end - flight.start
                waited_s[device] += flight.data_wait_s / len(flight.devices)
        given_back = {"given back": self._num_given_back} if self._num_given_back else {}
        return FleetSummary(
            trials=dict(trials) | given_back,
            num_devices=len(there_s),
            num_nodes=len({span.node for span in devices.spans}),
            there_s=there_s,
            duration_s=now - self._began,
            busy_s=dict(busy_s),
            waited_s=dict(waited_s),
            probing_s=sum(flight.probing_s for flight in self.flights),
            profiling_s=sum(flight.profiling_s for flight in self.flights),
            decisions=tuple(self._decisions),
            rescales=self._rescales,
            move_s=mean_of(self._moves_s),
            pipeline=pipeline,
            exchange=exchange,
            left_out=dict(left_out),
            startup_s=self._startup_s or 0.0,
        )


@dataclass(slots=True, kw_only=True)
class _Pace:
    """How far a trial is, and how fast where it is."""

    run: RunState
    samples_per_epoch: float = 0.0
    epoch_began: float | None = None
    has_done_one: bool = False  # on these devices


class Progress:
    """How the call is getting on, as runs say: a reader of the journal; tells the study.

    Often at first, and the seldomer the longer the call takes, or the storage to write it.
    """

    def __init__(self, ledger: Ledger, proposals: Proposals) -> None:
        self._ledger = ledger
        self._proposals = proposals
        self._write_s = 0.0
        self._paces: dict[int, _Pace] = {}  # by trial, until it is done

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

    def note(self, on_devices: Iterable[int], now: float, *, ending: str = "") -> float:
        """Write down how it goes; return in how many seconds that is to be done again.

        Args:
            on_devices: Trials that have devices.
            now: As the journal has it.
            ending: See `CallState`.
        """
        ledger, proposals, flying = self._ledger, self._proposals, sorted(on_devices)
        every_s = min(_LONGEST_S, max(_SHORTEST_S, (now - ledger.began) / _PART))
        every_s = max(every_s, _PART * self._write_s)
        waiting = () if ending else proposals.unfinished()
        state = CallState(
            began=ledger.began,
            noted=round(time.time(), 3),
            every_s=round(every_s, 3),
            ending=ending,
            n_trials=proposals.n_trials,
            timeout=proposals.timeout,
            num_asked=proposals.num_asked,
            waiting=tuple(sorted(set(waiting).difference(flying))),
            runs=tuple(self._paces[number].run for number in flying),
        )
        began = time.monotonic()
        record_call(ledger.study, state)
        self._write_s = time.monotonic() - began
        return max(every_s, _PART * self._write_s)
