"""A study that is optimized on a fleet holds what Optuna would have recorded."""

from __future__ import annotations

import copy
import functools
import io
import json
import math
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
import pytest
from optuna.artifacts import FileSystemArtifactStore, upload_artifact
from optuna.storages import InMemoryStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet import FleetConfigError, FleetExecutor, TrialError
from tests.behaviour.harness import Leg
from tests.waiting import until

COMPLETE, FAIL, PRUNED = TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED
RUNNING, WAITING = TrialState.RUNNING, TrialState.WAITING
ROOT = Path(__file__).parents[2]


def quadratic(trial: Any) -> float:
    return float(trial.suggest_float("x", -10, 10)) ** 2


def states(study: optuna.Study) -> list[TrialState]:
    return [trial.state for trial in study.trials]


@pytest.fixture
def storages(tmp_path: Path) -> Iterator[dict[str, Any]]:
    rdb = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.db")
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal"))
    yield {"sqlite": rdb, "journal": optuna.storages.JournalStorage(backend), "memory": None}
    rdb.engine.dispose()


def outlast(trial: Any) -> float:
    began = trial.datetime_start
    until(lambda: (type(began).now() - began).total_seconds() > 1.5)
    return 0.0


def test_timeout_stops_starts_but_never_a_trial(fleet: Any) -> None:
    study = optuna.create_study()
    study.optimize(outlast, n_trials=100, timeout=1.0, executor=fleet)
    assert 1 <= len(study.trials) <= 4  # one wave
    assert set(states(study)) == {COMPLETE}


def test_callbacks_in_order_with_what_was_stored(fleet: Any) -> None:
    study = optuna.create_study()
    calls: list[tuple[str, int, TrialState]] = []

    def note(name: str, study: optuna.Study, trial: FrozenTrial) -> None:
        calls.append((name, trial.number, trial.state))
        trial.params.clear()  # a copy

    callbacks = [functools.partial(note, "first"), functools.partial(note, "second")]
    study.optimize(
        complete_prune_fail, n_trials=3, catch=ValueError, callbacks=callbacks, executor=fleet
    )
    assert sorted(calls[::2]) == [
        ("first", 0, COMPLETE),
        ("first", 1, PRUNED),
        ("first", 2, FAIL),
    ]
    assert [(n, s) for _, n, s in calls[::2]] == [(n, s) for _, n, s in calls[1::2]]
    assert all(trial.params for trial in study.trials)


def complete_prune_fail(trial: Any) -> float:
    x = trial.suggest_float("x", 0, 1)
    if trial.number == 1:
        trial.report(x, 3)
        raise optuna.TrialPruned("too slow")
    if trial.number == 2:
        raise ValueError("bad")
    return float(x)


class BreaksAfterwards(optuna.samplers.RandomSampler):
    """Raises when a trial has been told."""

    def after_trial(self, *_: Any) -> None:
        raise ZeroDivisionError


def breaks(*_: Any) -> None:
    raise ZeroDivisionError


def is_pruned(trial: Any) -> float:
    raise optuna.TrialPruned


def is_ended_elsewhere(trial: Any) -> float:
    trial.study.tell(trial.number, 1.0)
    return 0.0


@pytest.mark.parametrize(
    ("objective", "more", "sampler"),
    [
        (complete_prune_fail, {"callbacks": [breaks]}, None),
        (is_pruned, {"callbacks": [breaks]}, None),
        (complete_prune_fail, {}, BreaksAfterwards()),
        (is_ended_elsewhere, {"callbacks": [breaks]}, None),
        (complete_prune_fail, {"n_trials": 3}, None),
    ],
)
def test_the_summary_counts_trials_as_the_study_has_them(
    fleet: Any, objective: Any, more: dict[str, Any], sampler: Any
) -> None:
    study = optuna.create_study(sampler=sampler)
    with pytest.raises((ZeroDivisionError, ValueError)):
        study.optimize(objective, **{"n_trials": 1} | more, executor=fleet)
    assert fleet.summary.trials == Counter(state.name.lower() for state in states(study))


def test_a_study_the_objective_closes_over_is_the_drivers(fleet: Any) -> None:
    """A pickled in-memory study would be a copy: what is written to it would be lost silently."""
    study = optuna.create_study()

    def objective(trial: Any) -> float:
        study.set_user_attr("seen", trial.number)
        if trial.number == 0:
            study.stop()
        return float(len(study.trials))

    study.optimize(objective, executor=fleet)  # until it is stopped
    assert "seen" in study.user_attrs
    assert all(trial.value and trial.value >= 1 for trial in study.trials)


# -- what a trial says and gets ------------------------------------------------------------------


def use_everything(trial: Any) -> float:
    third = trial.suggest_float("third", 1 / 3, 1 / 3)
    x = trial.suggest_float("x", 1e-5, 1.0, log=True)
    n = trial.suggest_int("n", 1, 9, step=2)
    kind = trial.suggest_categorical("kind", ["a", None, 2.5, True])
    assert third == 1 / 3
    assert trial.params == {"third": third, "x": x, "n": n, "kind": kind}
    assert set(trial.distributions) == set(trial.params)
    assert isinstance(trial, optuna.Trial)
    assert trial.datetime_start is not None
    assert trial.study.study_name == "everything"
    assert trial.study.directions == [optuna.study.StudyDirection.MINIMIZE]
    trial.set_user_attr("exact", [x, n])
    assert trial.user_attrs["exact"] == [x, n]
    trial.set_constraint("budget", -0.5)
    assert trial.constraints == {"budget": -0.5}
    trial.report(0.1 + 0.2, 0)
    return x + n


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
def test_what_objectives_say_is_stored_exactly(
    fleet: Any, storages: dict[str, Any], kind: str
) -> None:
    study = optuna.create_study(
        storage=storages[kind], study_name="everything", sampler=optuna.samplers.RandomSampler(3)
    )
    study.optimize(use_everything, n_trials=4, executor=fleet)
    assert states(study) == 4 * [COMPLETE]
    for trial in study.trials:
        x, n = trial.user_attrs["exact"]
        assert trial.params["x"] == x
        assert trial.value == x + n
        assert trial.intermediate_values == {0: 0.1 + 0.2}
        assert trial.datetime_start <= trial.datetime_complete


def test_a_fleet_that_starts_slower_than_the_timeout_runs_trials_all_the_same() -> None:
    """Optuna runs at least one trial at any timeout > 0; starting our processes takes longer."""
    study = optuna.create_study()
    with FleetExecutor(devices=1, device_type="cpu") as fresh:
        study.optimize(quadratic, timeout=0.2, executor=fresh)
    assert len(study.trials) >= 1


def return_by_number(trial: Any, *, values: list[Any]) -> Any:
    return values[trial.number]


def test_values_that_are_no_values_fail_their_trials_with_a_line(
    fleet: Any, log: io.StringIO
) -> None:
    study = optuna.create_study()
    values = [None, math.nan, "one", [1.0, 2.0], "0.5", math.inf, -math.inf, [3.0], True]
    study.optimize(functools.partial(return_by_number, values=values), n_trials=9, executor=fleet)
    assert states(study) == 5 * [FAIL] + 4 * [COMPLETE]
    assert [trial.value for trial in study.trials[5:]] == [math.inf, -math.inf, 3.0, 1.0]
    text = log.getvalue()
    assert (
        "Trial 0 failed with parameters: {} because of the following error: The value None" in text
    )
    assert "Trial 1 failed with value nan." in text
    assert "did not match the number of the objectives 1" in text
    assert "Trial 4 failed with value '0.5'." in text  # Optuna raises, and leaves it RUNNING
    assert "in 0 rounds" not in text


def return_a_function(trial: Any) -> Any:
    return lambda: 1.0


def test_a_value_that_cannot_be_sent_fails_its_trial_with_a_line(fleet: Any) -> None:
    study = optuna.create_study()
    study.optimize(return_a_function, n_trials=2, executor=fleet)
    assert states(study) == 2 * [FAIL]


def test_tensors_and_arrays_of_one_element_are_values(fleet: Any) -> None:
    import numpy as np
    import torch

    study = optuna.create_study()
    values = [torch.tensor(1.5), torch.tensor([2.5]), np.float32(0.5), np.array(3.0)]
    study.optimize(functools.partial(return_by_number, values=values), n_trials=4, executor=fleet)
    assert [trial.value for trial in study.trials] == [1.5, 2.5, 0.5, 3.0]


def prune_or_not(trial: Any) -> float:
    trial.report(0.25, 0)
    trial.report(float("nan") if trial.number == 1 else 0.5, 1)
    if trial.should_prune() or trial.number < 3:
        raise optuna.TrialPruned(f"pruned {trial.number}")
    return 1.0


def test_pruned_trials_take_their_last_report(fleet: Any, log: io.StringIO) -> None:
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=0.1))
    optuna.logging.set_verbosity(optuna.logging.INFO)
    study.optimize(prune_or_not, n_trials=4, executor=fleet)
    assert states(study) == 4 * [PRUNED]
    assert [trial.value for trial in study.trials] == [0.5, None, 0.5, 0.5]
    assert "Trial 2 pruned. pruned 2" in log.getvalue()


# -- around the trials ---------------------------------------------------------------------------


def test_enqueued_trials_come_first_and_count(fleet: Any) -> None:
    study = optuna.create_study()
    study.enqueue_trial({"x": 1.0}, user_attrs={"mine": True})
    study.enqueue_trial({"x": 2.0})
    study.optimize(quadratic, n_trials=3, executor=fleet)
    assert len(study.trials) == 3
    assert [trial.value for trial in study.trials[:2]] == [1.0, 4.0]
    assert study.trials[0].user_attrs == {"mine": True}


def test_log_lines(fleet: Any, log: io.StringIO) -> None:
    study = optuna.create_study()
    optuna.logging.set_verbosity(optuna.logging.INFO)
    study.optimize(quadratic, n_trials=3, executor=fleet)
    text = log.getvalue()
    for number in range(3):
        assert re.search(
            rf"Trial {number} finished with value: \S+ and parameters: {{'x': \S+}}\. Best is",
            text,
        )


def test_without_executor_it_is_optunas_own_method(fleet: Any) -> None:
    study = optuna.create_study()
    here: list[int] = []
    study.optimize(lambda trial: here.append(trial.number) or 0.0, 2, executor=None)
    study.optimize(func=lambda trial: here.append(trial.number) or 0.0, n_trials=1)
    assert here == [0, 1, 2]
    with pytest.raises(TypeError):
        study.optimize(quadratic, n_trails=1)
    with pytest.raises(TypeError):
        study.optimize(quadratic, n_trails=1, executor=fleet)


def test_arguments_that_do_not_go_together(fleet: Any) -> None:
    study = optuna.create_study()
    with pytest.raises(FleetConfigError, match="`n_jobs` is 2"):
        study.optimize(quadratic, n_trials=1, n_jobs=2, executor=fleet)
    with pytest.raises(TypeError):  # as Optuna: eight arguments by position, not nine
        study.optimize(quadratic, 1, None, 1, (), None, False, False, "one more", executor=fleet)
    study.optimize(quadratic, 1, None, 1, (ValueError,), None, True, False, executor=fleet)
    assert states(study) == [COMPLETE]


def raise_value_error(trial: Any) -> float:
    raise ValueError("always")


def test_trials_of_others_are_not_touched(fleet: Any, storages: dict[str, Any]) -> None:
    study = optuna.create_study(storage=storages["sqlite"])
    other = study.ask()
    study.optimize(quadratic, n_trials=2, executor=fleet)
    with pytest.raises(ValueError, match="always"):
        study.optimize(raise_value_error, n_trials=1, executor=fleet)
    assert states(study) == [RUNNING, COMPLETE, COMPLETE, FAIL]
    study.tell(other, 1.0)


def wait_for(trial: Any, *, file: Path) -> float:
    until(file.exists)
    return 0.0


def test_heartbeats_are_recorded_while_a_trial_runs(fleet: Any, tmp_path: Path) -> None:
    kind = optuna.storages.RDBStorage
    with pytest.warns(optuna.exceptions.ExperimentalWarning):
        storage = kind(f"sqlite:///{tmp_path}/b.db", heartbeat_interval=1)
    study = optuna.create_study(storage=storage)
    record, beaten = kind.record_heartbeat, []

    def beat(storage: Any, trial_id: int) -> None:
        record(storage, trial_id)
        beaten.append(trial_id)
        if len(beaten) == 3:
            (tmp_path / "beaten").touch()

    objective = functools.partial(wait_for, file=tmp_path / "beaten")
    with mock.patch.object(kind, "record_heartbeat", beat):
        study.optimize(objective, n_trials=1, executor=fleet)
    assert len(set(beaten)) == 1
    assert states(study) == [COMPLETE]
    storage.engine.dispose()


# -- one executor, many calls --------------------------------------------------------------------


MAIN = """
import json
from dataclasses import dataclass

import optuna

from optuna_fleet import FleetExecutor

optuna.logging.set_verbosity(optuna.logging.ERROR)

class MyError(Exception):
    def __init__(self, what, code=0):
        super().__init__(what)
        self.code = code

@dataclass
class Space:
    high: float

    def sample(self, trial):
        return trial.suggest_float("x", 0, self.high)

SPACE = Space(2.0)

def helper(x):
    return x + SPACE.high

def plain(trial):
    return helper(SPACE.sample(trial))

class Objective:
    def __init__(self, offset):
        self.offset = offset

    def __call__(self, trial):
        if trial.number % 2:
            raise MyError("odd", 7)
        return self.offset

def closure(offset):
    def objective(trial):
        return offset
    return objective

if __name__ == "__main__":
    results = {}
    with FleetExecutor(devices=2, device_type="cpu") as fleet:
        study = optuna.create_study()
        study.optimize(plain, n_trials=2, executor=fleet)
        results["plain"] = [t.value - t.params["x"] for t in study.trials]
        study = optuna.create_study()
        study.optimize(Objective(3.0), n_trials=4, catch=(MyError,), executor=fleet)
        results["object"] = [t.state.name for t in study.trials]
        study = optuna.create_study()
        try:
            study.optimize(Objective(3.0), n_trials=4, executor=fleet)
        except MyError as error:
            results["error"] = [error.args[0], error.code]
        study = optuna.create_study()
        study.optimize(closure(4.0), n_trials=2, executor=fleet)
        study.optimize(lambda trial: 5.0, n_trials=2, executor=fleet)
        results["closures"] = [t.value for t in study.trials]
        import sys
        results["torch here"] = "torch" in sys.modules
    print(json.dumps(results))
"""


def test_objectives_of_a_script(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(MAIN)
    done = subprocess.run(
        [sys.executable, str(path)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "plain": pytest.approx([2.0, 2.0]),
        "object": ["COMPLETE", "FAIL", "COMPLETE", "FAIL"],
        "error": ["odd", 7],
        "closures": [4.0, 4.0, 5.0, 5.0],
        "torch here": False,
    }
    assert done.stderr == ""


def unit(trial: Any) -> float:
    return float(trial.suggest_float("x", 0, 1))


@pytest.fixture
def beating(tmp_path: Path) -> Iterator[RDBStorage]:
    """A storage with heartbeats, whose stale trials are tried again."""
    with pytest.warns(optuna.exceptions.ExperimentalWarning):
        storage = RDBStorage(
            f"sqlite:///{tmp_path}/study.db",
            heartbeat_interval=1,
            grace_period=2,
            heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
        )
    yield storage
    storage.engine.dispose()


# -- Ctrl-C, and what is queued -------------------------------------------------------------------


def interrupt_driver(trial: Any, *, driver: int, num_trials: int) -> float:
    """Press Ctrl-C once that many trials have been asked for; never end by itself."""
    if trial.number == 0:
        until(lambda: len(trial.study.trials) == num_trials)
        os.kill(driver, signal.SIGINT)
    until(lambda: False)
    return 0.0


def test_control_c_fails_the_trials_in_flight(fleet: Any) -> None:
    study = optuna.create_study()
    objective = functools.partial(interrupt_driver, driver=os.getpid(), num_trials=4)
    told: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        study.optimize(
            objective,
            n_trials=9,
            catch=(Exception,),
            callbacks=[lambda study, trial: told.append(trial.number)],
            executor=fleet,
        )
    assert states(study) == 4 * [FAIL]
    assert told == []
    study.optimize(unit, n_trials=2, executor=fleet)
    assert states(study)[4:] == 2 * [COMPLETE]


def test_control_c_gives_back_the_trials_in_the_queue(fleet: Any, beating: RDBStorage) -> None:
    study = optuna.create_study(storage=beating)
    fleet.script = {0: [Leg((0,))], 1: [Leg((0,))]}  # the second waits for the first's device
    objective = functools.partial(interrupt_driver, driver=os.getpid(), num_trials=2)
    with pytest.raises(KeyboardInterrupt):
        study.optimize(objective, n_trials=2, executor=fleet)
    assert states(study) == [FAIL, WAITING]
    study.optimize(unit, n_trials=1, executor=fleet)
    assert states(study) == [FAIL, COMPLETE]


@pytest.mark.parametrize(("is_told", "left"), [(False, FAIL), (True, COMPLETE)])
def test_control_c_while_a_trial_is_told_does_not_leave_it_running(
    fleet: Any, monkeypatch: pytest.MonkeyPatch, log: io.StringIO, is_told: bool, left: TrialState
) -> None:
    tell = InMemoryStorage.set_trial_state_values

    def interrupted(self: Any, trial_id: int, state: TrialState, values: Any = None) -> None:
        if state is FAIL or is_told:
            tell(self, trial_id, state, values)
        if state is COMPLETE:
            raise KeyboardInterrupt

    monkeypatch.setattr(InMemoryStorage, "set_trial_state_values", interrupted)
    study = optuna.create_study()
    with pytest.raises(KeyboardInterrupt):
        study.optimize(unit, n_trials=1, executor=fleet)
    assert states(study) == [left]
    assert "could not be told" not in log.getvalue()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_control_c_is_not_lost_where_python_drops_it(fleet: Any) -> None:
    study = optuna.create_study()

    def interrupt(study: optuna.Study, trial: FrozenTrial) -> None:
        cursor = mock.Mock()
        reference = weakref.ref(cursor, lambda _: signal.raise_signal(signal.SIGINT))
        del cursor
        assert reference() is None

    with pytest.raises(KeyboardInterrupt):
        study.optimize(unit, n_trials=20, callbacks=[interrupt], executor=fleet)
    assert len(study.trials) < 20
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def leave(trial: Any, *, kind: type[BaseException]) -> float:
    raise kind(3)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_end_in_the_objective_is_never_swallowed(fleet: Any, kind: type[BaseException]) -> None:
    study, objective = optuna.create_study(), functools.partial(leave, kind=kind)
    with pytest.raises(kind):
        study.optimize(objective, n_trials=1, catch=(Exception,), executor=fleet)
    assert states(study) == [FAIL]  # Optuna leaves it RUNNING for ever at a `SystemExit`


# -- processes that live on -----------------------------------------------------------------------


def import_helper(trial: Any) -> float:
    import edited_helper  # type: ignore[import-not-found]

    return float(edited_helper.VALUE)


def test_an_edited_module_is_seen_once_the_executor_was_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    study, helper = optuna.create_study(), tmp_path / "edited_helper.py"
    with FleetExecutor(devices=1, device_type="cpu") as executor:
        for content in ("VALUE = 1", "VALUE = 1000"):  # lengths by which Python tells them apart
            helper.write_text(content)
            study.optimize(import_helper, n_trials=1, executor=executor)
        executor.close()
        study.optimize(import_helper, n_trials=1, executor=executor)
    assert [trial.value for trial in study.trials] == [1, 1, 1000]


def test_a_stale_trial_is_tried_again(fleet: Any, beating: RDBStorage) -> None:
    study = optuna.create_study(storage=beating)
    with pytest.warns(UserWarning, match="Heartbeat"):
        lost = study.ask()
    x = lost.suggest_float("x", 0, 1)
    study_id = beating.get_study_id_from_name(study.study_name)
    lost_id = beating.get_trial_id_from_study_id_trial_number(study_id, lost.number)
    with mock.patch.object(beating, "_get_stale_trial_ids", side_effect=[[lost_id], []]):
        study.optimize(unit, n_trials=1, executor=fleet)
    assert states(study) == [FAIL, COMPLETE]
    assert study.trials[1].params == {"x": x}
    assert study.trials[1].system_attrs["failed_trial"] == 0


# -- studies --------------------------------------------------------------------------------------


def optimize_another(trial: Any) -> float:
    other = optuna.create_study(sampler=optuna.samplers.RandomSampler())
    other.enqueue_trial({"x": trial.suggest_float("start", 0, 1)})
    other.optimize(unit, n_trials=3)
    assert trial.study.study_name != other.study_name
    return other.trials[0].value


def test_another_study_may_be_optimized_in_an_objective(fleet: Any) -> None:
    study = optuna.create_study()
    study.optimize(optimize_another, n_trials=3, executor=fleet)
    assert states(study) == 3 * [COMPLETE]
    assert all(trial.value == trial.params["start"] for trial in study.trials)


def test_a_stop_is_over_with_its_call(fleet: Any) -> None:
    study = optuna.create_study()
    study.optimize(unit, callbacks=[lambda study, trial: study.stop()], executor=fleet)
    before = len(study.trials)
    study.optimize(unit, n_trials=5, executor=fleet)
    assert len(study.trials) == before + 5
    with pytest.raises(RuntimeError, match=r"`Study.stop`"):
        study.stop()


def test_a_study_can_be_pickled_before_after_and_in_a_callback(fleet: Any) -> None:
    study = optuna.create_study()
    pickled: list[bytes] = []

    def dump(study: optuna.Study, trial: FrozenTrial) -> None:
        pickled.append(pickle.dumps(study))

    for given in (dump, None):
        study = pickle.loads(pickle.dumps(study))
        study.optimize(unit, n_trials=2, callbacks=given and [given], executor=fleet)
    assert states(study) == 4 * [COMPLETE]
    copy = pickle.loads(pickled[-1])
    assert states(copy) == 2 * [COMPLETE]
    copy.optimize(unit, n_trials=1, executor=fleet)
    assert len(copy.trials) == 3
    assert len(study.trials) == 4


def test_an_executor_serves_one_call_at_a_time(fleet: Any) -> None:
    other = optuna.create_study()

    def meddle(study: optuna.Study, trial: FrozenTrial) -> None:
        other.optimize(unit, n_trials=1, executor=fleet)

    with pytest.raises(RuntimeError, match="already optimizing"):
        optuna.create_study().optimize(unit, n_trials=1, callbacks=[meddle], executor=fleet)
    assert not other.trials
    other.optimize(unit, n_trials=1, executor=fleet)
    assert states(other) == [COMPLETE]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_an_executor_starts_processes_of_its_own_in_a_fork(log: io.StringIO) -> None:
    study = optuna.create_study()
    with FleetExecutor(devices=1) as executor:
        study.optimize(unit, n_trials=1, executor=executor)
        fork = multiprocessing.get_context("fork").Process
        child = fork(target=executor.optimize, args=(study, unit, 1))
        child.start()
        child.join()
        assert child.exitcode == 0
        study.optimize(unit, n_trials=1, executor=executor)
    assert states(study) == 2 * [COMPLETE]
    assert "lost" not in log.getvalue()  # the agent of this process


def test_an_executor_is_not_closed_in_a_call(fleet: Any) -> None:
    study = optuna.create_study()
    with pytest.raises(RuntimeError, match=r"end that with `study.stop\(\)`"):
        study.optimize(unit, n_trials=1, callbacks=[lambda *_: fleet.close()], executor=fleet)
    assert states(study) == [COMPLETE]


def use_the_study(trial: Any, *, store: FileSystemArtifactStore, path: Path) -> float:
    study = trial.study
    assert isinstance(study, optuna.Study)
    assert isinstance(trial.storage, optuna.storages.BaseStorage)
    upload_artifact(artifact_store=store, file_path=str(path), study_or_trial=study)
    study.add_trial(optuna.create_trial(value=-1.0))
    assert study.best_trial.value == -1.0
    assert len(optuna.visualization.plot_optimization_history(study).data) > 0
    with pytest.raises(AttributeError, match="`sampler` can't be set in an objective"):
        study.sampler = optuna.samplers.RandomSampler()
    with pytest.raises(TrialError, match="a trial can't leave the driver"):
        study.ask()  # it would be a trial of a copy of the study
    for save in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TrialError, match="do so in a callback"):
            save(study)
    return 0.0


def test_the_study_in_an_objective_is_the_drivers(fleet: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = FileSystemArtifactStore(tmp_path)
    study = optuna.create_study()
    objective = functools.partial(use_the_study, store=store, path=tmp_path / "file")
    study.optimize(objective, n_trials=1, executor=fleet)
    assert states(study) == 2 * [COMPLETE]
    assert len(optuna.artifacts.get_all_artifact_meta(study)) == 1


def break_rules(trial: Any) -> float:
    """Optuna's own errors arrive where the rule is broken, with their types."""
    trial.suggest_float("x", 0, 1)
    with pytest.raises(ValueError, match="Cannot set different distribution kind"):
        trial.suggest_categorical("x", [1, 2])
    with pytest.raises(ValueError, match="low <= high"):
        trial.suggest_float("y", 1, 0)
    with pytest.raises(ValueError, match="negative"):
        trial.report(1.0, -1)
    with pytest.raises(TypeError):
        trial.report("high", 1)
    assert trial.relative_search_space is not None  # it is there once something was suggested
    with pytest.raises(AttributeError, match="no attribute 'no_such'"):
        trial.no_such  # noqa: B018
    trial.report(1.0, 3)
    trial.report(2.0, 3)
    return 0.0


def test_a_trial_objects_as_optunas_does(fleet: Any) -> None:
    study = optuna.create_study()
    with pytest.warns(UserWarning, match="`step=3` is already reported"):
        study.optimize(break_rules, n_trials=1, executor=fleet)
    assert study.trials[0].intermediate_values == {3: 1.0}
    assert study.trials[0].params.keys() == {"x"}
