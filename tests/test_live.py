"""`optuna-fleet top`: what it says of made-up studies."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from rich.console import Console

from optuna_fleet.cli import main
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.records import (
    DEVICES_KEY,
    FLIGHTS_KEY,
    CallState,
    RunState,
    record_call,
)
from optuna_fleet.visualization.snapshot import Condition, Snapshot, expected_end
from optuna_fleet.visualization.top import until_interrupt
from optuna_fleet.visualization.view import duration, printable, ranges, rendered

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


def test_it_sees_who_is_where_and_who_waits(study: optuna.Study) -> None:
    snapshot = at(study, 40)
    assert snapshot.condition is Condition.RUNNING
    places = {run.state.trial: [(d.node, d.device) for d in run.devices] for run in snapshot.runs}
    assert places == {3: [("n1", 0), ("n1", 1)], 4: [("n2", 3)]}
    assert [device.device for device in snapshot.idle] == [2]
    wide, plain = snapshot.runs
    assert (wide.for_s, wide.left_s, wide.value) == (10, 10, 0.5)
    assert (plain.for_s, plain.left_s, plain.value) == (5, math.inf, None)
    assert (snapshot.waiting, snapshot.elsewhere, snapshot.num_to_come) == ({5}, set(), 8)
    assert [trial.number for trial in snapshot.best] == [1]
    assert [(trial.number, snapshot.widths(trial.number)) for trial in snapshot.recent] == [
        (2, [1]),
        (1, [2]),
        (0, [1]),
    ]


def test_a_trial_that_has_ended_since_the_driver_wrote_is_on_no_device() -> None:
    study = optuna.create_study()
    add_trial(study, TrialState.COMPLETE, 1.0)
    add_devices(study, "n")
    note(study, 1, RunState(trial=0, devices=(0,), start=START), n_trials=1, num_asked=1)
    snapshot = at(study, 2)
    assert snapshot.runs == []
    assert len(snapshot.idle) == 1


def test_a_driver_without_signs_of_life_is_told_of(study: optuna.Study) -> None:
    snapshot = at(study, 100)
    assert snapshot.condition is Condition.SILENT
    assert [run.for_s for run in snapshot.runs] == [9, 4]  # as it was then
    assert snapshot.expected_end is None
    assert "no sign of life from its driver for 1 min 1 s" in shown(snapshot)


@pytest.mark.parametrize(
    ("ending", "condition"),
    [
        ("done", Condition.DONE),
        ("interrupted", Condition.INTERRUPTED),
        ("failed", Condition.FAILED),
    ],
)
def test_a_call_that_has_ended_has_no_devices(
    ending: str, condition: Condition, study: optuna.Study
) -> None:
    note(study, 50, ending=ending, n_trials=14, num_asked=6)
    snapshot = at(study, 1000)
    assert snapshot.condition is condition
    assert (snapshot.devices, snapshot.runs, snapshot.expected_end) == ([], [], None)
    assert snapshot.elsewhere == {3, 4, 5}  # nobody has told them as ended


def test_a_later_call_takes_the_place_of_one_that_died(study: optuna.Study) -> None:
    add_devices(study, "n9", began=200)
    run = RunState(trial=3, devices=(0,), start=START + 201)
    note(study, 202, run, began=200, n_trials=14, num_asked=6)
    snapshot = at(study, 203)
    assert snapshot.condition is Condition.RUNNING
    assert {device.node for device in snapshot.devices} == {"n9"}
    assert [run.state.trial for run in snapshot.runs] == [3]
    assert snapshot.elsewhere == {4, 5}


def test_several_drivers_of_one_study_are_seen_together(study: optuna.Study) -> None:
    add_trial(study, TrialState.RUNNING)
    add_devices(study, "other", began=1)
    run = RunState(trial=6, devices=(0,), start=START + 2)
    note(study, 39, run, began=1, n_trials=3, num_asked=1)
    snapshot = at(study, 40)
    assert [run.state.trial for run in snapshot.runs] == [3, 4, 6]
    assert len(snapshot.devices) == 5
    assert [(d.node, d.device) for d in snapshot.runs[-1].devices] == [("other", 0)]
    assert len(snapshot.idle) == 1
    assert snapshot.num_to_come == 8 + 2


def test_any_study_can_be_looked_at() -> None:
    study = optuna.create_study()
    assert at(study, 0).condition is Condition.EMPTY
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    trial = study.ask()
    snapshot = at(study, 0)
    assert snapshot.condition is Condition.NOT_A_FLEETS
    assert snapshot.elsewhere == {trial.number}
    assert "trials                      1 running, 2 complete" in shown(snapshot)


def test_a_record_that_can_not_be_written_harms_nobody(tmp_path: Path) -> None:
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db")
    state = CallState(began=0.0, noted=0.0, every_s=1.0)
    compat.storage_of(study)._backend.engine.dispose()  # type: ignore[attr-defined]
    (tmp_path / "study.db").write_bytes(b"no database any more" * 500)
    record_call(study, state)


# -- the forecast ---------------------------------------------------------------------------------


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


# -- in words -------------------------------------------------------------------------------------


def shown(snapshot: Snapshot, problem: str = "") -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(rendered(snapshot, problem))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_it_is_said_in_words(study: optuna.Study) -> None:
    lines = shown(at(study, 40), "can't be read").splitlines()
    assert re.fullmatch(r"sweep  running for 40(\.0)? s", lines[0])
    facts = dict(re.split("  +", line.strip(), maxsplit=1) for line in lines[1:7])
    assert facts.pop("expected end").startswith("in about ")
    assert facts == {
        "trials": "3 running, 2 complete, 1 pruned, 8 to come",
        "best": "trial 1: 0.75 with lr=0.1",
        "devices": "4 of 2 nodes (a100), 1 idle",
        "waiting for devices": "5",
        "storage": "can't be read",
    }
    rows = [re.split("  +", line.strip()) for line in lines[7:] if line.strip()]
    titles = ["trial", "devices", "for", "epoch", "samples/s", "last value", "parameters"]
    i = rows.index(titles)
    assert rows[i - 1 : i + 5] == [
        ["On devices"],
        titles,
        rows[i + 1],  # a line
        ["3", "n1 0-1", "10 s", "2 of 4", "12,346", "0.5", "lr=0.1"],
        ["4", "n2 3", "5.0 s", "0", "-", "-", "lr=0.1"],
        ["idle", "n1 2"],
    ]
    ended = rows.index(["Ended last"])
    assert [row[:4] for row in rows[ended + 3 : ended + 6]] == [
        ["2", "pruned", "0.1", "1"],
        ["1", "complete", "0.75", "2"],
        ["0", "complete", "0.5", "1"],
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (duration(0), "0.0 s"),
        (duration(59), "59 s"),
        (duration(61), "1 min 1 s"),
        (duration(7260), "2 h 1 min"),
        (duration(1e6), "11 d 13 h"),
        (ranges([5, 1, 2, 3, 7, 8]), "1-3, 5, 7-8"),
        (printable("a\x1b[31m\nb"), "a\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}b"),
    ],
)
def test_texts_are_short_and_control_no_terminal(text: str, expected: str) -> None:
    assert text == expected


def test_names_are_no_markup() -> None:
    study = optuna.create_study(study_name="<b>[red]x[/red]</b>")
    assert "<b>[red]x[/red]</b>" in shown(at(study, 0))


# -- the command ----------------------------------------------------------------------------------


def filled(url: str) -> str:
    storage: Any = url if "://" in url else JournalStorage(JournalFileBackend(url))
    fill(optuna.create_study(study_name="sweep", storage=storage, direction="maximize"))
    return url


@pytest.mark.parametrize("where", ["sqlite:///{}", "{}"])
def test_it_reads_what_any_storage_has(where: str, tmp_path: Path, capsys: Any) -> None:
    url = filled(where.format(tmp_path / "study"))
    assert main(["top", "--storage", url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "2 complete" in shown
    assert "no sign of life" in shown


def test_it_writes_nothing(tmp_path: Path, capsys: Any) -> None:
    os.chdir(tmp_path)
    filled("sqlite:///study.db")
    filled("journal")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for where in ["sqlite:///study.db", "study.db", "journal"]:
        assert main(["top", "sweep", "--storage", where, "--once"]) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_it_is_shown_anew_in_a_terminal_until_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, its = pty.openpty()
    where = filled(f"sqlite:///{tmp_path}/study.db")
    with started("--storage", where, stdout=its) as process:
        os.close(its)
        shown = b""
        while shown.count(b"no sign of life") < 2:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        threading.Thread(target=drain, args=(ours,), daemon=True).start()
        _, errors = process.communicate()
    assert (process.returncode, errors) == (0, b"")


def test_an_interrupt_ends_it_wherever_it_comes() -> None:
    """Exceptions are lost in callbacks of weak references, as SQLAlchemy has them."""
    with until_interrupt(3600.0) as goes_on:
        signal.raise_signal(signal.SIGINT)
        assert not goes_on()
        with pytest.raises(KeyboardInterrupt):  # the storage does not answer
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def drain(terminal: int) -> None:
    """Read what is left, which it waits for."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 4096):
            pass


@contextlib.contextmanager
def started(*options: str, stdout: Any) -> Iterator[subprocess.Popen[bytes]]:
    """It ends with the test: one that fails would wait for it."""
    command = [sys.executable, "-m", "optuna_fleet", "top", "--interval", "0.1", *options]
    with subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_it_needs_no_torch(tmp_path: Path) -> None:
    where = filled(f"sqlite:///{tmp_path}/study.db")
    code = (
        "import sys; from optuna_fleet.cli import main; "
        f"assert main(['top', '--storage', {where!r}, '--once']) == 0; "
        "assert not {'torch', 'plotly'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("name", "where", "said"),
    [
        ("sweep", "sqlite:///nowhere.db", "There is no file nowhere.db"),
        ("sweep", "nowhere", "There is no file nowhere"),
        ("sweep", "sqlite://", "in the memory of one process"),
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
    import sqlite3

    sqlite3.connect("other.db").execute("create table t (x)")
    files = set(tmp_path.iterdir())
    assert main(["top", name, "--storage", where, "--once"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "secret" not in error
    assert set(tmp_path.iterdir()) == files
