"""``optuna-fleet record``: which nodes of a Slurm cluster are idle when, for `replay`."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optuna_fleet.exceptions import FleetConfigError, LaunchError
from optuna_fleet.executor.cluster.slurm.commands import ask
from optuna_fleet.replay.replay_commands import lines
from optuna_fleet.replay.trace import NodeTrace, idle_nodes, save_trace, trace_statistics

_DAY_S = 86400.0


def add_record(commands: Any) -> None:
    """Add the command to those of the command line."""
    command = commands.add_parser(
        "record",
        help="record a trace of idle nodes from Slurm, for `replay`",
        description="Asks `sinfo` again and again which nodes are idle, and writes each answer to "
        "TRACE.npz, until Ctrl-C or --hours.",
    )
    command.add_argument("trace", type=Path, metavar="TRACE.npz")
    command.add_argument("--partition", default="", metavar="NAME", help="default all")
    command.add_argument(
        "--interval", type=float, default=30.0, metavar="SECONDS", help="default 30"
    )
    command.add_argument(
        "--hours", type=float, default=math.inf, metavar="H", help="default until Ctrl-C"
    )
    command.set_defaults(run=_record)


def _record(options: argparse.Namespace) -> int:
    path: Path = options.trace
    _check(options)
    trace = NodeTrace(names=(), changes=()).sampled(_idle(options.partition), 0.0)
    print(f"Recording {len(trace.names)} nodes in {path}; Ctrl-C ends it.", flush=True)
    moments = _moments(options.interval, options.hours * 3600)
    next(moments)
    try:
        for moment_s in moments:
            if idle := _asked(options.partition):
                trace = trace.sampled(idle, moment_s)
                save_trace(trace, path)
    except KeyboardInterrupt:
        if len(trace.changes) < 2:
            raise
    if len(trace.changes) < 2:
        raise FleetConfigError("`sinfo` answered once only: nothing is recorded.")
    print("\n".join(lines(trace_statistics(trace))), flush=True)
    return 0


def _check(options: argparse.Namespace) -> None:
    if not 0 < options.interval <= _DAY_S:
        raise FleetConfigError(f"`--interval` is {options.interval:g}, but must be > 0, <= 86400.")
    if not options.hours > 0:
        raise FleetConfigError(f"`--hours` is {options.hours:g}, but must be > 0.")
    if options.trace.exists():
        raise FleetConfigError(f"{options.trace} is there already; give another file.")
    folder = options.trace.absolute().parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FleetConfigError(f"{options.trace} can't be written: see to the folder {folder}.")


def _asked(partition: str) -> dict[str, bool] | None:
    """What is idle now, or None: a controller that is away for a while ends no recording."""
    try:
        return _idle(partition)
    except FleetConfigError as error:
        print(f"optuna-fleet: no sample at {time.ctime()}: {error}", file=sys.stderr, flush=True)
        return None


def _idle(partition: str) -> dict[str, bool]:
    which = [f"--partition={partition}"] if partition else []
    try:
        return idle_nodes(ask("sinfo", "--noheader", "--Node", "--format=%N|%t", *which))
    except LaunchError as error:
        raise FleetConfigError(f"{error}. Recording needs a Slurm cluster.") from error


def _moments(interval_s: float, limit_s: float) -> Iterator[float]:
    """Seconds since the first, when they have come; the last at the limit.

    Slurm tells of nothing by itself, so it is asked at intervals.
    """
    begun, moment_s = time.monotonic(), 0.0
    while True:
        yield moment_s
        if moment_s >= limit_s:
            return
        wanted_s = min((moment_s // interval_s + 1) * interval_s, limit_s)
        wanted_s = max(wanted_s, moment_s + 0.001)
        time.sleep(max(0.0, begun + wanted_s - time.monotonic()))
        moment_s = time.monotonic() - begun
