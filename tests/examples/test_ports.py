"""The ports of Optuna's published examples, run as a user would, with a fleet and without."""

from __future__ import annotations

import functools
import re
import signal
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
import torch
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet import SharedPipeline
from tests.fleets import Leg, fleet_of
from tests.nursery import Nursery

ROOT = Path(__file__).parents[2]
PORTS = ROOT / "examples" / "ports"
sys.path[:0] = [str(PORTS), str(ROOT / "benchmarks")]
import digits_data  # noqa: E402
import porting  # noqa: E402
import pytorch_distributed_fleet  # noqa: E402
import pytorch_folds_fleet  # noqa: E402

PLAIN = (  # beside pytorch_checkpoint, which has a test of its own
    "pytorch_simple",
    "pytorch_distributed_simple",
    "pytorch_vision_simple",
    "pytorch_folds_simple",
    "pytorch_lightning_simple",
    "pytorch_ignite_simple",
    "transformers_simple",
)
FLEET = (
    "pytorch_simple_fleet",
    "pytorch_vision_fleet",
    "pytorch_folds_fleet",
    "pytorch_lightning_fleet",
    "transformers_fleet",
)


def trials_of(storage: str) -> list[FrozenTrial]:
    (summary,) = optuna.get_all_study_summaries(storage)
    return optuna.load_study(study_name=summary.study_name, storage=storage).trials


@pytest.fixture(scope="module", autouse=True)
def nursery(nursery: Nursery) -> Iterator[Nursery]:
    """All ports need scikit-learn, and to import what some are for takes seconds."""
    of_all = ("sklearn.datasets", "sklearn.model_selection")
    of_some = ("lightning.pytorch", "ignite.handlers", "transformers.trainer", "datasets")
    with nursery.branch(*of_all, *of_some) as branch, branch.bears_all():
        yield branch


AGAIN = """
import functools, importlib, sys, optuna, torch, torch.distributed as dist
from optuna_fleet.executor.cluster.devices import cpu_count

torch.set_num_threads(max(1, cpu_count() // 2))  # as in each of two trainers
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
port, storage = importlib.import_module(sys.argv[1]), sys.argv[2]
epochs = {"num_epochs": int(sys.argv[4])} if sys.argv[3:] else {}
(summary,) = optuna.get_all_study_summaries(storage)
flown = optuna.load_study(study_name=summary.study_name, storage=storage)
alone = optuna.create_study(directions=flown.directions)
for trial in flown.trials:
    alone.enqueue_trial(trial.params)
alone.optimize(functools.partial(port.objective, **epochs), n_trials=len(flown.trials))
for one, other in zip(flown.trials, alone.trials, strict=True):
    assert one.params == other.params
    assert one.values == other.values, (one.values, other.values)
    assert one.intermediate_values == other.intermediate_values
"""


@pytest.mark.parametrize("port", [*PLAIN, *FLEET])
def test_a_port_runs_on_a_fleet(nursery: Nursery, port: str, tmp_path: Path) -> None:
    """Some that are unchanged have the same values by Optuna alone."""
    number = "1" if port in PLAIN else "2"
    shorter = ["--epochs", "1"] if re.search("vision|folds", port) else []
    storage = f"sqlite:///{tmp_path}/study.db"
    options = ["--fleet", "--trials", number, "--devices", "2", "--storage", storage, *shorter]
    ended = nursery.run(PORTS / f"{port}.py", *options, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    printed = ended.stdout + ended.stderr
    assert f"{number} complete" in printed
    assert "Traceback" not in printed
    for trial in trials_of(storage):
        assert trial.state is TrialState.COMPLETE
        assert all(0 <= value <= 1 for value in trial.values)
        last = list(trial.intermediate_values.values())[-1:]
        assert "folds" in port or last == [trial.value]
    if port in PLAIN[::2]:
        (tmp_path / "again.py").write_text(AGAIN)
        ended = nursery.run(tmp_path / "again.py", port, storage, *shorter, folder=tmp_path)
        assert ended.returncode == 0, ended.stderr


def test_collectives_of_the_objectives_own_are_those_of_its_trial() -> None:
    train, val = digits_data.load_datasets()
    val = torch.utils.data.Subset(val, range(359))  # a prime, so that shares of it are told apart
    trials = []
    with fleet_of(devices=2, pipeline=SharedPipeline(train=train, val=val)) as fleet:
        for legs in ([Leg((0,), 2), Leg((0, 1))], [Leg((1,))]):
            fleet.script = {0: legs}
            study = optuna.create_study()
            study.enqueue_trial({"hidden": 40, "lr": 0.01})
            study.optimize(pytorch_distributed_fleet.objective, n_trials=1, executor=fleet)
            trials += study.trials
    assert [trial.user_attrs["world_size"] for trial in trials] == [2, 1]
    wide, alone = (list(trial.intermediate_values.values()) for trial in trials)
    assert [359 * value for value in wide] == pytest.approx([round(359 * v) for v in wide])
    assert wide == pytest.approx(alone, abs=3.5 / 359)  # rounding may decide a close case


def test_folds_that_move_are_scored_as_those_that_stay() -> None:
    folds = pytorch_folds_fleet.load_folds()
    parts = {f"train_{fold}": train for fold, (train, _) in enumerate(folds)}
    parts |= {f"val_{fold}": val for fold, (_, val) in enumerate(folds)}
    objective = functools.partial(pytorch_folds_fleet.objective, num_epochs=2)
    params = {"lr": 0.01, "weight_of_malign": 1.0, "hidden": 8, "dropout": 0.3}
    values = []
    with fleet_of(devices=2, pipeline=SharedPipeline(**parts)) as fleet:
        for legs in ([Leg((0,), 1), Leg((1,), 5), Leg((0,))], [Leg((1,))]):
            fleet.script = {0: legs}
            study = optuna.create_study(directions=["minimize", "minimize"])
            study.enqueue_trial(params)
            study.optimize(objective, n_trials=1, executor=fleet)
            values.append(study.trials[0].values)
    assert values[0] == values[1]


DEADLY = """
import functools, os, signal, pytorch_checkpoint as port

def save_and_die(trial, content, *, save):
    save(trial, content)
    if content["epoch"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)

def objective(trial, *, original, save):
    original.__globals__["save_checkpoint"] = functools.partial(save_and_die, save=save)
    return original(trial)

port.objective = functools.partial(objective, original=port.objective, save=port.save_checkpoint)
port.main()
"""


def test_trials_survive_the_death_of_their_process(nursery: Nursery, tmp_path: Path) -> None:
    script = tmp_path / "deadly.py"
    script.write_text(DEADLY)
    ended = nursery.run(script, "--trials", "1", folder=tmp_path)
    assert ended.returncode == -signal.SIGKILL
    folder = tmp_path / "checkpoint_study"
    with sqlite3.connect(folder / "study.db") as database:
        database.execute("UPDATE trial_heartbeats SET heartbeat = datetime('now', '-1 hour')")
    database.close()
    options = ["--fleet", "--trials", "2", "--devices", "2"]
    ended = nursery.run(script, *options, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    killed, retried, run_again = trials_of(f"sqlite:///{folder}/study.db")
    assert (killed.state, retried.state) == (TrialState.FAIL, TrialState.COMPLETE)
    assert retried.params == killed.params != run_again.params
    assert sorted(killed.intermediate_values) == [0, 1, 2]
    assert sorted(retried.intermediate_values) == [4, 5, 6, 7, 8, 9]
    assert run_again.state is TrialState.COMPLETE
    assert sorted(run_again.intermediate_values) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


_FILE, _LINES = r"(\w+_fleet)\.py\)", r"(\d+) new or edited, (\d+) gone"


@pytest.mark.parametrize("page", ["examples/ports/README.md", "docs/comparison.md"])
def test_tables_have_the_lines_that_differ(page: str) -> None:
    text = (ROOT / page).read_text()
    rows = [line for line in text.splitlines() if line[:1] == "|" and "_fleet.py)" in line]
    assert len(rows) >= len(porting.SCRIPTS)
    for row in rows:
        ((fleet,), (numbers,)) = (re.findall(part, row) for part in (_FILE, _LINES))
        simple = fleet.replace("simple_fleet", "simple").replace("_fleet", "_simple")
        assert porting.changes(simple, fleet)["ported"] == tuple(map(int, numbers)), fleet


def test_an_unchanged_script_has_three_new_lines() -> None:
    for _, simple, fleet in porting.SCRIPTS.values():
        assert porting.changes(simple, fleet)["unchanged"] == (3, 0)
