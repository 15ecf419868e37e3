"""G1 where an executor breaks it most easily: interrupts, queues, other studies."""

from __future__ import annotations

import copy
import functools
import io
import multiprocessing
import os
import pickle
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
import pytest
from optuna.artifacts import FileSystemArtifactStore, download_artifact, upload_artifact
from optuna.storages import InMemoryStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet import FleetExecutor, TrialError
from optuna_fleet.executor.fleet.runtime import Runtime
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.sampler_bridge.loop import Loop
from optuna_fleet.sampler_bridge.records import flights_of
from tests.fleets import Leg
from tests.waiting import until

COMPLETE, FAIL, RUNNING, WAITING = (
    TrialState.COMPLETE,
    TrialState.FAIL,
    TrialState.RUNNING,
    TrialState.WAITING,
)


def states(study: optuna.Study) -> list[TrialState]:
    return [trial.state for trial in study.trials]


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
    flown = [flight for flights in flights_of(study).values() for flight in flights]
    assert sorted(flight["devices"] for flight in flown) == [[0], [1], [2], [3]]
    assert {flight["ending"] for flight in flown} == {"aborted"}
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


@pytest.mark.parametrize(
    ("owner", "method", "left"), [(Ledger, "abandon", RUNNING), (Runtime, "reset", FAIL)]
)
def test_a_second_control_c_leaves_at_once(owner: type, method: str, left: TrialState) -> None:
    objective = functools.partial(interrupt_driver, driver=os.getpid(), num_trials=2)
    study, after = optuna.create_study(), optuna.create_study()
    with FleetExecutor(devices=2) as executor:
        with (
            mock.patch.object(owner, method, side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            study.optimize(objective, n_trials=2, executor=executor)
        after.optimize(unit, n_trials=4, executor=executor)  # no device is still busy with that
    assert states(study) == 2 * [left]
    assert states(after) == 4 * [COMPLETE]


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


# -- heartbeats -----------------------------------------------------------------------------------


def test_a_trial_in_the_queue_has_a_heartbeat_from_the_moment_of_asking(
    beating: RDBStorage,
) -> None:
    study = optuna.create_study(storage=beating)
    with (
        mock.patch.object(
            beating, "record_heartbeat", side_effect=beating.record_heartbeat
        ) as record,
        Loop(
            study,
            n_trials=1,
            timeout=None,
            catch=(),
            callbacks=None,
            gc_after_trial=False,
            show_progress_bar=False,
        ) as loop,
    ):
        number = loop.proposals.ask()
        assert number is not None
        until(lambda: record.call_count >= 2)
        loop.proposals.return_to_queue(number)
        recorded = record.call_count
    assert {call.args[0] for call in record.call_args_list} == {study.trials[0]._trial_id}
    assert record.call_count == recorded


def test_a_stale_trial_is_tried_again(fleet: Any, beating: RDBStorage) -> None:
    study = optuna.create_study(storage=beating)
    with pytest.warns(UserWarning, match="Heartbeat"):
        lost = study.ask()
    x = lost.suggest_float("x", 0, 1)
    with mock.patch.object(beating, "_get_stale_trial_ids", side_effect=[[lost._trial_id], []]):
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


def test_sessions_of_the_storage_are_closed(
    fleet: Any, beating: RDBStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "optuna_fleet.executor.call.call_handler._SLOW_S", float("inf")
    )  # no second session
    study = optuna.create_study(storage=beating)
    storage = study._storage
    with mock.patch.object(storage, "remove_session", wraps=storage.remove_session) as remove:
        study.optimize(unit, n_trials=2, executor=fleet)
        assert remove.call_count == 1
        with pytest.raises(ZeroDivisionError):
            study.optimize(lambda trial: 1 / 0, n_trials=1, executor=fleet)
        assert remove.call_count == 2


def test_a_slow_sampler_on_a_database_that_only_its_thread_sees(
    fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optuna_fleet.executor.call.call_handler._SLOW_S", 0.0)
    study = optuna.create_study(storage="sqlite:///:memory:")
    study.optimize(unit, n_trials=6, executor=fleet)
    assert states(study) == 6 * [COMPLETE]


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


# -- trials ---------------------------------------------------------------------------------------


def upload(trial: Any, *, store: FileSystemArtifactStore, folder: Path) -> float:
    path = folder / f"{trial.number}.txt"
    path.write_text(f"model {trial.number}")
    artifact = upload_artifact(artifact_store=store, file_path=str(path), study_or_trial=trial)
    trial.set_user_attr("artifact", artifact)
    return 0.0


def test_artifacts_of_trials(fleet: Any, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = FileSystemArtifactStore(tmp_path / "store")
    study = optuna.create_study()
    study.optimize(
        functools.partial(upload, store=store, folder=tmp_path), n_trials=3, executor=fleet
    )
    for trial in study.trials:
        (meta,) = optuna.artifacts.get_all_artifact_meta(trial, storage=study._storage)
        assert meta.artifact_id == trial.user_attrs["artifact"]
        path = tmp_path / "downloaded"
        download_artifact(artifact_store=store, artifact_id=meta.artifact_id, file_path=str(path))
        assert path.read_text() == f"model {trial.number}"
        path.unlink()


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
