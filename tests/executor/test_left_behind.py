"""Nothing is left behind: no process, port, file or RUNNING trial, however it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from tests import leftovers
from tests.waiting import until

ROOT = Path(__file__).parents[2]

PLAIN = """
import gc, json, os, sys, threading
import optuna
from optuna_fleet import FleetExecutor

def held():
    gc.collect()
    me = f"/proc/{os.getpid()}"
    children = open(f"{me}/task/{os.getpid()}/children").read().split()
    return {
        "fds": len(os.listdir(f"{me}/fd")),
        "threads": sorted(t.name for t in threading.enumerate()),
        "children": len(children),
    }

def fine(trial):
    print("printed by trial", trial.number)
    return trial.suggest_float("x", 0, 1)

def bad(trial):
    raise RuntimeError("bad")

study = optuna.create_study()
study.optimize(fine, n_trials=1)
before = held()
with FleetExecutor(devices=2) as fleet:
    study.optimize(fine, n_trials=3, executor=fleet)
closed = held()
fleet = FleetExecutor(devices=2)
try:
    study.optimize(bad, n_trials=3, executor=fleet)
except RuntimeError:
    pass
fleet.close()
failed = held()
print("REPORT", json.dumps([before, closed, failed]))
FleetExecutor(devices=1).optimize(study, fine, 1)  # not closed: ends with the interpreter
"""

TRAINING = """
import os, sys, time
import optuna, torch
from pathlib import Path
from optuna_fleet import FleetExecutor, SharedPipeline
from tests.fleets import Noise, small_model

folder = Path(sys.argv[1])

def objective(trial):
    model = trial.prepare(small_model())
    for epoch in trial.epochs(10**6):
        for images, labels in trial.batches("train", batch_size=8):
            model(images).sum().backward()
        trial.report(float(epoch), epoch)
        (folder / f"training-{trial.number}").touch()

if __name__ == "__main__":
    storage = f"sqlite:///{folder}/study.db"
    study = optuna.create_study(storage=storage, study_name="s")
    other = study.ask()  # of someone else, who still works on it
    fleet = FleetExecutor(SharedPipeline(train=Noise(32)), devices=2)
    study.optimize(objective, n_trials=50, executor=fleet)
"""


class Script:
    """A script in a process of its own, whose descendants all carry a mark."""

    def __init__(self, code: str, folder: Path) -> None:
        self.folder = folder
        self.mark = f"OPTUNA_FLEET_TEST={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        path = folder / "script.py"
        path.write_text(code)
        environment = {**os.environ, name: value, "TMPDIR": str(self.temporary)}
        environment["PYTHONPATH"] = str(ROOT)
        environment.pop("PYTHONUNBUFFERED", None)
        self.shared_memory = leftovers.shared_memory()
        self.process = subprocess.Popen(
            [sys.executable, str(path), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> tuple[str, str]:
        return self.process.communicate()

    def processes(self) -> list[int]:
        """Every living process that descends from the script."""
        return [
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._owns(pid)
        ]

    def _owns(self, pid: int) -> bool:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
            return self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def listens(self) -> bool:
        """Whether one of its processes has a listening TCP port."""
        inodes = set()
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes.add(f"socket:[{fields[9]}]")
        return any(inodes & links(pid) for pid in self.processes())

    def left_in_shared_memory(self) -> set[str]:
        return leftovers.shared_memory() - self.shared_memory


def links(pid: int) -> set[str]:
    found = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    except OSError:
        pass
    return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Script]]:
    scripts: list[Script] = []

    def started(code: str) -> Script:
        scripts.append(Script(code, tmp_path))
        return scripts[-1]

    yield started
    for script in scripts:
        for pid in script.processes():
            os.kill(pid, signal.SIGKILL)
        script.process.communicate()


def assert_nothing_left(script: Script) -> None:
    until(lambda: not script.processes())
    assert not list(script.temporary.glob("optuna-fleet-*"))
    until(lambda: not script.left_in_shared_memory())


def test_nothing_is_left_after_close_an_exception_and_the_interpreters_end(
    start: Callable[[str], Script],
) -> None:
    script = start(PLAIN)
    out, err = script.finish()
    assert script.process.returncode == 0, err
    (report,) = [line for line in out.splitlines() if line.startswith("REPORT")]
    before, closed, failed = json.loads(report.removeprefix("REPORT"))
    assert before["children"] == closed["children"] == failed["children"] == 0
    assert before["threads"] == closed["threads"] == failed["threads"]
    assert closed["fds"] == failed["fds"] == before["fds"]
    assert_nothing_left(script)
    # What objectives print must come out, although the trainers are killed in the end.
    printed = sorted(line for line in out.splitlines() if line.startswith("printed"))
    assert printed[:4] == [f"printed by trial {n}" for n in range(4)]
    assert len(printed) == 5


@pytest.fixture
def training(start: Callable[[str], Script], tmp_path: Path) -> Script:
    """A script in the midst of training two trials."""
    script = start(TRAINING)
    until(lambda: len(list(tmp_path.glob("training-*"))) == 2 or script.process.poll() is not None)
    assert script.process.poll() is None, script.finish()[1]
    assert script.listens()
    return script


def states(folder: Path) -> list[TrialState]:
    study = optuna.load_study(storage=f"sqlite:///{folder}/study.db", study_name="s")
    found = [trial.state for trial in study.trials]
    study._storage.remove_session()
    study._storage._backend.engine.dispose()  # type: ignore[attr-defined]
    return found


def test_nothing_is_left_after_control_c(training: Script, tmp_path: Path) -> None:
    training.process.send_signal(signal.SIGINT)
    _, err = training.finish()
    assert training.process.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    dropped = err.count("Exception ignored in")  # by Python, where a database's cursor went
    assert err.count("Traceback") - dropped == 1  # of the script; and a line on the trials
    (line,) = [line for line in err.splitlines() if "under way" in line]
    assert line.endswith("Trials under way (1, 2) failed: KeyboardInterrupt().")
    assert_nothing_left(training)
    # The first one is not ours.
    assert states(tmp_path) == [TrialState.RUNNING, TrialState.FAIL, TrialState.FAIL]
