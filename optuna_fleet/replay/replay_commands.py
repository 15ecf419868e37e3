"""``optuna-fleet simulate``, ``replay`` and ``trace``: what they take, and what they print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from optuna_fleet.arguments import check_choice, number_of
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.policies import POLICIES, Policy
from optuna_fleet.replay.progress import Outcome
from optuna_fleet.replay.scenarios import (
    EnsembleScenario,
    TraceScenario,
    simulation_report,
    trace_report,
)
from optuna_fleet.replay.trace import (
    SUMMIT_NODES,
    load_trace,
    save_trace,
    synthetic_trace,
    trace_statistics,
)
from optuna_fleet.replay.workload import BFTRAINER_RATES, MOST, bftrainer_trials, load_ensemble
from optuna_fleet.visualization.timeline import Bar, Mark, Timeline, figure_of

_SEED = number_of(least=0, most=2**63, whole=True)
_NODES = number_of(least=1, most=SUMMIT_NODES, whole=True)
_COUNT = number_of(least=1, most=MOST, whole=True)
_FILE = (
    'as in {"samples_per_epoch": 30606, "rescale_s": 34, "trials": [{"name": "resnet", '
    '"rates": {"1": 100.0, "2": 190.0}, "epochs": 14}]}: samples/s by number of devices'
)
_MIXES = {"hpo": ("ShuffleNet",), "diverse": tuple(BFTRAINER_RATES)}
Simulated = Callable[[Policy], tuple[dict[str, Any], Outcome]]
"""What became of a policy, and how."""


def add_simulate(commands: Any) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "simulate", help="run an ensemble of trials with known rates on a fleet that stays"
    )
    command.add_argument("ensemble", type=Path, metavar="ENSEMBLE.json", help=_FILE)
    command.add_argument("--devices", type=_COUNT, required=True, metavar="N")
    command.add_argument(
        "--devices-per-node", type=_COUNT, default=4, metavar="N", help="default 4"
    )
    _add_policies(command)
    command.add_argument("--seed", type=_SEED, default=0, help="of what is drawn")
    _add_outputs(command, _simulate)


def add_replay(commands: Any) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "replay", help="run a workload on a trace of nodes that come and go"
    )
    command.add_argument(
        "trace", type=Path, metavar="TRACE.npz", help="what `record` or `trace` wrote"
    )
    command.add_argument(
        "ensemble",
        type=Path,
        nargs="?",
        metavar="ENSEMBLE.json",
        help=f"{_FILE}; by default the 1,000 trials of BFTrainer",
    )
    command.add_argument(
        "--mix",
        choices=list(_MIXES),
        default="hpo",
        help="of BFTrainer's trials: equal ones, or seven models in turn",
    )
    _add_policies(command)
    command.add_argument("--max-trials", type=_COUNT, default=10, help="trials at once")
    _add_outputs(command, _replay)


def add_trace(commands: Any) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "trace", help="make up a trace of idle nodes like those of Summit, for `replay`"
    )
    command.add_argument("trace", type=Path, metavar="TRACE.npz")
    command.add_argument("--nodes", type=_NODES, default=1024, metavar="N", help="default 1024")
    command.add_argument(
        "--hours",
        type=number_of(least=0.01, most=10_000),
        default=168.0,
        metavar="H",
        help="default 168, a week",
    )
    command.add_argument("--seed", type=_SEED, default=0, help="default 0")
    command.set_defaults(run=_trace)


def _add_outputs(command: argparse.ArgumentParser, run: Callable[..., Any]) -> None:
    command.add_argument("--json", type=Path, metavar="OUT.json", help="'-' for standard output")
    command.add_argument(
        "--gantt", type=Path, metavar="OUT.html", help="devices over time, for a browser"
    )
    command.set_defaults(run=_run_and_report, scenario=run)


# -- what they do ---------------------------------------------------------------------------------


def _run_and_report(options: argparse.Namespace) -> int:
    policies = {given: _policy_of(given) for given in options.policy or ["elastic"]}
    simulated = options.scenario(options)
    reports: list[dict[str, Any]] = []

    def each() -> Iterator[dict[str, Any]]:
        for given, policy in policies.items():
            report, outcome = simulated(policy)
            reports.append({"policy": given, **report})
            if path := options.gantt:
                stem = path.stem if len(policies) == 1 else f"{path.stem}-{given}"
                save_gantt(outcome, path.with_stem(stem), given)
            yield reports[-1]

    for row in rows(each(), max(map(len, policies))):
        if str(options.json) != "-":
            print(row, flush=True)
    if options.json:
        _write(options.json, json.dumps({"policies": reports}, indent=2) + "\n")
    return 0


def _simulate(options: argparse.Namespace) -> Simulated:
    alone = EnsembleScenario(
        trials=load_ensemble(options.ensemble, options.devices, options.seed),
        num_devices=options.devices,
        devices_per_node=options.devices_per_node,
        policy="baseline",
        seed=options.seed,
    )
    baseline = alone.run()

    def simulated(policy: Policy) -> tuple[dict[str, Any], Outcome]:
        run = replace(alone, policy=policy)
        outcome = run.run()
        return simulation_report(run, outcome, baseline), outcome

    return simulated


def _replay(options: argparse.Namespace) -> Simulated:
    trace = load_trace(options.trace)
    trials = (
        bftrainer_trials(_MIXES[options.mix])
        if options.ensemble is None
        else load_ensemble(options.ensemble, len(trace.names))
    )

    def simulated(policy: Policy) -> tuple[dict[str, Any], Outcome]:
        run = TraceScenario(
            trace=trace, trials=trials, policy=policy, max_trials=options.max_trials
        )
        outcome = run.run()
        return trace_report(run, outcome), outcome

    return simulated


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


# -- what is shown -------------------------------------------------------------------------------


_COLUMNS = (
    *("policy", "makespan_s", "ratio_to_bound", "speedup_over_baseline", "utilisation", "trials"),
    *("rescales", "rounds", "decisions", "waiting_s", "idle_s", "solver_s.total"),
)


def rows(reports: Iterable[Mapping[str, Any]], longest: int) -> Iterator[str]:
    """A table of policies, line by line: what the reports have of the columns.

    The longest name of a policy is so long.
    """
    widths: dict[str, int] = {}
    for report in reports:
        cells = dict(_flat(report))
        if not widths:
            widths = {title: max(11, len(title)) for title in _COLUMNS if title in cells}
            widths["policy"] = max(11, longest)
            yield "  ".join(f"{title:<{width}}" for title, width in widths.items())
        texts = {title: _shown(cells.get(title, "-")) for title in widths}
        yield "  ".join(f"{texts[title]:<{width}}" for title, width in widths.items())


def lines(report: Mapping[str, Any]) -> list[str]:
    """The report as aligned lines of text."""
    return [f"{name:<28} {_shown(value)}" for name, value in _flat(report)]


def _flat(report: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in report.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def save_gantt(outcome: Outcome, path: Path, name: str) -> None:
    """Save devices over time, coloured by trial, as a page for a browser.

    Raises:
        FleetConfigError: The file can't be written, or its name says that it is something else.
    """
    if path.suffix != ".html":
        raise FleetConfigError(f"{path} would be a page for a browser: please name it *.html.")
    try:
        figure_of(Timeline(name=name, bars=tuple(_bars(outcome)))).write_html(path)
    except OSError as error:
        raise FleetConfigError(f"{path} can't be written: {error.strerror}.") from error


def _bars(outcome: Outcome) -> Iterator[Bar]:
    for span in sorted(outcome.spans, key=lambda span: (span.start_s, span.number)):
        for device in span.devices:
            yield Bar(
                number=span.number,
                row=("", device),
                start_s=span.start_s,
                end_s=span.end_s,
                round=span.round,
                mark=None if span.has_returned else Mark.MOVED,
            )


# -- policies -------------------------------------------------------------------------------------


def _add_policies(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--policy",
        action="append",
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"of {', '.join(POLICIES)}, with options of `optuna_fleet.policies`, as in "
        "elastic:objective=throughput; default elastic. May be given several times",
    )


def _policy_of(text: str) -> Policy:
    """The policy that was asked for, with its options.

    Raises:
        FleetConfigError: There is no such policy, or it has no such option, or not of this value.
    """
    name, _, given = text.partition(":")
    check_choice("--policy", name, POLICIES)
    options = dict(pair.partition("=")[::2] for pair in given.split(",") if pair)
    known = [field.name for field in fields(POLICIES[name])]
    for option in options:
        check_choice(f"an option of {name}", option, known)
    return POLICIES[name](**{option: _value_of(value) for option, value in options.items()})


def _value_of(text: str) -> Any:
    """A number, true, false or null; else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
