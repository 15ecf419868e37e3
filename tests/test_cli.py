"""The command line: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import optuna_fleet
from optuna_fleet.cli import main
from optuna_fleet.policies import POLICIES
from optuna_fleet.wire.invitation import Invitation, make_credentials

COMMON = {"makespan_s", "trials", "rescales", "rounds", "decisions", "idle_s", "waiting_s"}
COMMON |= {"solver_s"}


@pytest.fixture
def ensemble(tmp_path: Path) -> str:
    trials = [
        {"name": f"n{k % 3}", "rates": {"1": 100.0 - 9 * (k % 3), "2": 180.0}, "epochs": 2 + k}
        for k in range(6)
    ]
    path = tmp_path / "ensemble.json"
    path.write_text(json.dumps({"samples_per_epoch": 1000, "rescale_s": 2.0, "trials": trials}))
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.npz"
    np.savez(
        path,
        time_s=np.array([0.0, 50.0, 120.0, 200.0]),
        initial_idle=np.array([True, True, False]),
        change_event=np.array([1, 2, 3]),
        change_node=np.array([2, 0, 0]),
        change_delta=np.array([1, -1, 1]),
        node_name=np.array(["x1", "x2", "x3"]),
    )
    return str(path)


def report_of(capsys: Any, *arguments: str) -> dict[str, Any]:
    """What `--json -` prints: JSON and nothing else."""
    assert main([*arguments, "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    (report,) = json.loads(printed.out)["policies"]
    solver = report["solver_s"]
    assert 0 <= solver["median"] <= solver["p99"] <= solver["max"]
    return dict(report)


def refusal_of(capsys: Any, *arguments: str) -> str:
    """The one line on standard error with which exit status 2 comes."""
    try:
        status = main(arguments)
    except SystemExit as stop:  # argparse
        status = int(stop.code or 0)
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    lines = str(printed.err).splitlines()
    said = [line for line in lines if "error: " in line]
    assert len(said) == 1
    assert lines[-1] == said[0]
    assert "Traceback" not in printed.err
    return said[0]


def test_simulate_says_how_the_policy_does(ensemble: str, capsys: Any) -> None:
    report = report_of(capsys, "simulate", ensemble, "--devices", "2")
    own = {"policy", "devices", "seed", "lower_bound_s", "ratio_to_bound", "baseline_s"}
    assert set(report) == COMMON | own | {"speedup_over_baseline"}
    assert (report["policy"], report["devices"], report["trials"]) == ("elastic", 2, 6)
    assert report["ratio_to_bound"] == report["makespan_s"] / report["lower_bound_s"] >= 1
    assert report["speedup_over_baseline"] == report["baseline_s"] / report["makespan_s"]
    assert set(report["solver_s"]) == {"median", "p99", "max", "total"}
    busy_s = 2 * (report["makespan_s"] - report["idle_s"])
    assert 0 < busy_s <= 2 * report["makespan_s"]


def test_policies_are_compared_in_one_table(ensemble: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    arguments = ["simulate", ensemble, "--devices", "3", "--json", str(out)]
    policies = [word for name in POLICIES for word in ("--policy", name)]
    assert main([*arguments, *policies, "--gantt", str(tmp_path / "out.html")]) == 0
    titles, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert [row[0] for row in rows] == list(POLICIES)
    reports = json.loads(out.read_text())["policies"]
    for row, report in zip(rows, reports, strict=True):
        shown = dict(zip(titles, row, strict=True))
        assert shown["policy"] == report["policy"]
        for title in ("makespan_s", "ratio_to_bound", "speedup_over_baseline", "rounds"):
            assert float(shown[title]) == pytest.approx(report[title], rel=1e-5)
        for title in ("waiting_s", "idle_s"):
            assert float(shown[title]) == pytest.approx(report[title], rel=1e-5)
        assert float(shown["solver_s.total"]) == pytest.approx(
            report["solver_s"]["total"], rel=1e-5
        )
        assert "plotly" in (tmp_path / f"out-{report['policy']}.html").read_text()


def test_a_file_that_can_not_be_written_is_told_of(ensemble: str, capsys: Any) -> None:
    assert main(["simulate", ensemble, "--devices", "2", "--json", "no/such/folder/x"]) == 2
    printed = capsys.readouterr()
    assert "No such file or directory" in printed.err
    assert "makespan_s" in printed.out  # what was found is not lost


@pytest.fixture
def unlike(tmp_path: Path) -> str:
    rates = ({"1": 100.0, "2": 180.0}, {"1": 70.0, "2": 140.0}, {"1": 40.0, "2": 100.0})
    trials = [{"name": f"n{k % 3}", "rates": rates[k % 3], "epochs": 2 + k} for k in range(8)]
    path = tmp_path / "unlike.json"
    path.write_text(json.dumps({"samples_per_epoch": 1000, "rescale_s": 2.0, "trials": trials}))
    return str(path)


def reports_with(capsys: Any, ensemble: str, *policies: str) -> list[Any]:
    """But for wall times."""
    given = ["--devices", "5", *(word for name in policies for word in ("--policy", name))]
    assert main(["simulate", ensemble, *given, "--json", "-"]) == 0
    reports = json.loads(capsys.readouterr().out)["policies"]
    assert [report["policy"] for report in reports] == [*policies]
    return [{**report, "solver_s": 0} for report in reports]


def test_a_policy_may_be_given_with_options(unlike: str, capsys: Any) -> None:
    policies = ["fleet-g", "fleet-g:delta=1000", *(f"fleet-g:alpha={a}" for a in (0.2, 0.8, 1))]
    rounds = [report["rounds"] for report in reports_with(capsys, unlike, *policies)]
    assert rounds[1] < rounds[0] == rounds[3]
    assert rounds[2:] == sorted({*rounds[2:]})
    far = [f"elastic:objective=throughput,forward_looking_s={s}" for s in (1, 1000)]
    hasty, patient = reports_with(capsys, unlike, *far)
    assert hasty["rescales"] < patient["rescales"]


def test_replay_says_how_well_the_nodes_are_used(trace: str, ensemble: str, capsys: Any) -> None:
    report = report_of(capsys, "replay", trace, ensemble)
    assert report.keys() >= COMMON | {"utilisation", "mean_nodes", "events", "idle_share"}
    end_s = report["makespan_s"]
    assert 120 < end_s < 200
    assert report["mean_nodes"] == pytest.approx((2 * 50 + 3 * 70 + 2 * (end_s - 120)) / end_s)
    assert 0 < report["utilisation"] < 1.5
    assert 0 <= report["idle_share"] < 1
    again = report_of(capsys, "replay", trace, ensemble)
    assert {**again, "solver_s": 0} == {**report, "solver_s": 0}


def test_all_that_can_be_replayed_are_compared(trace: str, ensemble: str, capsys: Any) -> None:
    names = ["equal-split", "elastic", *(f"{name}:paradigm=elastic" for name in POLICIES)]
    policies = [word for name in names for word in ("--policy", name)]
    assert main(["replay", trace, ensemble, *policies, "--max-trials", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len({*map(len, printed)}) == 1  # its columns are below each other
    titles, *rows = map(str.split, printed)
    assert [row[0] for row in rows] == names
    assert all(float(row[titles.index("utilisation")]) > 0 for row in rows)


def test_nodes_that_are_never_idle_are_no_crash(trace: str, ensemble: str, capsys: Any) -> None:
    arrays = dict(np.load(trace))
    none = {"change_event": np.zeros(0, int), "change_node": np.zeros(0, int)}
    arrays |= none | {"initial_idle": np.zeros(3, bool), "change_delta": np.zeros(0, int)}
    np.savez(trace, **arrays)
    report = report_of(capsys, "replay", trace, ensemble)
    found = report["trials"], report["mean_nodes"], report["idle_share"]
    assert found == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--devices", "0"], "is 0, but must be a whole number >= 1"),
        (["--devices", "9" * 30], "must be a whole number >= 1 and <= 1000000"),
        (["--devices", "two"], "is 'two', but must be a whole number >= 1"),
        ([], "the following arguments are required: --devices"),
        (["--devices", "2", "--policy", "best"], "`--policy` is 'best', but must be one of"),
        (["--devices", "2", "--seed", "-1"], "is -1, but must be a whole number >= 0"),
        (["--devices", "2", "--gantt", "no/such/x.html"], "no/such/x.html can't be written"),
        (["--devices", "2", "--policy", "mip:delta=5"], "`an option of mip` is 'delta', but"),
        (["--devices", "2", "--gantt", "x.png"], "please name it *.html"),
        (["--devices", "2", "--policy", "mip:alpha=7"], "`alpha` is 7, but must be"),
        (["--devices", "2", "--policy", "mip:alpha=NaN"], "`alpha` is nan, but must be"),
        (["--devices", "2", "--policy", "mip:paradigm=best"], "`paradigm` is 'best', but must"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], line: str, ensemble: str, capsys: Any
) -> None:
    assert line in refusal_of(capsys, "simulate", ensemble, *arguments)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--policy", "elastic:objective=most"], "`objective` is 'most', but must be one of"),
        (["--max-trials", "0"], "is 0, but must be a whole number >= 1"),
        (["--mix", "all"], "invalid choice: 'all'"),
        (["--policy", "mip"], "`policy` has the paradigm 'global', but nodes that come and go"),
    ],
)
def test_wrong_options_of_replay_are_refused(
    options: list[str], line: str, trace: str, ensemble: str, capsys: Any
) -> None:
    assert line in refusal_of(capsys, "replay", trace, ensemble, *options)


def test_wrong_files_are_refused(ensemble: str, trace: str, capsys: Any) -> None:
    simulated = ("simulate", trace, "--devices", "2")
    assert f"{trace} is not JSON" in refusal_of(capsys, *simulated)
    assert f"{ensemble} is not a NumPy archive" in refusal_of(capsys, "replay", ensemble, ensemble)
    assert f"{trace}.gone can't be read" in refusal_of(capsys, "replay", f"{trace}.gone")


def test_an_agent_says_that_there_is_no_such_file(capsys: Any) -> None:
    assert main(["agent", "--join", "fleet.jion"]) == 2
    assert "fleet.jion is no invitation of a driver" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("--devices 0", "`--devices` is 0, but must be a whole number >= 1, or None."),
        ("--slots-per-device -1", "`--slots-per-device` is -1, but must be"),
        ("--notice nan", "`--notice` is nan, but must be a number >= 0."),
        ("", "'a..b:7' is no address of a driver"),
    ],
)
def test_an_agent_says_what_is_wrong(
    given: str, complaint: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = Invitation(addresses=(), credentials=make_credentials()).token
    monkeypatch.setenv("OPTUNA_FLEET_TOKEN", token)
    assert main(["agent", "--join", "a..b:7", *given.split()]) == 2
    assert complaint in capsys.readouterr().err


def test_the_version_is_told(capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert not caught.value.code
    assert capsys.readouterr().out == f"optuna-fleet {optuna_fleet.__version__}\n"


def test_a_command_is_needed(capsys: Any) -> None:
    assert "the following arguments are required: COMMAND" in refusal_of(capsys)


@pytest.mark.parametrize("options", [[], ["--json", "-"]])
def test_a_reader_that_leaves_early_is_no_crash(ensemble: str, options: list[str]) -> None:
    command = [sys.executable, "-m", "optuna_fleet", "simulate", ensemble, "--devices", "4"]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_an_interrupt_ends_it_in_one_line(
    ensemble: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("optuna_fleet.replay.scenarios.EnsembleScenario.run", interrupted)
    assert main(["simulate", ensemble, "--devices", "4"]) == 130
    assert capsys.readouterr().err == "optuna-fleet: interrupted\n"
