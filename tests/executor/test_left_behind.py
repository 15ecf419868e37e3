"""Nothing is left behind: no process, file or RUNNING trial, however a script ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from tests import leftovers
from tests.nursery import Nursery
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
    try:
        study.optimize(bad, n_trials=3, executor=fleet)
    except RuntimeError:
        pass
closed = held()
print("REPORT", json.dumps([before, closed]))
FleetExecutor(devices=1).optimize(study, fine, 1)  # not closed: ends with the interpreter
"""

TRAINING = """
import sys
from pathlib import Path
import optuna
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

study = optuna.create_study(storage=f"sqlite:///{folder}/study.db", study_name="s")
other = study.ask()  # of someone else, who still works on it
fleet = FleetExecutor(SharedPipeline(train=Noise(32)), devices=2)
study.optimize(objective, n_trials=50, executor=fleet)
"""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """That of a script in this folder, of which nothing is left in the end."""
    (tmp_path / "tmp").mkdir()
    segments = leftovers.shared_memory()
    yield {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}
    until(lambda: not processes_in(tmp_path))
    assert not list(tmp_path.glob("tmp/optuna-fleet-*"))
    until(lambda: not leftovers.shared_memory() - segments)


def processes_in(folder: Path) -> list[str]:
    """All that work in this folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/cwd") == str(folder):
                found.append(pid)
        except OSError:
            pass
    return found


def test_nothing_is_left_after_close_an_exception_and_the_interpreters_end(
    environment: dict[str, str], tmp_path: Path
) -> None:
    environment.pop("PYTHONUNBUFFERED", None)
    done = subprocess.run(
        [sys.executable, "-c", PLAIN],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (report,) = [line for line in lines if line.startswith("REPORT")]
    before, closed = json.loads(report.removeprefix("REPORT"))
    assert closed["children"] == 0
    assert closed["fds"] == before["fds"]
    own = [name for name in closed["threads"] if name not in before["threads"]]
    assert all("optuna-fleet" not in name for name in own), own
    # What objectives print must come out, although the trainers are killed in the end.
    printed = sorted(line for line in lines if line.startswith("printed"))
    assert printed[:4] == [f"printed by trial {n}" for n in range(4)]
    assert len(printed) == 5


def test_nothing_is_left_after_control_c(
    environment: dict[str, str], tmp_path: Path, nursery: Nursery
) -> None:
    (tmp_path / "script.py").write_text(TRAINING)
    command = [str(tmp_path / "script.py"), str(tmp_path)]
    with open(tmp_path / "err", "w") as err:
        script = nursery.start(command, environment, err, err, tmp_path)
    until(lambda: len(list(tmp_path.glob("training-*"))) == 2 or script.poll() is not None)
    script.send_signal(signal.SIGINT)
    assert script.wait() == 1
    told = (tmp_path / "err").read_text()
    assert told.rstrip().endswith("KeyboardInterrupt")
    dropped = told.count("Exception ignored in")  # by Python, where a database's cursor went
    assert told.count("Traceback") - dropped == 1  # of the script; and a line on the trials
    (line,) = [line for line in told.splitlines() if "under way" in line]
    assert line.endswith("Trials under way (1, 2) failed: KeyboardInterrupt().")
    study = optuna.load_study(storage=f"sqlite:///{tmp_path}/study.db", study_name="s")
    found = [trial.state for trial in study.trials]
    study._storage.remove_session()
    study._storage._backend.engine.dispose()  # type: ignore[attr-defined]
    assert found == [TrialState.RUNNING, TrialState.FAIL, TrialState.FAIL]  # the first isn't ours
