"""The batch script that `optuna-fleet submit` writes: its text, and what Slurm makes of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from optuna_fleet.cli import main
from tests.clusters.slurm_lab import SlurmLab

SCRIPT = """\
#!/bin/bash
# Written by `optuna-fleet submit`; `sbatch sweep.sbatch` submits it again.
#SBATCH --job-name=sweep
#SBATCH --nodes=4
#SBATCH --gpus-per-node=2
#SBATCH --time=8:00:00
#SBATCH --account=abc
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120

# One driver, on the first node; with cluster="slurm" it starts an agent on each node.
python sweep.py --name 'a b' &
driver=$!

# Slurm sends USR1 120 s before the time limit, and at some sites before a preemption. The
# driver is told, and has 60 s for checkpoints.
announce() {
    trap '' USR1 TERM
    told=yes early=$1
    kill -USR1 "$driver"
    timeout 60 tail --pid="$driver" -f /dev/null
    kill -TERM "$driver" 2>/dev/null
}
trap 'announce yes' USR1
trap 'announce ""' TERM  # cancelled, or preempted: then Slurm requeues it

wait "$driver"; status=$?
if [ -n "$told" ]; then wait "$driver"; status=$?; fi  # the first was interrupted
if [ -n "$early" ] && [ "$status" -ne 0 ]; then
    echo "Not at its end in time: requeued."
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
# Its first run ends as it is told to, the second by itself.
DRIVER = """
import os, signal, sys
if os.environ.get("SLURM_RESTART_COUNT"):
    sys.exit(0)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1))
print("begun", flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.py").write_text(DRIVER)


def test_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--nodes 4 --gpus-per-node 2 --account=abc --time 8:00:00 --requeue --dry-run"
    command = ["python", "sweep.py", "--name", "a b"]
    assert main(["submit", *options.split(), *command]) == 0
    assert capsys.readouterr().out == SCRIPT
    assert not Path("sweep.sbatch").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "What is to run?"),
        (["-A", "abc", "python"], "'-A' is no long option, and no program: give"),
        (["--account", "abc", "python"], "'abc' is no long option, and no program"),
        (["--comment=a b", "python"], "write those with a blank into the script"),
        (["--file", "sweep.py", "python"], "sweep.py is there already"),
        (["--time", "2:00", "python"], "--time 2:00 is 120 s, but Slurm is to announce its end"),
        (["--time", "0-0:1", "--notice", "61", "python"], "--time 0-0:1 is 60 s"),
        (["--file", "nowhere/x", "python"], "nowhere/x can't be written"),
    ],
)
def test_what_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_without_slurm_the_script_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["submit", "python", "sweep.py"]) == 2
    assert "sweep.sbatch was written" in capsys.readouterr().err
    written = Path("sweep.sbatch").read_text()
    assert "python sweep.py &" in written
    assert "goes on with: sbatch sweep.sbatch" in written  # where it is not to be requeued


def begun() -> bool:
    return Path("out").exists() and "begun" in Path("out").read_text()


def test_a_job_that_is_told_of_its_time_limit_is_requeued(slurm: SlurmLab) -> None:
    """Its name, with a blank, is one for Slurm too."""
    Path("sweep.py").rename("my sweep.py")
    options = ["--requeue", "--nodes=2", "--output=out"]
    assert main(["submit", *options, sys.executable, "my sweep.py"]) == 0
    (job,) = slurm.queue()
    slurm.wait_for(begun)
    assert slurm.run("squeue", "-h", "-o", "%j") == "my sweep"
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    state = ("squeue", "-h", "--states=all", "-j", job, "-o", "%T")
    slurm.wait_for(lambda: slurm.run(*state) == "COMPLETED")
    assert "Not at its end in time: requeued." in Path("out").read_text()
