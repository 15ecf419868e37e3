"""`optuna-fleet top`: what it says of made-up studies."""

from __future__ import annotations

import contextlib
import math
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from optuna_fleet.cli import main
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.records import (
    DEVICES_KEY,
    FLIGHTS_KEY,
    CallState,
    RunState,
    record_call,
)
from optuna_fleet.visualization.top import Snapshot, duration, expected_end, ranges

START = 1.7e9


def add_trial(
    study: Any, state: TrialState, value: float | None = None, *, began: float = 0.0, **more: Any
) -> int:
    trial = optuna.create_trial(
        state=state,
        value=value,
        params={"lr": 0.1},
        distributions={"lr": FloatDistribution(0, 1)},
        **more,
    )
    trial.datetime_start = datetime.fromtimestamp(START + began)
    study.add_trial(trial)
    return len(study.trials) - 1


def add_flight(study: Any, trial: int, devices: list[int], start: float, end: float) -> None:
    flight = {"trial": trial, "devices": devices, "start": START + start, "end": START + end}
    others = {"round": 1, "ending": "returned", "probing_s": 0, "profiling_s": 0, "data_wait_s": 0}
    key = FLIGHTS_KEY.format(began=START, index=f"{trial}.{start}")
    compat.set_study_record(study, key, [{**flight, **others}])


def add_devices(study: Any, *nodes: str, began: float = 0.0) -> None:
    """One device for each."""
    spans = [
        {"device": n, "node": node, "kind": "a100", "start": START + began, "end": None}
        for n, node in enumerate(nodes)
    ]
    compat.set_study_record(study, DEVICES_KEY.format(began=START + began, index=0), spans)


def note(study: Any, noted: float, *runs: RunState, began: float = 0.0, **more: Any) -> None:
    state = CallState(
        began=START + began, noted=START + noted, every_s=2.0, runs=tuple(runs), **more
    )
    record_call(study, state)


def fill(study: Any) -> None:
    """Two done, one pruned, two on three of four devices, one waits; eight to come."""
    for value, devices, start, end in [(0.5, [0], 0, 20), (0.75, [0, 1], 20, 30)]:
        number = add_trial(study, TrialState.COMPLETE, value)
        add_flight(study, number, devices, start, end)
    add_flight(study, add_trial(study, TrialState.PRUNED, 0.1), [2], 0, 5)
    reports = {0: 0.25, 1: 0.5}
    running = add_trial(study, TrialState.RUNNING, intermediate_values=reports)
    add_trial(study, TrialState.RUNNING)
    add_trial(study, TrialState.RUNNING)
    add_devices(study, "n1", "n1", "n1", "n2")
    wide = RunState(
        trial=running,
        devices=(0, 1),
        start=START + 30,
        epochs_done=2,
        max_epochs=4,
        epoch_s=5.0,
        samples_per_s=12345.6,
    )
    plain = RunState(trial=running + 1, devices=(3,), start=START + 35)
    note(study, 39, wide, plain, n_trials=14, num_asked=6, waiting=(running + 2,))


@pytest.fixture
def study() -> optuna.Study:
    study = optuna.create_study(study_name="sweep", direction="maximize")
    fill(study)
    return study


def at(study: optuna.Study, seconds: float) -> Any:
    return Snapshot(study, START + seconds)


# -- what is read ---------------------------------------------------------------------------------


def facts_of(snapshot: Snapshot) -> dict[str, str]:
    lines = [re.split("  +", line, maxsplit=1) for line in snapshot.lines()]
    return dict(line for line in lines[: lines.index([""])] if len(line) == 2)


def test_it_says_who_is_where_and_who_waits(study: optuna.Study) -> None:
    snapshot = at(study, 40)
    facts = facts_of(snapshot)
    assert facts.pop("expected end").startswith("in about ")
    assert facts == {
        "sweep": "running for 40 s",
        "trials": "3 running, 2 complete, 1 pruned, 8 to come",
        "best": "trial 1: 0.75 with lr=0.1",
        "devices": "4 (a100), 1 idle: n1 2",
        "waiting for devices": "5",
    }
    rows = [re.split("  +", line) for line in snapshot.lines()]
    flying, ended = rows.index(["On devices:"]), rows.index(["Ended last:"])
    assert rows[flying + 1 : ended - 1] == [
        ["trial", "devices", "for", "epoch", "samples/s", "last value", "parameters"],
        ["3", "n1 0-1", "10 s", "2 of 4", "12,346", "0.5", "lr=0.1"],
        ["4", "n2 3", "5.0 s", "0", "-", "-", "lr=0.1"],
    ]
    assert [row[:4] for row in rows[ended + 2 : ended + 5]] == [
        ["2", "pruned", "0.1", "1"],
        ["1", "complete", "0.75", "2"],
        ["0", "complete", "0.5", "1"],
    ]


def test_a_trial_that_has_ended_since_the_driver_wrote_is_on_no_device() -> None:
    study = optuna.create_study()
    add_trial(study, TrialState.COMPLETE, 1.0)
    add_devices(study, "n")
    note(study, 1, RunState(trial=0, devices=(0,), start=START), n_trials=1, num_asked=1)
    assert at(study, 2).runs == []
    assert "1 idle" in facts_of(at(study, 2))["devices"]


def test_a_driver_without_signs_of_life_is_told_of(study: optuna.Study) -> None:
    snapshot = at(study, 100)
    assert [snapshot.for_s(run) for run in snapshot.runs] == [9, 4]  # as it was then
    facts = facts_of(snapshot)
    assert "no sign of life from its driver for 1 min 1 s" in facts["sweep"]
    assert "expected end" not in facts


@pytest.mark.parametrize("ending", ["done", "interrupted", "failed"])
def test_a_call_that_has_ended_has_no_devices(ending: str, study: optuna.Study) -> None:
    note(study, 50, ending=ending, n_trials=14, num_asked=6)
    facts = facts_of(at(study, 1000))
    assert {"failed": "with an error"}.get(ending, ending) in facts["sweep"]
    assert not {"devices", "expected end"} & facts.keys()
    assert facts["running elsewhere, or left"] == "3-5"  # nobody has told them as ended


def test_a_later_call_takes_the_place_of_another(study: optuna.Study) -> None:
    add_devices(study, "n9", began=200)
    run = RunState(trial=3, devices=(0,), start=START + 201)
    note(study, 202, run, began=200, n_trials=14, num_asked=6)
    snapshot = at(study, 203)
    assert {device.node for device in snapshot.devices.values()} == {"n9"}
    assert [run.trial for run in snapshot.runs] == [3]
    assert facts_of(snapshot)["running elsewhere, or left"] == "4-5"
    note(study, 235, began=0)  # the first is alive after all, and the second is not
    assert at(study, 240).runs == []
    assert at(study, 240).call.began == START


def test_any_study_can_be_looked_at() -> None:
    study = optuna.create_study(study_name="a\x1b[31m\nb", directions=["minimize"] * 2)
    assert at(study, 0).lines()[0] == "a\ufffd[31m\ufffdb  no trials yet"
    assert "best" not in facts_of(at(study, 0))
    study.optimize(lambda trial: (0.0, trial.suggest_float("x", 0, 1)), n_trials=1)
    trial = study.ask()
    snapshot = at(study, 0)
    assert "ran on a fleet" in snapshot.lines()[0]
    assert snapshot.elsewhere == {trial.number}
    assert facts_of(snapshot)["trials"] == "1 running, 1 complete"
    assert facts_of(snapshot)["best"] == "trials 0"


def test_a_record_that_can_not_be_written_harms_nobody(tmp_path: Path) -> None:
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db")
    state = CallState(began=0.0, noted=0.0, every_s=1.0)
    compat.storage_of(study)._backend.engine.dispose()
    (tmp_path / "study.db").write_bytes(b"no database any more" * 500)
    record_call(study, state)


@pytest.mark.parametrize(
    ("under_way", "ended", "more", "end"),
    [
        ([], [10, 30], {"num_to_come": 4}, 100 + 4 * 20 / 2),  # like those that have ended
        ([(5, math.inf, 2)], [10, 30], {}, 100 + 15 / 2),
        ([(5, math.inf, 1)], [10, 30], {}, 100 + 15),  # the other device has nothing to do
        ([(50, math.inf, 1)], [10, 30], {}, 100),
        ([(50, 8, 1)], [10, 30], {}, 108),
        ([(10, 10, 1)], [], {"num_to_come": 2}, 100 + (10 + 2 * 20) / 2),  # its epochs tell
        ([(10, 10, 1)], [1000], {}, 110),  # nobody takes longer than his epochs
        ([(5, math.inf, 1)], [], {"num_to_come": 3}, None),
        ([(0, math.inf, 1)], [10], {"num_to_come": None}, None),
        ([(0, math.inf, 1)], [10], {"num_to_come": None, "deadline": 130}, 130),
        ([(0, math.inf, 1)], [10], {"num_to_come": None, "deadline": 50}, 110),
        ([(0, math.inf, 1)], [10], {"num_to_come": 1, "deadline": 900}, 110),
        ([], [1], {"num_devices": 0}, None),
    ],
)
def test_when_a_sweep_will_end(under_way: Any, ended: Any, more: Any, end: float | None) -> None:
    given = {"num_to_come": 0, "num_devices": 2, **more}
    assert expected_end(100.0, ended=ended, under_way=under_way, **given) == end


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (duration(0), "0.0 s"),
        (duration(59), "59 s"),
        (duration(61), "1 min 1 s"),
        (duration(7260), "2 h 1 min"),
        (duration(1e6), "11 d 13 h"),
        (ranges([5, 1, 2, 3, 7, 8]), "1-3, 5, 7-8"),
    ],
)
def test_texts_are_short(text: str, expected: str) -> None:
    assert text == expected


# -- the command ----------------------------------------------------------------------------------


def filled(url: str) -> str:
    storage: Any = url if "://" in url else JournalStorage(JournalFileBackend(url))
    fill(optuna.create_study(study_name="sweep", storage=storage, direction="maximize"))
    return url


def test_it_reads_what_any_storage_has_and_writes_nothing(tmp_path: Path, capsys: Any) -> None:
    os.chdir(tmp_path)
    storages = [filled("sqlite:///study.db"), filled("journal")]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for where in storages:
        assert main(["top", "--storage", where, "--once"]) == 0
        shown = capsys.readouterr().out
        assert "2 complete" in shown
        assert "no sign of life" in shown
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_it_is_shown_anew_in_a_terminal_until_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And while the storage is gone. It needs no torch."""
    monkeypatch.setenv("TERM", "xterm")
    ours, its = pty.openpty()
    where = filled(f"sqlite:///{tmp_path}/study.db")
    code = (
        "import sys; sys.modules.update(torch=None, plotly=None); "
        "from optuna_fleet.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "top", "--interval", "0.1", "--storage", where]
    with subprocess.Popen(command, stdout=its, stderr=subprocess.PIPE) as process:
        try:
            os.close(its)
            shown = b""
            while shown.count(b"no sign of life") < 2:
                shown += os.read(ours, 4096)
            (tmp_path / "study.db").write_bytes(b"")
            while b"can't be read" not in shown.rpartition(b"no sign of life")[0]:
                shown += os.read(ours, 4096)
            process.send_signal(signal.SIGINT)
            threading.Thread(target=drain, args=(ours,), daemon=True).start()
            _, errors = process.communicate()
        finally:
            process.kill()
    assert (process.returncode, errors) == (-signal.SIGINT, b"")


def drain(terminal: int) -> None:
    """Read what is left, which it waits for."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 4096):
            pass


@pytest.mark.parametrize(
    ("name", "where", "said"),
    [
        ("sweep", "sqlite:///nowhere.db", "There is no file nowhere.db"),
        ("sweep", "nowhere", "There is no file nowhere"),
        ("sweep", "sqlite://", "There is no file"),
        ("other", "sqlite:///study.db", "there is no study 'other'; it has 'sweep'"),
        ("sweep", "sqlite:///other.db", "can't be read (OperationalError"),
        ("sweep", "nonsense://x:secret@y/z", "nonsense://x@y/z can't be read"),
    ],
)
def test_wrong_storages_are_told_of(
    name: str, where: str, said: str, tmp_path: Path, capsys: Any
) -> None:
    os.chdir(tmp_path)
    filled("sqlite:///study.db")
    sqlite3.connect("other.db").execute("create table t (x)")
    files = set(tmp_path.iterdir())
    assert main(["top", name, "--storage", where, "--once"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "secret" not in error
    assert set(tmp_path.iterdir()) == files
