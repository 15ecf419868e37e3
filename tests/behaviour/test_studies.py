"""A study that is optimized on a fleet holds what Optuna would have recorded."""

from __future__ import annotations

import copy
import functools
import io
import math
import multiprocessing
import os
import pickle
import re
import signal
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import optuna
import pytest
import torch
from optuna.artifacts import FileSystemArtifactStore, upload_artifact
from optuna.storages import InMemoryStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet import FleetConfigError, FleetExecutor, TrialError
from tests.behaviour.harness import Leg
from tests.waiting import until

COMPLETE, FAIL, PRUNED = TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED
RUNNING, WAITING = TrialState.RUNNING, TrialState.WAITING


def unit(trial: Any) -> float:
    return float(trial.suggest_float("x", 0, 1))


def states(study: optuna.Study) -> list[TrialState]:
    return [trial.state for trial in study.trials]


# -- what is recorded -----------------------------------------------------------------------------


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


def test_what_objectives_say_is_stored_exactly(fleet: Any, tmp_path: Path) -> None:
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db", study_name="everything")
    study.optimize(use_everything, n_trials=4, executor=fleet)
    assert states(study) == 4 * [COMPLETE]
    for trial in study.trials:
        x, n = trial.user_attrs["exact"]
        assert (trial.params["x"], trial.value) == (x, x + n)
        assert trial.intermediate_values == {0: 0.1 + 0.2}
        assert trial.datetime_start <= trial.datetime_complete


VALUES: list[tuple[Any, float | None, str]] = [
    (None, None, r"Trial 0 failed with parameters: {} because of .*: The value None"),
    (math.nan, None, r"Trial 1 failed with value nan\."),
    ("one", None, "Trial 2 failed"),
    ([1.0, 2.0], None, "did not match the number of the objectives 1"),
    ("0.5", None, r"Trial 4 failed with value '0\.5'\."),  # Optuna raises, and leaves it RUNNING
    (unit, None, "Trial 5 failed"),
    (math.inf, math.inf, ""),
    ([3.0], 3.0, ""),
    (True, 1.0, ""),
    (torch.tensor(1.5), 1.5, ""),
    (torch.tensor([2.5]), 2.5, ""),
    (np.float32(0.5), 0.5, ""),
    (np.array(3.0), 3.0, ""),
]


def return_by_number(trial: Any) -> Any:
    return VALUES[trial.number][0] if trial.number != 5 else lambda: 1.0  # which can't be sent


def test_values_that_are_no_values_fail_their_trials_with_a_line(
    fleet: Any, log: io.StringIO
) -> None:
    study = optuna.create_study()
    study.optimize(return_by_number, n_trials=len(VALUES), executor=fleet)
    assert [trial.value for trial in study.trials] == [value for _, value, _ in VALUES]
    assert states(study) == 6 * [FAIL] + 7 * [COMPLETE]
    for _, _, words in VALUES:
        assert re.search(words, log.getvalue()), words
    assert "in 0 rounds" not in log.getvalue()


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


def test_enqueued_trials_come_first_and_count_and_each_has_a_line(
    fleet: Any, log: io.StringIO
) -> None:
    study = optuna.create_study()
    study.enqueue_trial({"x": 1.0}, user_attrs={"mine": True})
    study.enqueue_trial({"x": 0.5})
    optuna.logging.set_verbosity(optuna.logging.INFO)
    study.optimize(unit, n_trials=3, executor=fleet)
    assert len(study.trials) == 3
    assert [trial.value for trial in study.trials[:2]] == [1.0, 0.5]
    assert study.trials[0].user_attrs == {"mine": True}
    for number in range(3):
        line = rf"Trial {number} finished with value: \S+ and parameters: {{'x': \S+}}\. Best is"
        assert re.search(line, log.getvalue())


def complete_prune_fail(trial: Any) -> float:
    x = trial.suggest_float("x", 0, 1)
    if trial.number == 1:
        trial.report(x, 3)
        raise optuna.TrialPruned("too slow")
    if trial.number == 2:
        raise ValueError("bad")
    return float(x)


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
    firsts, seconds = calls[::2], calls[1::2]
    assert sorted(firsts) == [("first", 0, COMPLETE), ("first", 1, PRUNED), ("first", 2, FAIL)]
    assert seconds == [("second", number, state) for _, number, state in firsts]
    assert all(trial.params for trial in study.trials)


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


def test_trials_of_others_are_not_touched(fleet: Any, tmp_path: Path) -> None:
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db")
    other = study.ask()
    study.optimize(unit, n_trials=2, executor=fleet)
    with pytest.raises(ZeroDivisionError):
        study.optimize(lambda trial: 1 / 0, n_trials=1, executor=fleet)
    assert states(study) == [RUNNING, COMPLETE, COMPLETE, FAIL]
    study.tell(other, 1.0)


# -- the call -------------------------------------------------------------------------------------


def outlast(trial: Any) -> float:
    began = trial.datetime_start
    until(lambda: (type(began).now() - began).total_seconds() > 1.5)
    return 0.0


def test_timeout_stops_starts_but_never_a_trial(fleet: Any) -> None:
    study = optuna.create_study()
    study.optimize(outlast, n_trials=100, timeout=1.0, executor=fleet)
    assert 1 <= len(study.trials) <= 4  # one wave
    assert set(states(study)) == {COMPLETE}


def test_a_fleet_that_starts_slower_than_the_timeout_runs_trials_all_the_same() -> None:
    """Optuna runs at least one trial at any timeout > 0; starting our processes takes longer."""
    study = optuna.create_study()
    with FleetExecutor(devices=1, device_type="cpu") as fresh:
        study.optimize(unit, timeout=0.2, executor=fresh)
    assert len(study.trials) >= 1


def test_without_executor_it_is_optunas_own_method(fleet: Any) -> None:
    study = optuna.create_study()
    here: list[int] = []
    study.optimize(lambda trial: here.append(trial.number) or 0.0, 2, executor=None)
    study.optimize(func=lambda trial: here.append(trial.number) or 0.0, n_trials=1)
    assert here == [0, 1, 2]
    with pytest.raises(TypeError):
        study.optimize(unit, n_trails=1)
    with pytest.raises(TypeError):
        study.optimize(unit, n_trails=1, executor=fleet)


def test_arguments_that_do_not_go_together(fleet: Any) -> None:
    study = optuna.create_study()
    with pytest.raises(FleetConfigError, match="`n_jobs` is 2"):
        study.optimize(unit, n_trials=1, n_jobs=2, executor=fleet)
    with pytest.raises(TypeError):  # as Optuna: eight arguments by position, not nine
        study.optimize(unit, 1, None, 1, (), None, False, False, "one more", executor=fleet)
    study.optimize(unit, 1, None, 1, (ValueError,), None, True, False, executor=fleet)
    assert states(study) == [COMPLETE]


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
    assert (len(copy.trials), len(study.trials)) == (3, 4)


def test_an_executor_serves_one_call_at_a_time_and_is_not_closed_in_it(fleet: Any) -> None:
    study, other = optuna.create_study(), optuna.create_study()

    def meddle(study: optuna.Study, trial: FrozenTrial) -> None:
        other.optimize(unit, n_trials=1, executor=fleet)

    with pytest.raises(RuntimeError, match="already optimizing"):
        study.optimize(unit, n_trials=1, callbacks=[meddle], executor=fleet)
    assert not other.trials
    with pytest.raises(RuntimeError, match=r"end that with `study.stop\(\)`"):
        study.optimize(unit, n_trials=1, callbacks=[lambda *_: fleet.close()], executor=fleet)
    other.optimize(unit, n_trials=1, executor=fleet)
    assert states(study) + states(other) == 3 * [COMPLETE]


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


# -- heartbeats -----------------------------------------------------------------------------------


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


def wait_for(trial: Any, *, file: Path) -> float:
    until(file.exists)
    return 0.0


def test_heartbeats_are_recorded_while_a_trial_runs(
    fleet: Any, beating: RDBStorage, tmp_path: Path
) -> None:
    study = optuna.create_study(storage=beating)
    record, beaten = RDBStorage.record_heartbeat, []

    def beat(storage: Any, trial_id: int) -> None:
        record(storage, trial_id)
        beaten.append(trial_id)
        if len(beaten) == 2:
            (tmp_path / "beaten").touch()

    objective = functools.partial(wait_for, file=tmp_path / "beaten")
    with mock.patch.object(RDBStorage, "record_heartbeat", beat):
        study.optimize(objective, n_trials=1, executor=fleet)
    assert len(set(beaten)) == 1
    assert states(study) == [COMPLETE]


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
    options = {"catch": (Exception,), "callbacks": [lambda _, trial: told.append(trial.number)]}
    with pytest.raises(KeyboardInterrupt):
        study.optimize(objective, n_trials=9, executor=fleet, **options)
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


# -- what an objective may do ---------------------------------------------------------------------


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
