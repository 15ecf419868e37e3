"""Runs sweeps under a demon and compares what they leave with an undisturbed run."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet.sampler_bridge.ledger import REASON_KEY
from tests.chaos.demon import Demon, Strike
from tests.chaos.faults import KINDS, Fault, draw
from tests.chaos.moments import SOCKET
from tests.chaos.sweep import STUDY, open_storage
from tests.clusters.forks import forking
from tests.nursery import Forked, Nursery
from tests.storage_servers import Postgres, has_postgres

ROOT = Path(__file__).parents[2]
LIMIT_S = 900.0
"""A sweep that takes longer counts as hung; undisturbed it takes about ten seconds."""

_COMMAND = "from tests.chaos.sweep import main; main()"
_MEMORY = "mount -t tmpfs -o size=1m none /dev/shm"
_DISK = 'mount -t tmpfs -o size=2m none "$0"'
_MOST_COMMANDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A sweep's end.

    Attributes:
        trials: The study's trials.
        widths: On how many devices each trial was at most. Flights that the study has records of
            would not do: those that a driver's death ended are not among them.
        strikes: What was played on it.
        unreached: Faults whose moment never came.
        problems: What must not be, whatever was played; among others, that the sweep hung.
        wall_s: How long it took.
        log: What it printed.
    """

    trials: list[FrozenTrial]
    widths: dict[int, int]
    strikes: list[Strike]
    unreached: list[Fault]
    problems: list[str]
    wall_s: float
    log: str


@functools.cache
def has_namespaces() -> bool:
    """Whether a process may mount what only it sees."""
    command = [*_unshare(), "true"]
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _unshare() -> list[str]:
    return ["unshare", "--user", "--map-root-user", "--mount"]


def run(
    *,
    num_trials: int,
    faults: list[Fault],
    seed: int = 0,
    storage: str = "journal",
    nursery: Nursery | None = None,
) -> Result:
    """Run a sweep to its end, by the same command again where a fault ended it.

    Args:
        num_trials: Of the sweep.
        faults: What strikes it.
        seed: Decides what is open about them, such as which bit is flipped.
        storage: Where its study is: "journal", "sqlite" or "postgres", a server of its own.
        nursery: Forks its processes, unless faults need mounts of its own; else each starts
            afresh.
    """
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, contextlib.ExitStack() as stack:
        urls = {"journal": f"{name}/journal", "sqlite": f"sqlite:///{name}/study.db"}
        database = None
        if storage == "postgres":
            database = stack.enter_context(contextlib.closing(Postgres()))
            urls[storage] = database.new_database("chaos")
        sweep = _Sweep(Path(name), num_trials, faults, seed, urls[storage], database, nursery)
        return sweep.run()


def storage_for(kinds: Iterable[str], default: str = "journal") -> str:
    """Where the study of a sweep must be for faults of these kinds."""
    wanted = {KINDS[kind].needs for kind in kinds} & {"sqlite", "postgres"}
    assert len(wanted) < 2, f"one study can't be in {wanted}"
    return wanted.pop() if wanted else default


@dataclass(slots=True)
class _Sweep:
    folder: Path
    num_trials: int
    faults: list[Fault]
    seed: int
    url: str
    database: Postgres | None
    nursery: Nursery | None
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.needs_mounts:
            self.nursery = None

    @property
    def needs_mounts(self) -> bool:
        return any(KINDS[fault.kind].needs == "namespace" for fault in self.faults)

    def run(self) -> Result:
        for name in ("checkpoints", "tmp"):
            (self.folder / name).mkdir()
        began_s = time.monotonic()
        demon = Demon(self.folder / "demon", self.folder, self.faults, self.seed)
        demon.database, demon.processes = self.database, self._processes
        forks = forking(self.nursery) if self.nursery else contextlib.nullcontext()
        try:
            with forks:
                self._run_commands(demon, began_s + LIMIT_S)
        finally:
            self._end_all()
            demon.close()
        wall_s = time.monotonic() - began_s
        if left := self._left_behind():
            self.problems.append(f"left behind: {left}")
        if demon.reused:
            self.problems.append(f"out of memory, and used again: {sorted(demon.reused)}")
        return Result(
            trials=_records(self.url),
            widths=demon.widths,
            strikes=demon.strikes,
            unreached=demon.pending,
            problems=self.problems,
            wall_s=wall_s,
            log=(self.folder / "log").read_text(),
        )

    def _run_commands(self, demon: Demon, deadline_s: float) -> None:
        """The same command again and again, as long as it is killed."""
        for _ in range(_MOST_COMMANDS):
            demon.driver = self._start()
            try:
                code = demon.driver.wait(deadline_s - time.monotonic())
            except subprocess.TimeoutExpired:
                demon.driver.send_signal(signal.SIGUSR1)  # prints where it stands
                time.sleep(1.0)
                self.problems.append(f"not done after {LIMIT_S:.0f} s")
                return
            if not _until(lambda: not self._processes()):
                self.problems.append(f"left running: {self._processes()}")
            if code == 0:
                return
            if code != -signal.SIGKILL:
                self.problems.append(f"ended with exit code {code}")
                return
            self._end_all()
        self.problems.append(f"not done after {_MOST_COMMANDS} commands")

    def _start(self) -> subprocess.Popen[str] | Forked:
        checkpoints = str(self.folder / "checkpoints")
        (self.folder / "sweep.py").write_text(_COMMAND)
        # On a busy machine all that is slow would count as stuck, if that were soon noticed.
        hangs = any(fault.kind.startswith("stop ") for fault in self.faults)
        command = [str(self.folder / "sweep.py"), self.url, checkpoints]
        command += [str(self.num_trials), "24" if hangs else "120"]
        environment = {
            **os.environ,
            SOCKET: str(self.folder / "demon"),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": str(ROOT),
        }
        with (self.folder / "log").open("a") as log:
            if self.nursery is not None:
                return self.nursery.start(command, environment, log, log, self.folder)
            command = [sys.executable, *command]
            if has_namespaces():
                # Gone with the driver, so only where the driver lives.
                script = f'{_DISK if self.needs_mounts else "true"} && {_MEMORY} && exec "$@"'
                command = [*_unshare(), "sh", "-c", script, checkpoints, *command]
            return subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, text=True, cwd=self.folder
            )

    def _left_behind(self) -> list[str]:
        """Temporary files, and checkpoints of trials that are done, other than the best one's."""
        checkpoints = list(self.folder.glob("checkpoints/*/*trial-*"))
        kept = [p for p in checkpoints if p.name.endswith(".final.pt")]
        left = [*self.folder.glob("tmp/optuna-fleet-*"), *checkpoints]
        return [path.name for path in left if path not in kept[:1]]

    def _processes(self) -> list[int]:
        """Every living process of the sweep: those that work in its folder."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and self._owns(folder):
                    found.append(int(folder.name))
        return found

    def _owns(self, folder: Path) -> bool:
        return os.readlink(folder / "cwd") == str(self.folder)

    def _end_all(self) -> None:
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _until(condition: Callable[[], bool], limit_s: float = 120.0) -> bool:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def _records(url: str) -> list[FrozenTrial]:
    storage = open_storage(url)
    try:
        return optuna.load_study(study_name=STUDY, storage=storage).get_trials()
    finally:
        storage.remove_session()
        if isinstance(storage, optuna.storages.RDBStorage):
            storage.engine.dispose()


# -- comparing ------------------------------------------------------------------------------------


def differences(result: Result, reference: Result) -> dict[int, str]:
    """What is wrong with each trial's record, by its number; -1 for the study as a whole."""
    failing = {
        strike.trial: KINDS[strike.fault.kind].fails
        for strike in result.strikes
        if KINDS[strike.fault.kind].fails
    }
    wrong = {}
    if len(result.trials) != len(reference.trials):
        wrong[-1] = f"{len(result.trials)} trials, not {len(reference.trials)}"
    alone = {
        t.number for t in reference.trials if _is_alone(result, t) and _is_alone(reference, t)
    }
    for trial, other in zip(result.trials, reference.trials, strict=False):
        number = trial.number
        problem = _difference(trial, other, fails=failing.get(number, ""), exact=number in alone)
        if problem:
            wrong[trial.number] = problem
    return wrong


def _difference(trial: FrozenTrial, other: FrozenTrial, *, fails: str, exact: bool) -> str:
    state = TrialState.FAIL if fails else other.state
    if trial.state is not state:
        return f"state {trial.state.name}, not {state.name}"
    if trial.params != other.params:
        return f"parameters {trial.params}, not {other.params}"
    ours, theirs = trial.intermediate_values, other.intermediate_values
    if fails:
        reason = str(trial.system_attrs.get(REASON_KEY, ""))
        if fails != "InjectedError" and fails not in reason:
            return f"state FAIL because of {reason!r}, not {fails}"
        theirs = {step: theirs[step] for step in sorted(theirs)[: len(ours)]}
        return "" if _equal(ours, theirs, exact=exact) else f"values {ours}, not {theirs}"
    if not _equal(ours, theirs, exact=exact):
        return f"values {ours}, not {theirs}"
    if not _equal(_numbered([trial.value]), _numbered([other.value]), exact=exact):
        return f"value {trial.value}, not {other.value}"
    losses = [_numbered(t.user_attrs.get("losses", [])) for t in (trial, other)]
    return "" if _equal(*losses, exact=exact) else "other losses"


def _is_alone(result: Result, trial: FrozenTrial) -> bool:
    """Whether it always had one device: then results are equal bit for bit."""
    return result.widths[trial.number] == 1


def _numbered(values: list[Any]) -> dict[int, Any]:
    return dict(enumerate(values))


def _equal(ours: dict[int, Any], theirs: dict[int, Any], *, exact: bool) -> bool:
    if exact or ours.keys() != theirs.keys():
        return ours == theirs
    return all(math.isclose(ours[key], theirs[key], rel_tol=1e-10) for key in ours)


def lengths(reference: Result) -> dict[int, int]:
    """Epochs that each trial took."""
    return {trial.number: len(trial.intermediate_values) for trial in reference.trials}


def drawn(kinds: list[str], reference: Result, seed: int) -> list[Fault]:
    """Faults of these kinds at moments that the seed decides."""
    return draw(kinds, lengths(reference), random.Random(seed))


def playable() -> Iterator[str]:
    """The kinds that can be played on this machine."""
    for name, kind in KINDS.items():
        if kind.needs == "namespace" and not has_namespaces():
            continue
        if kind.needs == "postgres" and not has_postgres():
            continue
        yield name
