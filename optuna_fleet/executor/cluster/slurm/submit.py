"""``optuna-fleet submit``: writes a batch script for Slurm, and submits it."""

from __future__ import annotations

import argparse
import math
import operator
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.executor.cluster.slurm.commands import without_options

_MARK = "# Written by `optuna-fleet submit`"
_SCRIPT = """\
#!/bin/bash
{mark}; `sbatch {file}` submits it again.
{options}

# One driver, on the first node; with cluster="slurm" it starts an agent on each node.
{command} &
driver=$!

# Slurm sends USR1 {notice_s} s before the time limit, and at some sites before a preemption. The
# driver is told, and has {grace_s} s for checkpoints.
announce() {{
    trap '' USR1 TERM
    told=yes early=$1
    kill -USR1 "$driver"
    timeout {grace_s} tail --pid="$driver" -f /dev/null
    kill -TERM "$driver" 2>/dev/null
}}
trap 'announce yes' USR1
trap 'announce ""' TERM  # cancelled, or preempted: then Slurm requeues it

wait "$driver"; status=$?
if [ -n "$told" ]; then wait "$driver"; status=$?; fi  # the first was interrupted
if [ -n "$early" ] && [ "$status" -ne 0 ]; then
    {afterwards}
fi
exit "$status"
"""
_REQUEUE = """\
echo "Not at its end in time: requeued."
    scontrol requeue "$SLURM_JOB_ID\""""
_TELL = "echo 'Not at its end in time. Where it has `checkpoints` it goes on with: sbatch {file}'"


def add_submit(commands: Any) -> None:
    """Add the command to those of the command line."""
    command = commands.add_parser(
        "submit",
        help="write a batch script for Slurm, and submit it",
        description="Writes a batch script that runs COMMAND on the first node of a new "
        "allocation, and submits it. Other options, as in --account=abc, are passed to sbatch.",
        usage="optuna-fleet submit [options] [options of sbatch] COMMAND ...",
        allow_abbrev=False,
    )
    command.add_argument("--nodes", type=int, default=1, metavar="N")
    command.add_argument("--gpus-per-node", type=int, metavar="N")
    command.add_argument("--cpus-per-node", type=int, metavar="N")
    command.add_argument("--time", metavar="LIMIT", help="as in 8:00:00; default the partition's")
    command.add_argument("--partition", metavar="NAME")
    command.add_argument(
        "--requeue", action="store_true", help="submit it again at its time limit"
    )
    command.add_argument(
        "--notice",
        type=int,
        default=120,
        metavar="SECONDS",
        help="how long before its time limit the sweep is told; default 120",
    )
    command.add_argument("--file", type=Path, metavar="SCRIPT", help="where the script is written")
    command.add_argument("--dry-run", action="store_true", help="only print the script")
    command.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    command.set_defaults(run=_submit, passes_on=True)


def _submit(given: argparse.Namespace) -> int:
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    _check(given, command)
    name = next((Path(word).stem for word in command if word.endswith(".py")), "sweep")
    file = given.file or Path(f"{name}.sbatch")
    script = _script(given, command, name, shlex.quote(str(file)))
    if given.dry_run:
        print(script, end="", flush=True)
        return 0
    _write(file, script)
    try:
        return subprocess.run(["sbatch", file], env=without_options(os.environ)).returncode
    except FileNotFoundError as error:
        raise FleetConfigError(
            f"There is no `sbatch` here; {file} was written: submit it on a login node of the "
            "cluster."
        ) from error


def _check(given: argparse.Namespace, command: Sequence[str]) -> None:
    if not command:
        raise FleetConfigError(
            "What is to run? Give it last, as in `optuna-fleet submit --nodes 4 python sweep.py`."
        )
    short = [option for option in given.others if not option.startswith("--")]
    is_alone = bool(given.others) and "=" not in given.others[-1]
    if short or command[0].startswith("-") or (is_alone and shutil.which(command[0]) is None):
        raise FleetConfigError(
            f"{(short or command)[0]!r} is no long option, and no program: give options of sbatch "
            "in one word, as in --account=abc, and write those with a blank into the script."
        )
    if (limit_s := _seconds(given.time or "")) <= given.notice:  # it would be told at once
        raise FleetConfigError(
            f"--time {given.time} is {limit_s} s, but Slurm is to announce its end {given.notice} "
            "s before: give more, as in 8:00:00 for 8 hours, or a shorter --notice."
        )


def _script(given: argparse.Namespace, command: Sequence[str], name: str, file: str) -> str:
    named = {
        "job-name": name,
        "nodes": given.nodes,
        "gpus-per-node": given.gpus_per_node,
        "cpus-per-task": given.cpus_per_node,
        "time": given.time,
        "partition": given.partition,
    }
    options = [
        *(f"--{name}={value}" for name, value in named.items() if value is not None),
        *given.others,
        *("--ntasks-per-node=1", "--no-kill", "--open-mode=append"),
        "--requeue" if given.requeue else "--no-requeue",
        f"--signal=B:USR1@{given.notice}",
    ]
    return _SCRIPT.format(
        mark=_MARK,
        file=file,
        options="\n".join(f"#SBATCH {shlex.quote(option)}" for option in options),
        command=shlex.join(command),
        notice_s=given.notice,
        grace_s=max(1, given.notice // 2),
        afterwards=_REQUEUE if given.requeue else _TELL.format(file=file),
    )


def _seconds(limit: str) -> float:
    """What Slurm takes a time limit for; infinity for none, and for what it will refuse."""
    days, is_long, rest = limit.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in (days or "0", *parts)):
        return math.inf
    units = (3600, 60, 1) if is_long or len(parts) == 3 else (60, 1)
    return sum(map(operator.mul, map(int, parts), units), 86400 * int(days or 0)) or math.inf


def _write(file: Path, script: str) -> None:
    try:
        if file.exists() and _MARK not in file.read_text(errors="replace"):
            raise FleetConfigError(
                f"{file} is there already, and was not written by `optuna-fleet submit`: name "
                "another one with --file."
            )
        file.write_text(script, encoding="utf-8")
    except OSError as error:
        raise FleetConfigError(f"{file} can't be written: {error.strerror}.") from error
