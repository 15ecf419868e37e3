"""The driver dies; the same command goes on where it stopped, and nobody else is disturbed."""

from __future__ import annotations

import functools
import io
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.storages import JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from optuna_fleet import FleetConfigError, FleetExecutor, LaunchError
from optuna_fleet.checkpoints.folder import CallRecord, StudyFolder
from optuna_fleet.executor.fleet.runtime import Runtime
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.objective_code import ObjectiveDigest
from optuna_fleet.sampler_bridge.ownership import TrialOwnership
from tests.executor.mortal_sweep import NUM_TRIALS
from tests.nursery import Nursery

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

COMPLETE, FAIL, RUNNING, WAITING = (
    TrialState.COMPLETE,
    TrialState.FAIL,
    TrialState.RUNNING,
    TrialState.WAITING,
)


# -- kill -9 -------------------------------------------------------------------------------------


def num_ticks(done: CompletedProcess[str]) -> int:
    assert done.returncode == 0, done.stderr
    assert "already reported" not in done.stderr
    return int(done.stdout.rpartition("TICKS ")[2])


def records(folder: Path) -> list[Any]:
    storage = JournalStorage(JournalFileBackend(str(folder / "journal")))
    return [
        (t.number, t.state, t.values, t.params, t.intermediate_values, t.user_attrs)
        for t in optuna.load_study(storage=storage, study_name="mortal").trials
    ]


def files(folder: Path) -> set[str]:
    (study,) = (path for path in (folder / "checkpoints").iterdir() if path.is_dir())
    return set(os.listdir(study))


@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    ("kind", "how"),
    [("plain", signal.SIGKILL), ("training", signal.SIGINT)],
    ids=["killed", "interrupted"],
)
def test_the_same_command_goes_on_after_its_driver_was_killed_twice(
    nursery: Nursery, tmp_path: Path, kind: str, how: signal.Signals
) -> None:
    def sweep(folder: Path, at: int) -> CompletedProcess[str]:
        folder.mkdir(exist_ok=True)
        arguments = (str(folder), kind, str(at), str(int(how)))
        return nursery.run("tests.executor.mortal_sweep", *arguments)

    undisturbed, folder, chance = tmp_path / "undisturbed", tmp_path / "dies", random.Random(kind)
    ticks = num_ticks(sweep(undisturbed, 0))
    want = records(undisturbed)
    assert len(want) == NUM_TRIALS
    for _ in range(2):
        at = chance.randint(1, (ticks - 10) // 2)  # the last ones are after the call's end
        died = sweep(folder, at)
        assert died.returncode == (-how if how is signal.SIGKILL else 1), (at, died.stderr)
    num_ticks(sweep(folder, 0))
    assert records(folder) == want, f"killed at write {at}"
    assert files(folder) == files(undisturbed)


# -- calls that died, without a process ----------------------------------------------------------


def objective(trial: Any) -> float:
    for step in range(2):
        trial.report(step, step)
    return float(trial.suggest_float("x", 0.0, 1.0))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def fleet(root: Path) -> Iterator[FleetExecutor]:
    with FleetExecutor(devices=1, device_type="cpu", checkpoints=root) as executor:
        yield executor


def asked(study: optuna.Study, claims: TrialOwnership) -> optuna.Trial:
    return compat.trial_of(study, compat.take_trial(study, claims.mark))


def dead_call(study: optuna.Study, root: Path, n_trials: int | None, launched: int) -> list[float]:
    """What a driver leaves that dies with its first trial done and the others under way."""
    claims = TrialOwnership(study, StudyFolder(root, study.study_name), n_trials, None)
    trials = [asked(study, claims) for _ in range(launched)]
    values = [trial.suggest_float("x", 0.0, 1.0) for trial in trials]
    for trial in trials:
        trial.report(0, 0)
    study.tell(trials[0], values[0])
    return values


def states(study: optuna.Study) -> list[TrialState]:
    return [trial.state for trial in study.trials]


def test_only_the_dead_drivers_trials_are_taken_over(fleet: Any, root: Path) -> None:
    study = optuna.create_study()
    study.ask()  # of a worker of plain Optuna
    other = TrialOwnership(study, StudyFolder(root / "other", study.study_name), 5, None)
    asked(study, other)  # of a driver with a folder of its own
    values = dead_call(study, root, 4, launched=3)
    study.optimize(objective, n_trials=4, executor=fleet)
    assert states(study) == [RUNNING, RUNNING, COMPLETE, COMPLETE, COMPLETE, COMPLETE]
    assert [trial.value for trial in study.trials[2:5]] == values
    assert study.trials[3].intermediate_values == {0: 0.0, 1: 1.0}
    study.optimize(objective, n_trials=1, executor=fleet)  # a call of its own
    assert len(study.trials) == 7


@pytest.mark.filterwarnings("ignore:The reported value is ignored")  # of the one given back
def test_another_budget_is_another_call_but_no_trial_is_lost(fleet: Any, root: Path) -> None:
    study = optuna.create_study()
    values = dead_call(study, root, 9, launched=3)
    study.optimize(objective, n_trials=1, executor=fleet)
    assert states(study) == [COMPLETE, COMPLETE, WAITING]
    budget: Any = {"n_trials": np.int64(3), "timeout": np.float32(1e6)}
    study.optimize(objective, **budget, executor=fleet)
    assert states(study) == [COMPLETE] * 5
    assert [trial.value for trial in study.trials[:3]] == values


def test_a_call_without_limit_goes_on_too(fleet: Any, root: Path) -> None:
    study = optuna.create_study()
    dead_call(study, root, None, launched=2)

    def stop(study: optuna.Study, trial: Any) -> None:
        study.stop()

    study.optimize(objective, callbacks=[stop], executor=fleet)
    assert states(study) == [COMPLETE, COMPLETE]


def fail(trial: Any) -> float:
    raise ValueError("bad")


def test_a_call_that_ended_is_not_gone_on_with(fleet: Any, root: Path) -> None:
    study = optuna.create_study()
    study.optimize(objective, n_trials=2, executor=fleet)
    study.optimize(objective, n_trials=2, executor=fleet)
    assert states(study) == [COMPLETE] * 4
    with pytest.raises(ValueError, match="bad"):
        study.optimize(fail, n_trials=2, executor=fleet)
    with pytest.raises(ValueError, match="bad"):
        study.optimize(fail, n_trials=2, executor=fleet)
    assert states(study)[4:] == [FAIL] * 2


def test_a_call_that_ends_because_the_fleet_failed_is_gone_on_with(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = optuna.create_study()
    heard = Runtime.heard

    def failing(runtime: Runtime, event: Any) -> Any:
        if COMPLETE in states(study) and any(trial.user_attrs for trial in study.trials):
            raise LaunchError("no trainer can be started any more")
        return heard(runtime, event)

    with FleetExecutor(devices=2, device_type="cpu", checkpoints=root) as fleet:
        monkeypatch.setattr(Runtime, "heard", failing)
        with pytest.raises(LaunchError, match="no trainer"):
            study.optimize(waiting, n_trials=4, executor=fleet)
        monkeypatch.undo()
        assert states(study)[:2] == [COMPLETE, RUNNING]
        study.optimize(objective, n_trials=4, executor=fleet)
    assert states(study) == [COMPLETE] * 4


def waiting(trial: Any) -> float:
    """Only the first trial returns."""
    if trial.number:
        trial.set_user_attr("flies", True)
        threading.Event().wait()
    return objective(trial)


def test_a_seeded_sampler_does_not_propose_twice(fleet: Any, root: Path) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    dead_call(study, root, 6, launched=3)
    again = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    study.sampler = again.sampler  # as the same command would make it
    study.optimize(objective, n_trials=6, executor=fleet)
    assert len({trial.params["x"] for trial in study.trials}) == 6


def test_a_queued_trial_keeps_its_parameters(fleet: Any, root: Path) -> None:
    study = optuna.create_study()
    study.enqueue_trial({"x": 0.25})
    claims = TrialOwnership(study, StudyFolder(root, study.study_name), 1, None)
    asked(study, claims)
    assert states(study) == [RUNNING]
    study.optimize(objective, n_trials=1, executor=fleet)
    assert [trial.value for trial in study.trials] == [0.25]


def refused(study: optuna.Study, root: Path) -> str:
    with (
        FleetExecutor(devices=1, device_type="cpu", checkpoints=root) as second,
        pytest.raises(FleetConfigError) as caught,
    ):
        study.optimize(objective, n_trials=1, executor=second)
    return str(caught.value)


def test_a_second_driver_on_the_same_folder_is_refused(fleet: Any, root: Path) -> None:
    study, other = optuna.create_study(), optuna.create_study()
    texts = []
    study.optimize(
        objective,
        n_trials=1,
        callbacks=[lambda *_: texts.append(refused(other, root))],
        executor=fleet,
    )
    assert f"in use by process {os.getpid()} on " in texts[0]
    assert "one of its own" in texts[0]
    assert other.trials == []
    other.optimize(objective, n_trials=1, executor=fleet)


def test_a_stale_heartbeat_does_not_make_a_second_trial(
    fleet: Any, root: Path, tmp_path: Path
) -> None:
    storage = RDBStorage(
        f"sqlite:///{tmp_path}/s.db",
        heartbeat_interval=60,
        heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
    )
    study = optuna.create_study(storage=storage)
    values = dead_call(study, root, 3, launched=2)
    storage.record_heartbeat(study.trials[1]._trial_id)
    with storage.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE trial_heartbeats SET heartbeat = '2001-01-01 00:00:00'")
    assert len(storage._get_stale_trial_ids(study._study_id)) == 1
    study.optimize(objective, n_trials=3, executor=fleet)
    assert states(study) == [COMPLETE] * 3
    assert study.trials[1].value == values[1]
    storage.remove_session()
    storage.engine.dispose()


def test_a_folder_that_can_not_be_used_is_refused(fleet: Any, root: Path) -> None:
    study = optuna.create_study()
    folder = StudyFolder(root, study.study_name)
    folder.path.touch()
    with pytest.raises(FleetConfigError, match="can't be"):
        study.optimize(objective, n_trials=1, executor=fleet)
    folder.path.unlink()
    folder.record_call(CallRecord(study="s", id="i", n_trials=1, timeout=None))
    (folder.path / "call.json").write_text("{")
    with pytest.raises(FleetConfigError, match="remove it to begin a new call"):
        study.optimize(objective, n_trials=1, executor=fleet)
    assert study.trials == []


# -- Ctrl-C ---------------------------------------------------------------------------------------


def pressing(trial: Any, *, flag: Path, driver: int) -> float:
    """Press Ctrl-C, and never return, while there is such a file."""
    if flag.exists():
        os.kill(driver, signal.SIGINT)
        threading.Event().wait()
    return objective(trial)


def changed(trial: Any) -> float:
    return objective(trial) + 1


@pytest.fixture
def interrupted(fleet: Any, tmp_path: Path, log: io.StringIO) -> Any:
    """A study in which Ctrl-C was pressed in the second trial, and its objective."""
    study, flag = optuna.create_study(), tmp_path / "flag"
    presses = functools.partial(pressing, flag=flag, driver=os.getpid())
    study.enqueue_trial({"x": 0.25})
    with pytest.raises(KeyboardInterrupt):
        study.optimize(presses, 3, callbacks=[lambda *_: flag.touch()], executor=fleet)
    assert states(study) == [COMPLETE, RUNNING]
    assert "Trials under way (1) stay RUNNING" in log.getvalue()
    flag.unlink()
    return study, presses


@pytest.mark.parametrize(
    ("given", "found", "words"),
    [
        ("the same", [COMPLETE] * 3, ""),
        ("another value", [COMPLETE] * 3, "is another one than when trials 1 began"),
        ("another code", [COMPLETE, FAIL, COMPLETE, COMPLETE, COMPLETE], ""),
    ],
)
def test_the_same_call_goes_on_after_an_interrupt_and_another_has_trials_of_its_own(
    fleet: Any, interrupted: Any, log: io.StringIO, given: str, found: Any, words: str
) -> None:
    """A value that is another one in each process, an id say, loses nothing."""
    study, presses = interrupted
    again = {"the same": presses, "another code": changed}
    study.optimize(again.get(given, functools.partial(presses, driver=-1)), 3, executor=fleet)
    assert states(study) == found
    assert words in log.getvalue()
    study.optimize(presses, 3, executor=fleet)
    assert states(study) == [*found, *[COMPLETE] * 3]


def test_an_interrupt_while_no_trial_is_under_way(fleet: Any, root: Path) -> None:
    study = optuna.create_study()
    folder, calls = StudyFolder(root, study.study_name), []

    def interrupt(study: optuna.Study, trial: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.optimize(objective, 3, callbacks=[interrupt], executor=fleet)
    calls.append(folder.last_call())
    look = [lambda *_: calls.append(folder.last_call())]
    study.optimize(objective, 3, callbacks=look, executor=fleet)
    assert states(study) == [COMPLETE] * 3
    # If its driver dies now, that is no interrupt.
    assert [call and call.was_interrupted for call in calls] == [True, False, False]


def test_a_changed_objective_goes_on_with_a_dead_drivers_trials_and_says_so(
    fleet: Any, root: Path, log: io.StringIO
) -> None:
    study = optuna.create_study()
    another = ObjectiveDigest(code="another's", whole="another's")
    claims = TrialOwnership(study, StudyFolder(root, study.study_name), 1, None, another)
    asked(study, claims)
    study.optimize(objective, 1, executor=fleet)
    assert states(study) == [COMPLETE]
    assert "is another one than when trials 0 began" in log.getvalue()
