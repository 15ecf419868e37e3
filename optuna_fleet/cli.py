"""The command line: `optuna-fleet agent`, `submit`, `top`, `simulate`, `replay` and others."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optuna_fleet import __version__
from optuna_fleet.checkpoints.inventory import entries, prune, table
from optuna_fleet.checkpoints.store import holder_of
from optuna_fleet.exceptions import FleetError
from optuna_fleet.executor.cluster.agent.entry import add_agent
from optuna_fleet.executor.cluster.slurm.record import add_record
from optuna_fleet.executor.cluster.slurm.submit import add_submit
from optuna_fleet.replay.replay_commands import add_replay, add_simulate, add_trace
from optuna_fleet.visualization.top import add_top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = _parser()
    options, others = parser.parse_known_args(arguments)
    if others and not hasattr(options, "passes_on"):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    options.others = others
    try:
        return options.run(options)  # type: ignore[no-any-return]
    except (FleetError, ImportError) as error:
        print(f"optuna-fleet: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("optuna-fleet: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _checkpoints(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    if options.prune:
        removed = list(prune(folder))
        print(f"Removed {len(removed)} files.", *removed, sep="\n")
    found = entries(folder, verify=options.verify)
    print("\n".join(table(found, verified=options.verify)))
    if not found:
        print(f"There are no checkpoints in {folder}; give the folder that `checkpoints=` named.")
    if holder := holder_of(folder):
        print(f"In use by {holder}.")
    elif any(entry.kind != "final" for entry in found):
        print(
            "The driver of the unfinished ones died, or was interrupted: the same call made again"
        )
        print("resumes them.")
    return 1 if any(entry.problem for entry in found) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="optuna-fleet",
        description="Join a fleet; watch a study; simulate how sweeps would run; look after "
        "checkpoints.",
    )
    parser.add_argument("--version", action="version", version=f"optuna-fleet {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_agent(commands)
    add_simulate(commands)
    add_replay(commands)
    add_trace(commands)
    add_record(commands)
    _add_checkpoints(commands)
    add_submit(commands)
    add_top(commands)
    return parser


def _add_checkpoints(commands: Any) -> None:
    command = commands.add_parser(
        "checkpoints", help="list, verify and prune the checkpoints in a folder"
    )
    command.add_argument("folder", type=Path, metavar="DIR")
    command.add_argument("--verify", action="store_true", help="read them and compare checksums")
    command.add_argument(
        "--prune",
        action="store_true",
        help="remove all but the good checkpoints of trials that are done; those that a dead "
        "driver left unfinished then begin anew",
    )
    command.set_defaults(run=_checkpoints)
