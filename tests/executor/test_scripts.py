"""Objectives of scripts: what they may do in a trainer as they may in the script itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SPAWNING = """
import functools, multiprocessing, pickle, sys
import optuna
from optuna_fleet import FleetExecutor

class Point:
    def __init__(self, x): self.x = x

def double(queue, point):
    queue.put(Point(2 * point.x))

def objective(trial):
    point = pickle.loads(pickle.dumps(Point(trial.number + 1)))
    assert type(point) is Point
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=double, args=(queue, point))
    process.start()
    process.join()
    return queue.get().x if process.exitcode == 0 else -1

class Objective:
    def __call__(self, trial): return objective(trial)

"""
OPTIMIZE = """
for what in objective, functools.partial(objective), Objective():
    study = optuna.create_study()
    study.optimize(what, n_trials=1, executor=fleet)
    print("value", study.trials[0].value)
"""
UNGUARDED = SPAWNING + "fleet = FleetExecutor(devices=1)" + OPTIMIZE
GUARDED = (
    SPAWNING
    + "if __name__ == '__main__':\n"
    + " with FleetExecutor(devices=1) as fleet:"
    + OPTIMIZE.replace("\n", "\n  ")
)


def run(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_an_objective_may_pickle_and_spawn_what_its_script_defines(tmp_path: Path) -> None:
    ended = run(tmp_path, GUARDED)
    assert ended.stdout.split() == 3 * ["value", "2.0"], ended.stderr


def test_a_script_without_a_main_guard_is_told_so_by_what_it_spawns(tmp_path: Path) -> None:
    ended = run(tmp_path, UNGUARDED)
    assert 'put that under `if __name__ == "__main__":`' in ended.stderr
    assert ended.stdout.split() == 3 * ["value", "-1.0"]


ARGUMENTS = """
import optuna, sys
from optuna_fleet import FleetExecutor

study = optuna.create_study()
study.optimize(lambda trial: float(sys.argv[2]), n_trials=1, executor=FleetExecutor(devices=1))
print("value", study.best_value, len(sys.argv))
"""


def test_an_objective_sees_the_arguments_of_its_script(tmp_path: Path) -> None:
    ended = run(tmp_path, ARGUMENTS, "--lr", "0.5")
    assert ended.stdout.split() == ["value", "0.5", "3"], ended.stderr
