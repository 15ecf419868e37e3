"""Every storage holds the same records; one that is gone for a while is waited for."""

from __future__ import annotations

import functools
import json
import logging
import os
import random
import signal
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from optuna_fleet import FleetConfigError, Limits, StorageLostError
from optuna_fleet.sampler_bridge import retrying_storage
from optuna_fleet.sampler_bridge.retrying_storage import (
    RetryingStorage,
    is_gone,
    retry_storage,
    stop_retrying,
)
from tests.executor.storage_servers import Postgres, Proxy
from tests.nursery import Nursery

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

KINDS = ["memory", "sqlite", "journal", "grpc", "postgres"]
GRID = {"x": [0, 1, 2, 3], "kind": ["a", "b"]}


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.close()


class Storages:
    """Makes storages of every kind, and makes them go away and come back."""

    def __init__(self, folder: Path, postgres: Callable[[], Postgres], nursery: Nursery) -> None:
        self._folder = folder
        self._postgres = postgres
        self._nursery = nursery
        self._closers: list[Callable[[], Any]] = []
        self.leave: Callable[[], Any]
        self.come_back: Callable[[], Any]
        self.address: list[str] = []

    def new(self, kind: str) -> Any:
        return getattr(self, f"_new_{kind}")()

    def close(self) -> None:
        for close in reversed(self._closers):
            close()

    def _new_memory(self) -> Any:
        return optuna.storages.InMemoryStorage()

    def _new_sqlite(self) -> Any:
        path = self._folder / "study.db"
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._closers.append(other.close)
        self.leave = functools.partial(other.execute, "begin exclusive")
        self.come_back = functools.partial(other.execute, "rollback")
        return self._database(f"sqlite:///{path}", connect_args={"timeout": 0.05})

    def _new_postgres(self) -> Any:
        server = self._postgres()
        self.leave, self.come_back = server.stop, server.start
        return self._database(server.new_database(self._folder.name.replace("-", "_").lower()))

    def _database(self, url: str, **engine: Any) -> Any:
        self.address = [url]
        storage = optuna.storages.RDBStorage(url, engine_kwargs=engine)
        self._closers.append(storage.engine.dispose)
        return storage

    def _new_journal(self) -> Any:
        folder = self._folder / "journal"
        folder.mkdir()
        self.leave = functools.partial(folder.rename, self._folder / "elsewhere")
        self.come_back = functools.partial((self._folder / "elsewhere").rename, folder)
        self.address = ["journal", str(folder / "log")]
        return optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(self.address[1])
        )

    def _new_grpc(self) -> Any:
        proxy = Proxy(f"sqlite:///{self._folder}/behind.db", self._folder, self._nursery)
        storage = proxy.connect()
        self._closers += [proxy.stop, storage.close]
        self.leave, self.come_back = proxy.stop, proxy.start
        self.address = ["grpc", str(proxy.port)]
        return storage


@pytest.fixture
def storages(
    tmp_path: Path, nursery: Nursery, request: pytest.FixtureRequest
) -> Iterator[Storages]:
    made = Storages(tmp_path, functools.partial(request.getfixturevalue, "postgres"), nursery)
    yield made
    made.close()


def objective(trial: Any) -> float:
    """Some are pruned, some fail; the grid's cell alone decides."""
    x = trial.suggest_int("x", 0, 3)
    kind = trial.suggest_categorical("kind", ["a", "b"])
    for step in range(3):
        trial.report(x + step, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    trial.set_user_attr("kind", [kind, x])
    trial.set_constraint("small", x - 2.5)
    if (x, kind) == (1, "b"):
        raise ZeroDivisionError
    return x / 2


def new_study(storage: Any) -> optuna.Study:
    return optuna.create_study(
        storage=storage,
        sampler=optuna.samplers.GridSampler(GRID, seed=4),
        pruner=optuna.pruners.ThresholdPruner(upper=4.5),
    )


def records(study: optuna.Study) -> list[tuple[Any, ...]]:
    return [
        (t.number, t.state, t.values, t.params, t.intermediate_values, t.user_attrs, t.constraints)
        for t in study.trials
    ]


@pytest.fixture(scope="module")
def expected() -> list[tuple[Any, ...]]:
    """What Optuna's own loop records."""
    study = new_study(None)
    study.optimize(objective, catch=ZeroDivisionError)
    found = records(study)
    assert {record[1].name for record in found} == {"COMPLETE", "PRUNED", "FAIL"}
    assert len(found) == 8
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_records_in_every_storage(
    kind: str, storages: Storages, fleet: Any, expected: Any
) -> None:
    study = new_study(storages.new(kind))
    fleet.optimize(study, objective, catch=ZeroDivisionError)
    assert records(study) == expected
    assert type(study._storage) is not RetryingStorage


# -- two drivers ---------------------------------------------------------------------------------

DRIVER = """
import json, sys, optuna, warnings
from optuna_fleet import FleetExecutor
from tests.executor.test_storages import storage_at, whose

warnings.simplefilter("ignore")
study = optuna.load_study(study_name="shared", storage=storage_at(json.loads(sys.argv[1])))
ended = []
note = lambda study, trial: ended.append(trial.number)
open(sys.argv[2]).close()  # once the other opens it too
with FleetExecutor(devices=2) as fleet:
    study.optimize(whose("second"), n_trials=5, callbacks=[note], executor=fleet)
print(json.dumps(ended))
"""


def storage_at(address: list[str]) -> Any:
    match address:
        case ["journal", path]:
            backend = optuna.storages.journal.JournalFileBackend(path)
            return optuna.storages.JournalStorage(backend)
        case ["grpc", port]:
            return optuna.storages.GrpcStorageProxy(host="localhost", port=int(port))
        case [url]:
            return optuna.storages.get_storage(url)
    raise AssertionError(address)


def whose(name: str) -> Callable[[Any], float]:
    def objective(trial: Any) -> float:
        trial.set_user_attr("by", [*trial.user_attrs.get("by", []), name])
        trial.report(trial.suggest_float("x", 0, 1), 0)
        return float(trial.params["x"])

    return objective


@pytest.mark.parametrize("kind", KINDS[1:])
def test_two_drivers_share_a_study(
    kind: str, storages: Storages, fleet: Any, nursery: Nursery, tmp_path: Path
) -> None:
    study = optuna.create_study(study_name="shared", storage=storages.new(kind))
    # On SQLite, also behind a proxy, Optuna itself may give an enqueued trial to both.
    enqueued = [0.0, 0.25, 0.5, 0.75] if kind in ("journal", "postgres") else []
    for x in enqueued:  # which both want
        study.enqueue_trial({"x": x})
    script, together, printed = (tmp_path / name for name in ("driver.py", "together", "printed"))
    script.write_text(DRIVER)
    os.mkfifo(together)
    ended: list[int] = []
    with printed.open("w") as out:
        argv = [str(script), json.dumps(storages.address), str(together)]
        second = nursery.start(argv, os.environ, out, out, tmp_path)
    together.open("w").close()
    fleet.optimize(study, whose("first"), 5, callbacks=[lambda s, t: ended.append(t.number)])
    assert second.wait() == 0, printed.read_text()
    theirs = json.loads(printed.read_text().splitlines()[-1])
    assert [trial.number for trial in study.trials] == list(range(10))
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    assert sorted(ended + theirs) == list(range(10))
    for trial in study.trials:
        assert trial.user_attrs["by"] == (["first"] if trial.number in ended else ["second"])
    assert [trial.params["x"] for trial in study.trials][: len(enqueued)] == enqueued


# -- a storage that is gone ----------------------------------------------------------------------


class WhenGone(logging.Handler):
    """Does something at the moment the driver says that it waits."""

    def __init__(self, then: Callable[[], Any]) -> None:
        super().__init__()
        self._then = then
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "storage is" in record.getMessage():
            self.lines.append(record.getMessage())
            if "is gone" in self.lines[-1]:
                self._then()


@pytest.fixture
def when_gone() -> Iterator[Callable[[Callable[[], Any]], WhenGone]]:
    handlers: list[WhenGone] = []

    def install(then: Callable[[], Any]) -> WhenGone:
        handlers.append(WhenGone(then))
        logging.getLogger("optuna").addHandler(handlers[-1])
        return handlers[-1]

    yield install
    for handler in handlers:
        logging.getLogger("optuna").removeHandler(handler)


def after_trial(
    number: int, then: Callable[[], Any]
) -> Callable[[optuna.Study, FrozenTrial], None]:
    def callback(study: optuna.Study, trial: FrozenTrial) -> None:
        if trial.number == number:
            then()

    return callback


@pytest.mark.parametrize(
    ("words", "gone"), [("database is locked", True), ("no such table: trials", False)]
)
def test_what_no_waiting_helps_is_not_waited_for(words: str, gone: bool) -> None:
    assert is_gone(OperationalError("select", None, Exception(words))) is gone


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_storage_that_comes_back_is_gone_on_with(
    kind: str, storages: Storages, fleet: Any, expected: Any, when_gone: Any
) -> None:
    study = new_study(storages.new(kind))
    heard = when_gone(storages.come_back)
    leave = after_trial(2, storages.leave)
    fleet.optimize(study, objective, catch=ZeroDivisionError, callbacks=[leave])
    assert records(study) == expected
    begun, ended = heard.lines
    assert begun.startswith("The study's storage is gone: ")
    assert begun.endswith("Waiting for it, for at most 300 s.")
    assert ended.startswith("The study's storage is back after ")


def test_a_connection_that_is_lost_while_trials_are_read_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optuna takes that for too long a query, and asks shorter ones on what is lost."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.db")
    study = optuna.create_study(storage=storage)
    study.add_trial(optuna.create_trial(value=1.0))
    dialect, lost = storage.engine.dialect, list[str]()
    execute = dialect.do_execute

    def lost_once(cursor: Any, statement: str, *rest: Any) -> None:
        if "FROM trial_params" in statement and not lost:
            lost.append(statement)
            raise sqlite3.OperationalError("server closed the connection unexpectedly")
        execute(cursor, statement, *rest)

    monkeypatch.setattr(dialect, "do_execute", lost_once)
    monkeypatch.setattr(dialect, "is_disconnect", lambda *_: True)
    patient: Any = RetryingStorage(storage, 60)
    assert [trial.value for trial in patient.get_all_trials(study._study_id)] == [1.0]
    assert lost
    storage.engine.dispose()


def test_a_proxy_that_was_started_anew_takes_parameters_of_trials_under_way(
    tmp_path: Path,
) -> None:
    """What Optuna's has before a database tells KeyError of trials that it has not read."""
    url = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(storage=url)
    trial, anew = study.ask(), optuna.storages.get_storage(url)
    patient: Any = RetryingStorage(anew, 60, study._study_id)
    distribution = optuna.distributions.FloatDistribution(0, 1)
    patient.set_trial_param(trial._trial_id, "x", 0.5, distribution)
    assert study.trials[0].params == {"x": 0.5}
    with pytest.raises(KeyError):
        patient.set_trial_param(trial._trial_id + 1, "x", 0.5, distribution)


def test_a_call_that_ends_leaves_patience_to_those_of_other_threads(storages: Storages) -> None:
    study = optuna.create_study(storage=storages.new("sqlite"))
    itself = study._storage
    for _ in range(2):
        retry_storage(study, 60)
    stop_retrying(study)
    assert type(study._storage) is RetryingStorage
    stop_retrying(study)
    assert study._storage is itself


def test_patience_has_an_end(
    storages: Storages, fleet: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    study = new_study(storages.new("journal"))
    options = replace(fleet._options, limits=Limits(storage_patience_s=0.3))
    monkeypatch.setattr(fleet, "_options", options)
    leave = after_trial(2, storages.leave)
    with pytest.raises(StorageLostError, match=r"0.3 s.*storage_patience_s.*FileNotFoundError"):
        fleet.optimize(study, objective, catch=ZeroDivisionError, callbacks=[leave])
    storages.come_back()
    assert study.trials[2].state.is_finished()
    unfinished = [trial for trial in study.trials if not trial.state.is_finished()]
    assert all(trial.state is TrialState.RUNNING for trial in unfinished)
    other = optuna.create_study()
    fleet.optimize(other, lambda trial: trial.number, 4)  # the trainers are free
    assert len(other.trials) == 4


def test_ctrl_c_ends_the_waiting(storages: Storages, fleet: Any, when_gone: Any) -> None:
    study = new_study(storages.new("sqlite"))
    when_gone(lambda: signal.raise_signal(signal.SIGINT))
    leave = after_trial(2, storages.leave)
    with pytest.raises(KeyboardInterrupt):
        fleet.optimize(study, objective, catch=ZeroDivisionError, callbacks=[leave])
    storages.come_back()


class Interrupted:
    """A storage in which Ctrl-C strikes when a transaction has written and not yet ended."""

    def __init__(self, storage: optuna.storages.RDBStorage) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def set_study_user_attr(self, *_: Any) -> None:
        self._storage.scoped_session().execute(text("UPDATE studies SET study_name = 'x'"))
        raise KeyboardInterrupt


def test_ctrl_c_in_a_transaction_does_not_keep_others_out(tmp_path: Path) -> None:
    path = f"sqlite:///{tmp_path}/study.db"
    at_once = {"connect_args": {"timeout": 0}}
    storage = optuna.storages.RDBStorage(path, engine_kwargs=at_once)
    study = optuna.create_study(storage=storage)
    patient: Any = RetryingStorage(Interrupted(storage), 60)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        patient.set_study_user_attr(study._study_id, "a", 1)
    another = optuna.storages.RDBStorage(path, engine_kwargs=at_once)
    another.set_study_user_attr(study._study_id, "b", 2)  # or "database is locked"
    assert study.user_attrs == {"b": 2}


def test_ctrl_c_in_a_query_does_not_keep_us_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = {"connect_args": {"timeout": 0}}
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.db", engine_kwargs=at_once)
    study, _ = optuna.create_study(storage=storage), optuna.create_study(storage=storage)
    execute = storage.engine.dialect.do_execute

    def interrupted(*query: Any) -> None:
        execute(*query)
        raise KeyboardInterrupt

    patient: Any = RetryingStorage(storage, 60)
    with monkeypatch.context() as patch:
        patch.setattr(storage.engine.dialect, "do_execute", interrupted)
        with pytest.raises(KeyboardInterrupt) as _kept:
            patient.get_all_studies()
    study.set_user_attr("b", 2)  # or "database is locked"
    assert study.user_attrs == {"b": 2}


def test_an_error_of_the_call_itself_is_not_waited_for(storages: Storages, fleet: Any) -> None:
    study = new_study(storages.new("sqlite"))

    def bad(trial: Any) -> float:
        trial.set_user_attr("x", object())  # not JSON
        return 0.0

    with pytest.raises(TypeError, match="JSON"):
        fleet.optimize(study, bad, 1)


def test_patience_must_be_a_number() -> None:
    with pytest.raises(FleetConfigError, match="`storage_patience_s` is -1, but must be"):
        Limits(storage_patience_s=-1)


# -- whatever went through unheard is not done again ---------------------------------------------


class Unheard:
    """A storage whose calls fail at random, half of them after they have gone through."""

    def __init__(self, storage: Any, seed: int, rate: float = 0.5) -> None:
        self._storage, self._random, self._rate = storage, random.Random(seed), rate
        self.failures = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._storage, name)
        if not callable(attribute) or name == "remove_session":
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            failing = self._random.random() < self._rate
            if failing and self._random.random() < 0.5:
                self.fail()
            result = attribute(*args, **kwargs)
            return self.fail() if failing else result

        return call

    def fail(self) -> None:
        self.failures += 1
        raise ConnectionResetError("the answer was lost")


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_nothing_is_lost_or_done_twice(
    kind: str, storages: Storages, fleet: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying_storage, "_FIRST_PAUSE_S", 1e-4)
    monkeypatch.setattr(retrying_storage, "_LONGEST_PAUSE_S", 1e-4)
    study = new_study(storages.new(kind))
    queue = {"x": 3, "kind": "a"}, {"x": 0, "kind": "b"}
    plain = new_study(None)
    for params in queue:
        study.enqueue_trial(params)
        plain.enqueue_trial(params)
    plain.optimize(objective, catch=ZeroDivisionError)
    unheard = Unheard(study._storage, seed=1)
    study._storage = unheard  # type: ignore[assignment]
    fleet.optimize(study, objective, catch=ZeroDivisionError)
    study._storage = unheard._storage
    assert unheard.failures > 50
    assert records(study) == records(plain)


def test_a_call_that_always_fails_has_an_end_though_others_succeed(storages: Storages) -> None:
    storage = optuna.create_study(storage=storages.new("sqlite"))._storage
    patient: Any = RetryingStorage(Unheard(storage, seed=0, rate=0.0), 0.3)  # type: ignore[arg-type]
    study_id = storage.get_all_studies()[0]._study_id

    def fail(*args: Any) -> None:
        patient.get_all_trials(study_id)
        raise ConnectionResetError("always")

    storage.set_study_user_attr = fail  # type: ignore[method-assign]
    with pytest.raises(StorageLostError, match=r"gone for 0.3 s.*always"):
        patient.set_study_user_attr(study_id, "x", 1)
    with pytest.raises(StorageLostError, match=r"gone for 0.3 s.*always"):  # and so it stays
        patient.get_all_trials(study_id)


def test_a_trial_is_returned_once(storages: Storages) -> None:
    """Unheard, it is in the queue, from where another process takes it before it is retried."""
    storage = optuna.create_study(storage=storages.new("sqlite"))._storage
    study_id = storage.get_all_studies()[0]._study_id
    trial_id = storage.create_new_trial(study_id)

    class TakenByAnother(Unheard):
        def fail(self) -> None:
            if not self.failures:
                storage.set_trial_state_values(trial_id, TrialState.RUNNING)
            super().fail()

    class Once(random.Random):
        def random(self) -> float:
            return next(draws, 1.0)

    draws = iter([1.0, 0.0, 1.0])  # the second call fails, after it has gone through
    unheard = TakenByAnother(storage, seed=0)
    unheard._random = Once()
    RetryingStorage(unheard, 60).set_trial_state_values(trial_id, TrialState.WAITING)  # type: ignore[arg-type]
    assert unheard.failures == 1
    assert storage.get_trial(trial_id).state is TrialState.RUNNING


def test_a_trial_whose_heartbeat_was_not_recorded_is_not_stale_to_its_own_driver(
    tmp_path: Path,
) -> None:
    storage = optuna.storages.RDBStorage(
        f"sqlite:///{tmp_path}/study.db", heartbeat_interval=60, grace_period=60
    )
    study = optuna.create_study(storage=storage)
    mine, other = (storage.create_new_trial(study._study_id) for _ in range(2))
    patient: Any = RetryingStorage(study._storage, 60)
    patient.record_heartbeat(mine)
    storage.record_heartbeat(other)
    with sqlite3.connect(tmp_path / "study.db") as connection:
        connection.execute("update trial_heartbeats set heartbeat = '2000-01-01 00:00:00'")
    connection.close()
    assert sorted(storage._get_stale_trial_ids(study._study_id)) == [mine, other]
    assert patient._get_stale_trial_ids(study._study_id) == [other]
    patient.set_trial_state_values(mine, TrialState.FAIL)
    assert patient._get_stale_trial_ids(study._study_id) == [other]
    storage.engine.dispose()
