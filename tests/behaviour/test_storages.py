"""Every storage holds the same records; one that is gone for a while is waited for."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import random
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from optuna_fleet import FleetExecutor, Limits, StorageLostError
from tests.behaviour.harness import Leg
from tests.nursery import Nursery
from tests.storage_servers import Postgres, Proxy
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

KINDS = ["sqlite", "journal", "grpc", "postgres"]
GRID = {"x": [0, 1, 2, 3], "kind": ["a", "b"]}


def storage_at(address: str) -> Any:
    """Of a URL, or of a journal's path."""
    if "://" in address:
        return optuna.storages.get_storage(address)
    backend = optuna.storages.journal.JournalFileBackend(address)
    return optuna.storages.JournalStorage(backend)


class Storages:
    """Makes storages of every kind, and makes them go away and come back."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self._folder, self._nursery = folder, nursery
        self._closers: list[Callable[[], Any]] = []
        self.leave: Callable[[], Any]
        self.come_back: Callable[[], Any]
        self.address = ""

    def new(self, kind: str) -> Any:
        return getattr(self, f"_new_{kind}")()

    def close(self) -> None:
        for close in reversed(self._closers):
            close()

    def _new_sqlite(self) -> Any:
        path = self._folder / "study.db"
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._closers.append(other.close)
        self.leave = functools.partial(other.execute, "begin exclusive")
        self.come_back = functools.partial(other.execute, "rollback")
        return self._database(f"sqlite:///{path}", connect_args={"timeout": 0.05})

    def _new_postgres(self) -> Any:
        server = Postgres()
        self._closers.append(server.close)
        self.leave, self.come_back = server.stop, server.start
        return self._database(server.new_database("study"))

    def _database(self, url: str, **engine: Any) -> Any:
        self.address = url
        storage = optuna.storages.RDBStorage(url, engine_kwargs=engine)
        self._closers.append(storage.engine.dispose)
        return storage

    def _new_journal(self) -> Any:
        folder = self._folder / "journal"
        folder.mkdir()
        self.leave = functools.partial(folder.rename, self._folder / "elsewhere")
        self.come_back = functools.partial((self._folder / "elsewhere").rename, folder)
        self.address = str(folder / "log")
        return storage_at(self.address)

    def _new_grpc(self) -> Any:
        proxy = Proxy(f"sqlite:///{self._folder}/behind.db", self._folder, self._nursery)
        storage = proxy.connect()
        self._closers += [proxy.stop, storage.close]
        self.leave, self.come_back = proxy.stop, proxy.start
        return storage


@pytest.fixture
def storages(tmp_path: Path, nursery: Nursery) -> Iterator[Storages]:
    made = Storages(tmp_path, nursery)
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


# -- two drivers ---------------------------------------------------------------------------------

DRIVER = """
import json, sys, optuna, warnings
from optuna_fleet import FleetExecutor
from tests.behaviour.test_storages import storage_at, whose

warnings.simplefilter("ignore")
study = optuna.load_study(study_name="shared", storage=storage_at(sys.argv[1]))
ended = []
note = lambda study, trial: ended.append(trial.number)
open(sys.argv[2]).close()  # once the other opens it too
with FleetExecutor(devices=2) as fleet:
    study.optimize(whose("second"), n_trials=5, callbacks=[note], executor=fleet)
print(json.dumps(ended))
"""


def whose(name: str) -> Callable[[Any], float]:
    def objective(trial: Any) -> float:
        trial.set_user_attr("by", [*trial.user_attrs.get("by", []), name])
        trial.report(trial.suggest_float("x", 0, 1), 0)
        return float(trial.params["x"])

    return objective


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_two_drivers_share_a_study(
    kind: str, storages: Storages, fleet: Any, nursery: Nursery, tmp_path: Path
) -> None:
    study = optuna.create_study(study_name="shared", storage=storages.new(kind))
    # On SQLite, also behind a proxy, Optuna itself may give an enqueued trial to both.
    enqueued = [0.0, 0.25, 0.5, 0.75] if kind == "journal" else []
    for x in enqueued:  # which both want
        study.enqueue_trial({"x": x})
    script, together, printed = (tmp_path / name for name in ("driver.py", "together", "printed"))
    script.write_text(DRIVER)
    os.mkfifo(together)
    ended: list[int] = []
    with printed.open("w") as out:
        argv = [str(script), storages.address, str(together)]
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

    then: Callable[[], Any]

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "storage is" in record.getMessage():
            self.lines.append(record.getMessage())
            if "is gone" in self.lines[-1]:
                self.then()


@pytest.fixture
def when_gone() -> Iterator[WhenGone]:
    handler = WhenGone()
    logging.getLogger("optuna").addHandler(handler)
    yield handler
    logging.getLogger("optuna").removeHandler(handler)


def after_trial(
    number: int, then: Callable[[], Any]
) -> Callable[[optuna.Study, FrozenTrial], None]:
    def callback(study: optuna.Study, trial: FrozenTrial) -> None:
        if trial.number == number:
            then()

    return callback


@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_that_comes_back_is_gone_on_with(
    kind: str, storages: Storages, fleet: Any, expected: Any, when_gone: WhenGone
) -> None:
    study = new_study(storages.new(kind))
    when_gone.then = storages.come_back
    leave = after_trial(2, storages.leave)
    fleet.optimize(study, objective, catch=ZeroDivisionError, callbacks=[leave])
    assert records(study) == expected
    begun, ended = when_gone.lines
    assert begun.startswith("The study's storage is gone: ")
    assert begun.endswith("Waiting for it, for at most 300 s.")
    assert ended.startswith("The study's storage is back after ")


def test_patience_has_an_end(storages: Storages) -> None:
    study = new_study(storages.new("journal"))
    leave = after_trial(2, storages.leave)
    with FleetExecutor(devices=2, limits=Limits(storage_patience_s=0.3)) as fleet:
        with pytest.raises(
            StorageLostError, match=r"0.3 s.*storage_patience_s.*FileNotFoundError"
        ):
            fleet.optimize(study, objective, catch=ZeroDivisionError, callbacks=[leave])
        storages.come_back()
        assert study.trials[2].state.is_finished()
        unfinished = [trial for trial in study.trials if not trial.state.is_finished()]
        assert all(trial.state is TrialState.RUNNING for trial in unfinished)
        other = optuna.create_study()
        fleet.optimize(other, lambda trial: trial.number, 4)  # the trainers are free
    assert len(other.trials) == 4


def test_ctrl_c_ends_the_waiting(storages: Storages, fleet: Any, when_gone: WhenGone) -> None:
    study = new_study(storages.new("sqlite"))
    when_gone.then = functools.partial(signal.raise_signal, signal.SIGINT)
    leave = after_trial(2, storages.leave)
    with pytest.raises(KeyboardInterrupt):
        fleet.optimize(study, objective, catch=ZeroDivisionError, callbacks=[leave])
    storages.come_back()


def test_ctrl_c_in_a_query_keeps_nobody_out(
    tmp_path: Path, fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, at_once = f"sqlite:///{tmp_path}/study.db", {"connect_args": {"timeout": 0}}
    storage = optuna.storages.RDBStorage(url, engine_kwargs=at_once)
    study = optuna.create_study(storage=storage)
    execute, armed = storage.engine.dialect.do_execute, list[bool]()

    def interrupted(*query: Any) -> None:
        execute(*query)
        if armed and armed.pop():
            raise KeyboardInterrupt

    monkeypatch.setattr(storage.engine.dialect, "do_execute", interrupted)
    interrupt = after_trial(1, lambda: armed.append(True))
    with pytest.raises(KeyboardInterrupt) as _kept:
        fleet.optimize(study, lambda trial: trial.number, 500, callbacks=[interrupt])
    assert len(study.trials) < 500
    assert all(trial.state.is_finished() for trial in study.trials)
    another = optuna.storages.RDBStorage(url, engine_kwargs=at_once)
    optuna.load_study(study_name=study.study_name, storage=another).set_user_attr("b", 2)
    for each in (storage, another):
        each.engine.dispose()


def test_what_no_waiting_helps_is_not_waited_for(
    tmp_path: Path, fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path}/study.db")
    study = optuna.create_study(storage=storage)

    def broken(*_: Any) -> None:
        raise sqlite3.OperationalError("no such table: trials")

    with monkeypatch.context() as patch:
        ends = after_trial(0, lambda: patch.setattr(storage.engine.dialect, "do_execute", broken))
        with pytest.raises(optuna.exceptions.StorageInternalError):
            fleet.optimize(study, lambda trial: 0.0, 9, callbacks=[ends])
    storage.engine.dispose()


class Flaky:
    """A storage whose calls fail at random, if armed, before they have gone through."""

    def __init__(self, storage: Any, seed: int) -> None:
        self._storage, self._random = storage, random.Random(seed)
        self.armed = False
        self.failures = 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._storage, name)
        if not callable(attribute) or name == "remove_session":
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.armed and self._random.random() < 0.1:
                self.failures += 1
                raise ConnectionResetError("nobody there")
            return attribute(*args, **kwargs)

        return call


def test_nothing_is_lost_or_done_twice(storages: Storages, fleet: Any) -> None:
    flaky = Flaky(storages.new("journal"), seed=1)
    study, plain = new_study(flaky), new_study(None)
    for each in (study, plain):
        each.enqueue_trial({"x": 3, "kind": "a"})
    plain.optimize(objective, catch=ZeroDivisionError)
    flaky.armed = True
    fleet.optimize(study, objective, catch=ZeroDivisionError)
    flaky.armed = False
    assert flaky.failures > 5
    assert records(study) == records(plain)


def test_a_trial_is_not_stale_to_the_driver_that_could_not_record_its_heartbeat(
    tmp_path: Path, fleet: Any
) -> None:
    storage = optuna.storages.RDBStorage(
        f"sqlite:///{tmp_path}/study.db", heartbeat_interval=1, grace_period=1
    )
    study = optuna.create_study(storage=storage)

    def waits(trial: Any) -> float:
        until(lambda: trial.number > 0 or len(trial.study.trials) == 3)
        return 0.0

    def is_old() -> bool:
        with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as beats:
            old = "heartbeat < datetime('now', '-2 seconds') and trial_id = 1"
            return beats.execute(f"select 1 from trial_heartbeats where {old}").fetchone() == (1,)

    def fall_silent() -> None:
        with mock.patch.object(storage, "record_heartbeat", side_effect=ConnectionResetError):
            until(is_old)

    fleet.script = {number: [Leg((int(number > 0),))] for number in range(3)}
    fleet.optimize(study, waits, 3, callbacks=[after_trial(1, fall_silent)])
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 3
    storage.engine.dispose()
