"""The command line: `optuna-fleet agent`, `submit`, `top`, `simulate`, `replay` and others."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from optuna_fleet import __version__
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="optuna-fleet",
        description="Join a fleet; watch a study; simulate how sweeps would run.",
    )
    parser.add_argument("--version", action="version", version=f"optuna-fleet {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_agent(commands)
    add_simulate(commands)
    add_replay(commands)
    add_trace(commands)
    add_record(commands)
    add_submit(commands)
    add_top(commands)
    return parser
