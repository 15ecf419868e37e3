"""Strikes a running sweep from outside, at the moments that its processes reach."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_fleet.checkpoints.folder import FileName, newest_first
from tests.chaos.faults import KINDS, Fault
from tests.nursery import Forked
from tests.storage_servers import Postgres

_DISK_S = 2.0  # a disk that is full has no logical end: only time will do
_AT_WORK = ("batch", "report", "sample")


@dataclass(slots=True, kw_only=True)
class Strike:
    """A fault that was played.

    Attributes:
        fault: Which.
        trial: The trial that reached the moment, if a trial did.
        epoch: Where it was.
        pid: The process that reached the moment.
        began_s: When.
        recovered_s: When that trial was there again; if it was to fail, when another went on; if
            no trial was struck, when a process was at such a moment again; if that could be any
            process, when one was at work that is younger than the strike.
        known: All processes there were, if that matters.
    """

    fault: Fault
    trial: int | None
    epoch: int
    pid: int
    began_s: float
    recovered_s: float | None = None
    known: frozenset[int] | None = None

    def is_over_at(self, moment: dict[str, Any]) -> bool:
        """Whether this moment shows that the sweep has recovered."""
        kind = KINDS[self.fault.kind]
        if self.known is not None:
            return moment["site"] in _AT_WORK and moment["pid"] not in self.known
        if self.trial is None:
            return bool(moment["site"] == kind.site)
        if moment["site"] != "report" or moment["rank"] != 0:
            return False
        if kind.fails:
            return bool(moment["trial"] != self.trial)
        return bool(moment["trial"] == self.trial and moment["epoch"] >= self.epoch)


class Demon:
    """Listens on `path` and plays `faults` on the sweep in `folder`.

    Attributes:
        driver: The sweep's first process, while it runs.
        processes: Tells all its processes.
        database: Where its study is, if that is a server.
        pending: What is still to be played.
        strikes: What was played, in order.
        widths: On how many devices each trial was at most.
        reused: Processes that went on to other trials after they had run out of memory.
    """

    def __init__(self, path: Path, folder: Path, faults: list[Fault], seed: int) -> None:
        self.driver: subprocess.Popen[str] | Forked | None = None
        self.processes: Callable[[], list[int]] = list
        self.database: Postgres | None = None
        self.strikes: list[Strike] = []
        self.widths: Counter[int] = Counter()
        self.reused: set[int] = set()
        self._folder = folder
        self.pending = list(faults)
        self._overdue: list[Fault] = []
        self._chance = random.Random(seed)
        self._counts: Counter[tuple[str, int | None]] = Counter()
        self._at_work: dict[int, dict[str, Any]] = {}  # the last moment of each, the latest last
        self._timers: list[threading.Timer] = []
        self._until_noticed: list[Callable[[], Any]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._serve, name="demon")
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end all trouble that lasts."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for timer in self._timers:
            timer.join()
        self._end_what_was_noticed()
        self.pending += self._overdue

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError, ValueError):
                message = b"".join(iter(lambda: connection.recv(4096), b""))  # noqa: B023
                connection.sendall(self._reached(json.loads(message)).encode())

    def _reached(self, moment: dict[str, Any]) -> str:
        key = moment["site"], moment.get("trial") if moment["site"] == "write" else None
        self._counts[key] += 1
        self._note(moment)
        if moment["site"] == "gone":
            self._end_what_was_noticed()
        overdue, self._overdue = self._overdue, []
        for fault in overdue:
            self._kill_role(fault)
        for strike in self.strikes:
            if KINDS[strike.fault.kind].fails and strike.fault.strikes_at(moment, 1):
                # Whoever was to say so has been killed: it happens again.
                return KINDS[strike.fault.kind].argument
        for fault in [*self.pending]:
            if fault.strikes_at(moment, self._counts[key]):
                self.pending.remove(fault)
                if not KINDS[fault.kind].late:
                    return self._strike(fault, moment)
                self._later(fault.after_s, functools.partial(self._kill_role, fault))
        return "go"

    def _note(self, moment: dict[str, Any]) -> None:
        now = time.monotonic()
        for strike in self.strikes:
            if strike.recovered_s is None and strike.is_over_at(moment):
                strike.recovered_s = now
            spent = KINDS[strike.fault.kind].takes_all_memory
            if spent and strike.pid == moment["pid"] and strike.trial != moment.get("trial"):
                self.reused.add(strike.pid)
        if "ranks" in moment:
            self.widths[moment["trial"]] = max(self.widths[moment["trial"]], moment["ranks"])
        if moment["site"] in _AT_WORK:
            self._at_work.pop(moment["pid"], None)
            self._at_work[moment["pid"]] = moment

    def _strike(self, fault: Fault, moment: dict[str, Any]) -> str:
        kind = KINDS[fault.kind]
        self.strikes.append(
            Strike(
                fault=fault,
                trial=fault.trial,
                epoch=moment.get("epoch", 0),
                pid=moment["pid"],
                began_s=time.monotonic(),
            )
        )
        play: Callable[..., str | None] = getattr(self, f"_{kind.verb}")
        return play(moment, *([kind.argument] if kind.argument else [])) or "go"

    # -- processes --------------------------------------------------------------------------------

    def _order(self, moment: dict[str, Any], order: str) -> str:
        return order

    def _kill(self, moment: dict[str, Any]) -> None:
        os.kill(moment["pid"], signal.SIGKILL)

    def _stop(self, moment: dict[str, Any]) -> None:
        os.kill(moment["pid"], signal.SIGSTOP)

    def _kill_agent(self, moment: dict[str, Any]) -> None:
        agent = _parent(moment["pid"])
        assert agent is not None
        os.kill(agent, signal.SIGKILL)

    def _stop_agent(self, moment: dict[str, Any]) -> None:
        agent = _parent(moment["pid"])
        assert agent is not None
        os.kill(agent, signal.SIGSTOP)

    def _kill_role(self, fault: Fault) -> None:
        """Kill one of these processes, whatever it is at; if there are none, once there are."""
        role = KINDS[fault.kind].argument
        victims = self._living(role)
        if not victims:
            self._overdue.append(fault)
            return
        victim = self._chance.choice(victims)
        last = self._at_work.get(victim, {}) if role == "trainer" else {}
        self.strikes.append(
            Strike(
                fault=fault,
                trial=last.get("trial"),
                epoch=last.get("epoch", 0) + (last.get("site") == "report"),
                pid=victim,
                began_s=time.monotonic(),
                known=None if last else frozenset(self._living("any")),
            )
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)

    def _living(self, role: str) -> list[int]:
        """The sweep's processes that play this role; "any" but the driver itself."""
        # The same command after a call's end is another call: too late to kill anybody.
        if self.driver is None or self.driver.poll() is not None or self._counts["end", None]:
            return []
        if role == "driver":
            return [self.driver.pid]
        others = [pid for pid in self.processes() if pid != self.driver.pid]
        if role == "any":
            return others
        wanted = "sample" if role == "preprocessor" else "batch report"
        at_work = dict(self._at_work)
        return [pid for pid in at_work if pid in others and at_work[pid]["site"] in wanted]

    # -- files ------------------------------------------------------------------------------------

    def _damage(self, moment: dict[str, Any], how: str) -> None:
        """Damage the trial's newest checkpoint, then kill its trainer: it has to read it."""
        (folder,) = _seen(moment, self._folder / "checkpoints").glob("chaos-*")
        names = [FileName.parse(path.name) for path in folder.iterdir()]
        mine = [n for n in names if n and not n.kind and n.trial == moment["trial"]]
        num_files = 2 if how in ("both", "gone") else 1
        for file in [folder / str(name) for name in newest_first(mine)[:num_files]]:
            with contextlib.suppress(FileNotFoundError):
                _damage(file, how, self._chance)
        self._kill(moment)

    def _fill_disk(self, moment: dict[str, Any]) -> None:
        self._fill(_seen(moment, self._folder / "checkpoints" / "filler"))

    def _fill_shared_memory(self, moment: dict[str, Any]) -> None:
        self._fill(_seen(moment, Path("/dev/shm/filler")))

    def _fill(self, file: Path) -> None:
        # Opened now: the process whose root this is may be gone by the time this ends.
        folder = os.open(file.parent, os.O_RDONLY)
        with contextlib.suppress(OSError), file.open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        self._later(_DISK_S, lambda: (os.unlink(file.name, dir_fd=folder), os.close(folder)))

    def _make_read_only(self, moment: dict[str, Any]) -> None:
        assert self.driver is not None
        command = ["nsenter", f"--target={self.driver.pid}", "--user", "--mount", "mount", "-o"]
        disk = str(self._folder / "checkpoints")
        for _ in range(100):  # refused while somebody writes
            if not subprocess.run([*command, "remount,ro", disk], capture_output=True).returncode:
                break
            time.sleep(0.01)
        self._later(_DISK_S, lambda: subprocess.run([*command, "remount,rw", disk]))

    def _lock_storage(self, moment: dict[str, Any], for_s: str = "") -> None:
        path = self._folder / "study.db"
        storage = sqlite3.connect(path, timeout=30, check_same_thread=False, isolation_level=None)
        storage.execute("BEGIN EXCLUSIVE")
        self._end_outage(for_s, storage.close)

    def _stop_database(self, moment: dict[str, Any], for_s: str = "") -> None:
        assert self.database is not None
        self.database.stop()
        self._end_outage(for_s, self.database.start)

    def _end_outage(self, after_s: str, end: Callable[[], Any]) -> None:
        """After so many seconds, or as soon as the driver has said that the storage is gone."""
        if after_s:
            self._later(float(after_s), end)
        else:
            self._until_noticed.append(end)

    def _end_what_was_noticed(self) -> None:
        ends, self._until_noticed = self._until_noticed, []
        for end in ends:
            end()

    def _later(self, after_s: float, then: Callable[[], Any]) -> None:
        timer = threading.Timer(after_s, then)
        timer.start()
        self._timers.append(timer)


def _seen(moment: dict[str, Any], path: Path) -> Path:
    """A path as the process sees it, with what only the sweep has mounted there."""
    return Path(f"/proc/{moment['pid']}/root{path}")


def _parent(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _damage(file: Path, how: str, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    match how:
        case "torn" | "both":
            data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        case "flipped":
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        case "gone":
            file.unlink()
            return
    file.write_bytes(data)
