"""The command line: `optuna-fleet agent`, `submit`, `top`, `simulate`, `replay` and others."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optuna_fleet import __version__
from optuna_fleet.checkpoints.inventory import entries, prune, table
from optuna_fleet.checkpoints.store import holder_of
from optuna_fleet.exceptions import FleetConfigError, FleetError
from optuna_fleet.executor.cluster.agent.entry import add_agent
from optuna_fleet.executor.cluster.slurm.record import add_record
from optuna_fleet.executor.cluster.slurm.submit import add_submit
from optuna_fleet.executor.deciding.trials import PARADIGMS
from optuna_fleet.policies import Policy
from optuna_fleet.replay.ensemble import load_ensemble
from optuna_fleet.replay.fields import LARGEST, MOST
from optuna_fleet.replay.jobs import MIXES, load_jobs
from optuna_fleet.replay.policy_options import add_policies, policies_given
from optuna_fleet.replay.report import lines, rows, save_gantt
from optuna_fleet.replay.scenarios import (
    EnsembleScenario,
    TraceScenario,
    simulation_report,
    trace_report,
)
from optuna_fleet.replay.simulation import Outcome
from optuna_fleet.replay.synthetic import SUMMIT_NODES, synthetic_trace
from optuna_fleet.replay.trace import load_trace, save_trace, trace_statistics
from optuna_fleet.replay.workload import SimulatedTrial
from optuna_fleet.visualization.live.top import add_top

Simulated = Callable[[Policy], tuple[dict[str, Any], Outcome]]
"""What became of a policy, and how."""


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


def _run_and_report(options: argparse.Namespace) -> int:
    policies = policies_given(options)
    simulated = options.scenario(options)
    reports: list[dict[str, Any]] = []

    def each() -> Iterator[dict[str, Any]]:
        for name, policy in policies.items():
            report, outcome = simulated(policy)
            reports.append(report)
            if path := options.gantt:
                stem = path.stem if len(policies) == 1 else f"{path.stem}-{name}"
                save_gantt(outcome, path.with_stem(stem), name)
            yield report

    are_told = str(options.json) != "-"
    for row in rows(each()):
        if are_told and len(policies) > 1:
            print(row, flush=True)
    if options.json:
        whole = reports[0] if len(policies) == 1 else {"policies": reports}
        _write(options.json, json.dumps(whole, indent=2) + "\n")
    if are_told and len(policies) == 1:
        print("\n".join(lines(reports[0])), flush=True)
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


def _simulate(options: argparse.Namespace) -> Simulated:
    trials = load_ensemble(options.ensemble, options.devices, options.seed)
    alone = EnsembleScenario(
        trials=_with_costs(trials, options.rescale_s),
        num_devices=options.devices,
        devices_per_node=options.devices_per_node,
        policy="baseline",
        seed=options.seed,
        noise=options.noise,
    )
    baseline = alone.run()

    def simulated(policy: Policy) -> tuple[dict[str, Any], Outcome]:
        run = replace(alone, policy=policy)
        outcome = run.run()
        return simulation_report(run, outcome, baseline), outcome

    return simulated


def _replay(options: argparse.Namespace) -> Simulated:
    if options.published_heuristic and options.policy != ["equal-split"]:
        raise FleetConfigError("`--published-heuristic` goes with --policy equal-split alone.")
    trace = load_trace(options.trace)
    trials = _with_costs(load_jobs(options.jobs, options.mix), options.rescale_s)

    def simulated(policy: Policy) -> tuple[dict[str, Any], Outcome]:
        run = TraceScenario(
            trace=trace,
            trials=trials,
            policy=policy,
            max_trials=options.max_trials,
            events=options.events,
            published_heuristic=options.published_heuristic,
            to_the_end=options.to_the_end,
        )
        outcome = run.run()
        return trace_report(run, outcome), outcome

    return simulated


def _with_costs(
    trials: Sequence[SimulatedTrial], rescale_s: float | None
) -> tuple[SimulatedTrial, ...]:
    """The trials, whose moves cost so much, if that is given."""
    if rescale_s is None:
        return tuple(trials)
    return tuple(replace(t, rescale_up_s=rescale_s, rescale_down_s=rescale_s) for t in trials)


def _trace(options: argparse.Namespace) -> int:
    trace = synthetic_trace(options.seed, num_nodes=options.nodes, hours=options.hours)
    save_trace(trace, options.trace)
    print("\n".join(lines(trace_statistics(trace))), flush=True)
    return 0


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        print(text, end="", flush=True)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FleetConfigError(f"{path} can't be written: {error.strerror}.") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="optuna-fleet",
        description="Join a fleet; watch a study; simulate how sweeps would run; look after "
        "checkpoints.",
    )
    parser.add_argument("--version", action="version", version=f"optuna-fleet {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_agent(commands)
    _add_simulate(commands)
    _add_replay(commands)
    _add_trace(commands)
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


def _add_simulate(commands: Any) -> None:
    command = commands.add_parser(
        "simulate", help="run an ensemble of trials with known rates on a fleet that stays"
    )
    command.add_argument(
        "ensemble",
        type=Path,
        metavar="ENSEMBLE.json",
        help='as in {"samples_per_epoch": 30606, "rescale_s": 34, "trials": [{"name": "resnet", '
        '"rates": {"1": 100.0, "2": 190.0}, "epochs": 14}]}: samples/s by number of devices',
    )
    command.add_argument(
        "--devices",
        type=_devices,
        required=True,
        help="how many, as in 12; or of each device type, as in v100=8,a100=4",
    )
    command.add_argument(
        "--devices-per-node", type=_at_least(1), default=4, metavar="N", help="default 4"
    )
    add_policies(command, all_are=PARADIGMS)
    command.add_argument(
        "--seed",
        type=_at_least(0, 2**63),
        default=0,
        help="of what is drawn: noise, pruned trials",
    )
    command.add_argument(
        "--noise",
        type=_number(0.0, most=10.0),
        default=0.0,
        help="how wrong the policy's rates are: standard deviation of their logarithm",
    )
    _add_outputs(command, _simulate)


def _add_replay(commands: Any) -> None:
    command = commands.add_parser(
        "replay", help="run a workload on a trace of nodes that come and go"
    )
    command.add_argument(
        "trace", type=Path, metavar="TRACE.npz", help="what `record` or `trace` wrote"
    )
    command.add_argument(
        "jobs", type=Path, nargs="?", metavar="JOBS.json", help="default BFTrainer's"
    )
    command.add_argument("--mix", choices=list(MIXES), default="hpo")
    add_policies(command, all_are=["elastic"])
    command.add_argument("--max-trials", type=_at_least(1), default=10, help="trials at once")
    command.add_argument(
        "--events",
        choices=["completions", "nodes-only"],
        default="completions",
        help="decide also as trials end, or only as nodes come and go (as published)",
    )
    command.add_argument(
        "--published-heuristic",
        action="store_true",
        help="equal-split as in BFTrainer's published simulator, with its flaw",
    )
    command.add_argument(
        "--to-the-end", action="store_true", help="repeat the trace until all trials have ended"
    )
    _add_outputs(command, _replay)


def _add_trace(commands: Any) -> None:
    command = commands.add_parser(
        "trace", help="make up a trace of idle nodes like those of Summit, for `replay`"
    )
    command.add_argument("trace", type=Path, metavar="TRACE.npz")
    command.add_argument(
        "--nodes", type=_at_least(1, SUMMIT_NODES), default=1024, metavar="N", help="default 1024"
    )
    command.add_argument(
        "--hours",
        type=_number(0.01, most=10_000.0),
        default=168.0,
        metavar="H",
        help="default 168, a week",
    )
    command.add_argument("--seed", type=_at_least(0, 2**63), default=0, help="default 0")
    command.set_defaults(run=_trace)


def _add_outputs(command: argparse.ArgumentParser, run: Callable[..., Any]) -> None:
    command.add_argument("--json", type=Path, metavar="OUT.json", help="'-' for standard output")
    command.add_argument(
        "--gantt", type=Path, metavar="OUT.png", help="picture of devices over time (matplotlib)"
    )
    command.set_defaults(run=_run_and_report, scenario=run)


def _at_least(least: int, most: int = MOST) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if text.isdecimal() and least <= int(text) <= most:
            return int(text)
        rule = f"a whole number >= {least} and <= {most}"
        raise argparse.ArgumentTypeError(f"{text!r} must be {rule}")

    return whole_number


def _number(least: float, most: float = LARGEST) -> Callable[[str], float]:
    def number(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= (value := float(text)) <= most:
                return value
        rule = f"a number >= {least:g} and <= {most:g}"
        raise argparse.ArgumentTypeError(f"{text!r} must be {rule}")

    return number


def _devices(text: str) -> int | dict[str, int]:
    if "=" not in text:
        return _at_least(1)(text)
    pairs = [part.rpartition("=") for part in text.split(",")]
    if len({kind for kind, _, _ in pairs if kind}) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} must name each device type once")
    return {kind: _at_least(1)(number) for kind, _, number in pairs}
