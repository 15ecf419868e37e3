"""Objectives of scripts: what they may do in a trainer as they may in the script itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.nursery import Nursery

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
for what in {what}:
    study = optuna.create_study()
    study.optimize(what, n_trials=1, executor=fleet)
    print("value", study.trials[0].value)
"""
UNGUARDED = SPAWNING + "fleet = FleetExecutor(devices=1)" + OPTIMIZE.format(what="[objective]")
GUARDED = (
    SPAWNING
    + "if __name__ == '__main__':\n"
    + " with FleetExecutor(devices=1) as fleet:"
    + OPTIMIZE.format(what="objective, functools.partial(objective), Objective()").replace(
        "\n", "\n  "
    )
)


def run(
    nursery: Nursery, folder: Path, script: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(script)
    return nursery.run(path, *arguments, folder=folder)


def test_an_objective_may_pickle_and_spawn_what_its_script_defines(
    nursery: Nursery, tmp_path: Path
) -> None:
    ended = run(nursery, tmp_path, GUARDED)
    assert ended.stdout.split() == 3 * ["value", "2.0"], ended.stderr


def test_a_script_without_a_main_guard_is_told_so_by_what_it_spawns(
    nursery: Nursery, tmp_path: Path
) -> None:
    ended = run(nursery, tmp_path, UNGUARDED)
    assert 'put that under `if __name__ == "__main__":`' in ended.stderr
    assert ended.stdout.split() == ["value", "-1.0"]


WITHOUT_STREAMS = """
import pathlib, sys
import optuna, torch
from optuna_fleet import FleetExecutor, SharedPipeline

def count(batches): return sum(map(len, batches))

def objective(trial):
    torch.backends.cudnn.benchmark = True
    print("heard by nobody")
    print("nor this", file=sys.stderr)
    trial.prepare(torch.nn.Linear(1, 1))
    return float(count(trial.batches("train", batch_size=2)))

def new_pipeline(): return SharedPipeline(train=torch.zeros(10, 1), shuffled=[])

study = optuna.create_study()
with FleetExecutor(new_pipeline(), devices=2, device_type="cpu") as fleet:
    study.optimize(objective, n_trials=2, executor=fleet)
with new_pipeline() as alone:
    number = count(alone.batches("train", batch_size=2, epoch=0))
pathlib.Path(sys.argv[1]).write_text(f"{study.best_value} {number}")
"""


def test_a_script_need_have_no_streams_and_its_objective_may_mention_any_module(
    tmp_path: Path,
) -> None:
    path, answer = tmp_path / "script.py", tmp_path / "answer"
    path.write_text(WITHOUT_STREAMS)
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, str(path), str(answer)]
    subprocess.run(command, check=True)
    assert answer.read_text() == "10.0 10"
