"""Traces that are made up, or recorded from Slurm, and what `replay` reads of them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from optuna_fleet.cli import main
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.replay.trace import (
    SUMMIT_NODES,
    NodeTrace,
    idle_nodes,
    load_trace,
    save_trace,
    synthetic_trace,
    trace_of,
    trace_statistics,
)

SINFO = """#!/bin/sh
count=$(($(cat "$0.count" 2>/dev/null || echo 0) + 1))
echo $count > "$0.count"
exec sh "$0.$count" "$@"
"""
INTERRUPT = "kill -INT $PPID"


# -- made up ------------------------------------------------------------------------------------


def test_a_made_up_week_of_summit_is_as_published() -> None:
    week = trace_statistics(synthetic_trace(0, num_nodes=SUMMIT_NODES))
    assert (week["nodes"], week["hours"]) == (4608, 168.0)
    assert week["joins_per_h"] == pytest.approx(42, rel=0.1)
    assert week["leaves_per_h"] == pytest.approx(31, rel=0.1)
    assert week["mean_idle"] == pytest.approx(407, rel=0.1)
    assert week["most_idle"] > 1000
    assert week["under_10_min"] == pytest.approx(0.58, abs=0.02)
    assert week["time_under_10_min"] == pytest.approx(0.10, abs=0.02)


@pytest.mark.parametrize(("num_nodes", "hours"), [(1, 0.01), (1, 48.0), (64, 24.0), (4608, 1.0)])
def test_every_made_up_trace_is_read_as_it_was_written(
    num_nodes: int, hours: float, tmp_path: Path
) -> None:
    trace = synthetic_trace(3, num_nodes=num_nodes, hours=hours)
    save_trace(trace, tmp_path / "trace.npz")
    assert load_trace(tmp_path / "trace.npz") == trace
    assert len(trace.names) == num_nodes
    assert trace.end_s == pytest.approx(hours * 3600, abs=5)
    assert (np.diff(trace.time_s) >= 10).all()


def test_the_statistics_by_hand() -> None:
    trace = trace_of(
        time_s=[0.0, 500.0, 1800.0, 3600.0],
        initial_idle=[True, False],
        change_event=[1, 1, 2],
        change_node=[0, 1, 0],
        change_delta=[-1, 1, 1],
        node_name=["a", "b"],
    )
    assert trace_statistics(trace) == {
        "nodes": 2,
        "hours": 1.0,
        "mean_idle": pytest.approx((500 + 3100 + 1800) / 3600),
        "most_idle": 2,
        "joins_per_h": 2.0,
        "leaves_per_h": 1.0,
        "under_10_min": pytest.approx(1 / 3),
        "time_under_10_min": pytest.approx(500 / 5400),
    }


def test_a_new_user_replays_bftrainers_jobs_without_any_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(tmp_path / "trace.npz")
    assert main(["trace", trace, "--nodes", "32", "--hours", "8", "--seed", "1"]) == 0
    assert "mean_idle " in capsys.readouterr().out
    assert main(["replay", trace, "--mix", "diverse", "--json", "-"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["policies"]
    assert report["trials"] > 0
    assert 0.5 < report["utilisation"] < 1.2


# -- what sinfo says ----------------------------------------------------------------------------


def test_idle_are_nodes_that_could_be_used_now() -> None:
    text = "n1|idle\nn2|plnd\nn-3.x|idle-\nn4|mix\nn5|idle*\nn6|idle~\nn7|drain\nn8|down*\n"
    assert idle_nodes(f"CLUSTER: here\n\n{text}") == {
        **dict.fromkeys(("n1", "n2", "n-3.x"), True),
        **dict.fromkeys(("n4", "n5", "n6", "n7", "n8"), False),
    }


@pytest.mark.parametrize("text", ["n1|idle\nn2|", "n1 idle", "NODELIST|STATE"])
def test_damaged_lines_are_named(text: str) -> None:
    with pytest.raises(FleetConfigError, match="but must say node and state"):
        idle_nodes(text)


def test_samples_become_a_trace() -> None:
    trace = NodeTrace(names=(), changes=())
    for time_s, idle in [
        (0.0, {"b": True, "c": False}),
        (10.0, {"b": True, "c": False}),
        (20.0, {"b": False, "c": True}),
        (30.0, {"a": True, "c": True}),  # one is new, one is gone
        (40.0, {"a": True, "c": True}),
        (50.0, {"a": True, "c": True}),
    ]:
        trace = trace.sampled(idle, time_s)
    assert trace.names == ("b", "c", "a")
    assert [(c.time_s, c.joined, c.left) for c in trace.changes] == [
        (0.0, (0,), ()),
        (20.0, (1,), (0,)),
        (30.0, (2,), ()),
        (50.0, (), ()),
    ]


# -- `optuna-fleet record` ----------------------------------------------------------------------


@pytest.fixture
def sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in on PATH, whose n-th answer is made by a script of that number."""
    path = tmp_path / "bin" / "sinfo"
    path.parent.mkdir()
    path.write_text(SINFO)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    return path


def answers(sinfo: Path, *scripts: str) -> None:
    Path(f"{sinfo}.count").unlink(missing_ok=True)
    for number, script in enumerate(scripts, 1):
        Path(f"{sinfo}.{number}").write_text(script)


def says(*idle: str) -> str:
    states = {name: "idle" if name in idle else "alloc" for name in ("n1", "n2", "n3")}
    return "\n".join(f"echo '{name}|{state}'" for name, state in states.items())


def record(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "optuna_fleet", "record", str(path), "--interval", "0.01"]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=60)


def idle_after_each(path: Path) -> list[set[str]]:
    trace, idle = load_trace(path), set[int]()
    found = []
    for change in trace.changes:
        idle = (idle | set(change.joined)) - set(change.left)
        found.append({trace.names[i] for i in idle})
    return found


AWAY = "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1"


def test_idle_nodes_are_recorded_until_ctrl_c(sinfo: Path, tmp_path: Path) -> None:
    """Slurm's controller may be away for a while."""
    path = tmp_path / "trace.npz"
    asked = f'echo "$*" > {tmp_path}/asked\n'
    away = (AWAY, "echo half a li", "true")
    answers(sinfo, asked + says("n1"), says("n1", "n2"), *away, says("n2"), INTERRUPT)
    done = record(path, "--partition", "batch")
    assert done.returncode == 0
    assert "Recording 3 nodes" in done.stdout
    assert "joins_per_h" in done.stdout
    said = done.stderr.splitlines()
    for line, why in zip(said, ("Unable to contact", "'half a li'", "no nodes"), strict=True):
        assert "no sample at" in line
        assert why in line
    assert "--partition=batch" in (tmp_path / "asked").read_text().split()
    assert idle_after_each(path) == [{"n1"}, {"n1", "n2"}, {"n2"}]
    assert main(["replay", str(path)]) == 0


def test_a_kill_loses_what_was_not_answered_only(sinfo: Path, tmp_path: Path) -> None:
    answers(sinfo, says(), says("n3"), says("n3", "n1"), "kill -KILL $PPID")
    record(tmp_path / "trace.npz")
    assert idle_after_each(tmp_path / "trace.npz") == [set(), {"n3"}, {"n1", "n3"}]
    assert [path.name for path in tmp_path.glob("*trace*")] == ["trace.npz"]


@pytest.mark.parametrize(
    ("given", "answer", "line"),
    [
        ([], ["true"], "lists no nodes"),
        ([], ["echo nonsense"], "`sinfo` says 'nonsense'"),
        ([], [AWAY], "Recording needs"),
        (["--hours", "0.000001"], [says("n1"), AWAY], "answered once only"),
        (["--interval", "0"], [], "`--interval` is 0"),
        (["--interval", "1e300"], [], "`--interval` is 1e+300"),
        (["--hours", "nan"], [], "`--hours` is nan"),
        (["no/such/trace.npz"], [], "can't be written: see to the folder"),
        (["made_up.npz"], [], "is there already"),
    ],
)
def test_what_can_not_be_recorded_leaves_no_file(
    given: list[str],
    answer: list[str],
    line: str,
    sinfo: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_trace(synthetic_trace(0, num_nodes=2, hours=1), tmp_path / "made_up.npz")
    made_up = (tmp_path / "made_up.npz").read_bytes()
    answers(sinfo, *answer)
    name, *options = given if given and given[0].endswith(".npz") else ["trace.npz", *given]
    assert main(["record", str(tmp_path / name), *options]) == 2
    assert line in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("*.npz")] == ["made_up.npz"]
    assert (tmp_path / "made_up.npz").read_bytes() == made_up


def test_without_slurm_nothing_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["record", str(tmp_path / "trace.npz")]) == 2
    assert "`sinfo` can't be run: " in capsys.readouterr().err
