"""``optuna-fleet top``: watches a study in a terminal; nothing is made there, nothing written."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import shutil
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalRedisBackend
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet.arguments import number_of
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.sampler_bridge.patience import in_words
from optuna_fleet.sampler_bridge.records import (
    CallState,
    DeviceSpan,
    RunState,
    calls_of,
    device_spans_of,
    flights_of,
)

_NUM_RECENT = 8
_MOST_SHOWN = 12  # numbers of trials in a line
_LEAST_SILENCE_S, _MISSED = 30.0, 4
"""A driver that has missed so many signs of life is taken to be gone."""


def add_top(commands: Any) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "top",
        help="watch a study: who trains where and how fast, what is best, when it will be done",
        description="Shows what the study has stored, again and again until Ctrl+C. Never writes "
        "to it. The driver tells every few seconds how it goes.",
    )
    command.add_argument("study", nargs="?", metavar="STUDY", help="needed if there are several")
    command.add_argument(
        "--storage",
        required=True,
        metavar="URL",
        help="of a database, as in sqlite:///study.db, or redis://...; or a journal file",
    )
    seconds = number_of(least=0.1, most=86400)
    command.add_argument("--interval", type=seconds, default=2.0, metavar="SECONDS")
    command.add_argument("--once", action="store_true", help="show it once and end")
    command.set_defaults(run=_top)


def _top(options: argparse.Namespace) -> int:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = open_study(options.study, options.storage)
    lines, problem = Snapshot(study, time.time()).lines(), ""
    if options.once or not sys.stdout.isatty():
        print(*lines, sep="\n")
        return 0
    # There is nothing to tidy up, and an exception may be lost in a callback of SQLAlchemy's.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    clear = "" if os.environ.get("TERM", "dumb") == "dumb" else "\x1b[H\x1b[2J"
    while True:
        width, height = shutil.get_terminal_size()
        shown = [*([problem] if problem else []), *lines][: height - 1]
        print(clear, *(f"{line[: width - 1]}\n" for line in shown), sep="", end="", flush=True)
        time.sleep(options.interval)
        try:
            lines, problem = Snapshot(study, time.time()).lines(), ""
        except Exception as error:  # what was read last stays
            problem = f"The storage can't be read: {in_words(error)}"


# -- what is read ---------------------------------------------------------------------------------


def expected_end(
    now: float,
    *,
    ended: Sequence[float],
    under_way: Sequence[tuple[float, float, int]],
    num_to_come: int | None,
    num_devices: int,
    deadline: float | None = None,
) -> float | None:
    """When all trials will be done, if each takes as long as the mean; None where nothing tells.

    Who has taken longer by now goes on to its last epoch; and nobody is widened.

    Args:
        now: In any seconds.
        ended: Device seconds that each trial took that has ended, be it pruned.
        under_way: Of each trial that has not, the device seconds that it has had, and those that
            its other epochs take: infinity if that is not known; and how many devices it is on.
        num_to_come: Further trials; None for as many as there is time for.
        num_devices: Devices that are there.
        deadline: When no further trial is begun, in the same seconds; None if nobody says.
    """
    known = [*ended] or [spent_s + most_s for spent_s, most_s, _ in under_way if most_s < math.inf]
    if not known or not num_devices:
        return None
    mean_s = statistics.mean(known)
    work_s = last_s = 0.0
    for spent_s, most_s, width in under_way:
        left_s = min(mean_s - spent_s if spent_s < mean_s else math.inf, most_s)
        if left_s < math.inf:
            work_s += left_s
            last_s = max(last_s, left_s / width)
    ends = []
    if num_to_come is not None:
        ends.append(now + max((work_s + num_to_come * mean_s) / num_devices, last_s))
    if deadline is not None:  # who was begun before it is not cut short
        ends.append(max(now + max(work_s / num_devices, last_s), deadline))
    return min(ends, default=None)


class Snapshot:
    """A study at one moment, as a call on a fleet has told: the last, or the last that runs.

    Attributes:
        call: That call, if there was one.
        runs: Who is on devices, by trial.
        devices: Those that are there, by number.
        waiting: Trials that were asked for and have no devices now.
        elsewhere: Other RUNNING trials: another process has them, or a dead one had.
    """

    def __init__(self, study: optuna.Study, now: float) -> None:
        self._study, self._now = study, now
        self._trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
        self._flights = flights_of(study)
        running = {n for n, t in self._trials.items() if t.state is TrialState.RUNNING}
        self.call: CallState | None = None
        self.runs: list[RunState] = []
        self.devices: dict[int, DeviceSpan] = {}
        self.waiting, self.elsewhere = set[int](), running
        if calls := calls_of(study):
            self.call = call = max(calls, key=lambda call: (_is_alive(call, now), call.began))
            self.runs = sorted((r for r in call.runs if r.trial in running), key=lambda r: r.trial)
            self.waiting = running & set(call.waiting)
            new = {n for n in running if _started(self._trials[n]) > call.noted}
            self.elsewhere = running - self.waiting - {run.trial for run in self.runs} - new
            if not call.ending:
                spans = device_spans_of(study, call.began)
                self.devices = {span.device: span for span in spans if span.end is None}

    @property
    def is_alive(self) -> bool:
        """Whether the driver has given signs of life."""
        return self.call is not None and _is_alive(self.call, self._now)

    @property
    def num_to_come(self) -> int | None:
        """Trials that are still to be asked for; None where nobody says."""
        if self.call is None or self.call.n_trials is None:
            return None
        return max(0, self.call.n_trials - self.call.num_asked)

    @property
    def recent(self) -> list[FrozenTrial]:
        """The trials that ended last, the newest first."""
        ended = [(t.datetime_complete, n) for n, t in self._trials.items() if t.datetime_complete]
        return [self._trials[n] for _, n in sorted(ended, reverse=True)[:_NUM_RECENT]]

    def widths(self, number: int) -> list[int]:
        """On how many devices a trial was, one after the other."""
        return [len(flight["devices"]) for flight in self._flights.get(number, ())]

    def for_s(self, run: RunState) -> float:
        """Seconds that a trial has been where it is, as far as that is known."""
        assert self.call is not None
        return max(0.0, (self._now if self.is_alive else self.call.noted) - run.start)

    @property
    def expected_end(self) -> float | None:
        """When all will be done; None where nothing tells."""
        if self.call is None or not self.is_alive:
            return None
        under_way = [(self._spent_s(n), math.inf, 1) for n in self.waiting]
        for run in self.runs:
            width, left_s = len(run.devices), math.inf
            if run.max_epochs is not None and run.epoch_s is not None:
                left_s = run.epoch_s * max(0, run.max_epochs - run.epochs_done)
            spent_s = self._spent_s(run.trial) + self.for_s(run) * width
            under_way.append((spent_s, left_s * width, width))
        flown = (n for n, t in self._trials.items() if t.state.is_finished())
        timeout = self.call.timeout
        return expected_end(
            self._now,
            ended=[self._spent_s(n) for n in flown if n in self._flights],
            under_way=under_way,
            num_to_come=self.num_to_come,
            num_devices=len(self.devices),
            deadline=None if timeout is None else self.call.began + timeout,
        )

    def _spent_s(self, number: int) -> float:
        """Device seconds of its flights."""
        flights = self._flights.get(number, ())
        return math.fsum((f["end"] - f["start"]) * len(f["devices"]) for f in flights)

    # -- in words ---------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        """All that is shown, without what would control a terminal."""
        facts = {
            "trials": self._counts(),
            "best": self._best(),
            "devices": self._devices(),
            "waiting for devices": _numbers(self.waiting),
            "running elsewhere, or left": _numbers(self.elsewhere),
            "expected end": self._expected(),
        }
        lines = [f"{self._study.study_name}  {self.condition()}"]
        lines += [f"{title:<26}  {text}" for title, text in facts.items() if text]
        lines += _table(
            "On devices:",
            ("trial", "devices", "for", "epoch", "samples/s", "last value", "parameters"),
            [self._run(run) for run in self.runs],
        )
        lines += _table(
            "Ended last:",
            ("trial", "ended", "value", "number of devices", "took", "parameters"),
            [self._ended(trial) for trial in self.recent],
        )
        lines += ["", f"as of {_clock(self._now)}"]
        return ["".join(c if c.isprintable() else "\ufffd" for c in line) for line in lines]

    def condition(self) -> str:
        """How the sweep is."""
        call = self.call
        if call is None:
            return "no trial ran on a fleet" if self._trials else "no trials yet"
        if self.is_alive:
            return f"running for {duration(self._now - call.began)}"
        if not call.ending:
            silence = duration(self._now - call.noted)
            return f"no sign of life from its driver for {silence}: this is how it was then"
        ending = "ended with an error" if call.ending == "failed" else call.ending
        return f"{ending} since {_clock(call.noted)}"

    def _counts(self) -> str:
        counts = Counter(trial.state for trial in self._trials.values())
        words = [f"{counts[state]} {state.name.lower()}" for state in TrialState if counts[state]]
        if self.is_alive and self.num_to_come:
            words.append(f"{self.num_to_come} to come")
        return ", ".join(words)

    def _best(self) -> str:
        """Of several objectives, the trials that no other is better than."""
        if len(self._study.directions) > 1:
            best = _numbers(trial.number for trial in self._study.best_trials)
            return best and f"trials {best}"
        try:
            trial = self._study.best_trial
        except ValueError:  # no trial is complete, or none is feasible
            return ""
        return f"trial {trial.number}: {_values(trial.values)} with {_params(trial)}"

    def _devices(self) -> str:
        if not self.devices:
            return ""
        idle = self.devices.keys() - {device for run in self.runs for device in run.devices}
        kinds = ", ".join(sorted({device.kind for device in self.devices.values()}))
        on_idle = f": {self._places(idle)}" if idle else ""
        return f"{len(self.devices)} ({kinds}), {len(idle)} idle{on_idle}"

    def _expected(self) -> str:
        if self.expected_end is None:
            return ""
        left_s = self.expected_end - self._now
        return f"in about {duration(left_s)}, {_clock(self.expected_end)}"

    def _run(self, run: RunState) -> Iterator[str]:
        trial = self._trials[run.trial]
        values, rate = trial.intermediate_values, run.samples_per_s
        yield str(run.trial)
        yield self._places(run.devices)
        yield duration(self.for_s(run))
        yield f"{run.epochs_done}" + (f" of {run.max_epochs}" if run.max_epochs else "")
        yield "" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
        yield f"{values[max(values)]:.6g}" if values else ""
        yield _params(trial)

    def _ended(self, trial: FrozenTrial) -> Iterator[str]:
        widths = itertools.groupby(self.widths(trial.number))
        yield str(trial.number)
        yield trial.state.name.lower()
        yield _values(trial.values)
        yield " > ".join(str(width) for width, _ in widths)
        yield duration(trial.duration.total_seconds()) if trial.duration else ""
        yield _params(trial)

    def _places(self, devices: Iterable[int]) -> str:
        """Numbers of devices, with the names of their nodes if there are several."""
        by_node: dict[str, list[int]] = defaultdict(list)
        for number in devices:
            node = self.devices[number].node if number in self.devices else ""
            by_node[node].append(number)
        if len({device.node for device in self.devices.values()}) < 2:
            return ranges(itertools.chain.from_iterable(by_node.values()))
        return "; ".join(f"{node} {ranges(on)}" for node, on in sorted(by_node.items()))


def _is_alive(call: CallState, now: float) -> bool:
    """Its driver's clock may be another one's."""
    return not call.ending and now - call.noted < max(_LEAST_SILENCE_S, _MISSED * call.every_s)


def _started(trial: FrozenTrial) -> float:
    return 0.0 if trial.datetime_start is None else trial.datetime_start.timestamp()


def _table(title: str, headings: Sequence[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Its lines, with one that is empty before it; none without rows."""
    cells = [headings, *([cell or "-" for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return ["", title, *lines] if len(lines) > 1 else []


def duration(seconds: float) -> str:
    """Seconds in the two largest units that say something."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours < 1:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers, those that follow each other as one: 0-3, 5."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _numbers(numbers: Iterable[int]) -> str:
    known = sorted(numbers)
    more = len(known) - _MOST_SHOWN
    return ranges(known[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _values(values: Sequence[float] | None) -> str:
    return ", ".join(f"{value:.6g}" for value in values or ())


def _params(trial: FrozenTrial) -> str:
    shown = (f"{v:.4g}" if isinstance(v, float) else str(v)[:24] for v in trial.params.values())
    return " ".join(map("{}={}".format, trial.params, shown))


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


# -- the storage ----------------------------------------------------------------------------------


def open_study(name: str | None, url: str) -> optuna.Study:
    """The study of that name, or the only one there is, of a storage as Optuna's command takes it.

    Raises:
        FleetConfigError: There is no such storage, or no such study in it.
    """
    shown = re.sub(r"(://[^:/@]*):.*@", r"\1@", url)  # without a password
    try:
        storage = _opened(url)
        names = optuna.get_all_study_names(storage)
    except (FleetConfigError, ImportError):
        raise
    except Exception as error:
        raise FleetConfigError(
            f"The storage {shown} can't be read ({in_words(error)}): give what "
            "`create_study(storage=...)` was given, or the path of a journal file."
        ) from error
    if name is None and len(names) == 1:
        (name,) = names
    if name not in names:
        known = ", ".join(map(repr, sorted(names))) or "none"
        wanted = "a study's name is needed" if name is None else f"there is no study {name!r}"
        raise FleetConfigError(f"In {shown} {wanted}; it has {known}.")
    return optuna.load_study(study_name=name, storage=storage)


def _opened(url: str) -> BaseStorage:
    if url.startswith("redis"):
        return JournalStorage(JournalRedisBackend(url))
    if "://" in url and not url.startswith("sqlite"):
        # Optuna would create its tables where there are none.
        return RDBStorage(url, skip_table_creation=True)
    is_journal = "://" not in url
    path = Path(url if is_journal else re.sub(r"^sqlite[^:]*:///?|\?.*", "", url))
    if not path.is_file():  # either would make it
        raise FleetConfigError(f"There is no file {path}, where the study should be.")
    if is_journal:
        return JournalStorage(JournalFileBackend(url))
    return RDBStorage(  # opened so, it can't be written either
        f"sqlite:///file:{quote(os.path.abspath(path))}?mode=ro&uri=true",
        engine_kwargs={"connect_args": {"timeout": 20}},
        skip_table_creation=True,
    )
