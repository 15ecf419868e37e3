"""``optuna-fleet simulate``, ``replay`` and ``trace``: what they take, and what they print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from optuna_fleet.arguments import check_number, number_of
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.policies import POLICIES, Policy
from optuna_fleet.replay.progress import Outcome
from optuna_fleet.replay.scenarios import (
    EnsembleScenario,
    TraceScenario,
    simulation_report,
    trace_report,
)
from optuna_fleet.replay.synthetic import SUMMIT_NODES, synthetic_trace
from optuna_fleet.replay.trace import load_trace, save_trace, trace_statistics
from optuna_fleet.replay.trial_files import MIXES, load_ensemble, load_jobs
from optuna_fleet.replay.workload import MOST, SimulatedTrial
from optuna_fleet.visualization.timeline import Bar, Mark, Timeline, figure_of

_SEED = number_of(least=0, most=2**63, whole=True)
_NODES = number_of(least=1, most=SUMMIT_NODES, whole=True)
_COUNT = number_of(least=1, most=MOST, whole=True)
Simulated = Callable[[Policy], tuple[dict[str, Any], Outcome]]
"""What became of a policy, and how."""


def add_simulate(commands: Any) -> None:
    """Add the command to the command line."""
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
        "--devices-per-node", type=_COUNT, default=4, metavar="N", help="default 4"
    )
    _add_policies(command)
    command.add_argument(
        "--seed",
        type=_SEED,
        default=0,
        help="of what is drawn: which trials are pruned",
    )
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
        "jobs", type=Path, nargs="?", metavar="JOBS.json", help="default BFTrainer's"
    )
    command.add_argument("--mix", choices=list(MIXES), default="hpo")
    _add_policies(command)
    command.add_argument("--max-trials", type=_COUNT, default=10, help="trials at once")
    _add_outputs(command, _replay)


def add_trace(commands: Any) -> None:
    """Add the command to the command line."""
    command = commands.add_parser(
        "trace", help="make up a trace of idle nodes like those of Summit, for `replay`"
    )
    command.add_argument("trace", type=Path, metavar="TRACE.npz")
    command.add_argument(
        "--nodes",
        type=_NODES,
        default=1024,
        metavar="N",
        help="default 1024",
    )
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
        "--gantt",
        type=Path,
        metavar="OUT.html",
        help="devices over time, for a browser",
    )
    command.set_defaults(run=_run_and_report, scenario=run)


# -- what they do ---------------------------------------------------------------------------------


def _run_and_report(options: argparse.Namespace) -> int:
    policies = _policies_given(options)
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


def _simulate(options: argparse.Namespace) -> Simulated:
    trials = load_ensemble(options.ensemble, options.devices, options.seed)
    alone = EnsembleScenario(
        trials=_with_costs(trials, options.rescale_s),
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
    trials = _with_costs(load_jobs(options.jobs, options.mix), options.rescale_s)

    def simulated(policy: Policy) -> tuple[dict[str, Any], Outcome]:
        run = TraceScenario(
            trace=trace,
            trials=trials,
            policy=policy,
            max_trials=options.max_trials,
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


# -- what is shown -------------------------------------------------------------------------------


_COLUMNS = (
    *("policy", "makespan_s", "ratio_to_bound", "speedup_over_baseline", "utilisation", "trials"),
    *("rescales", "rounds", "decisions", "waiting_s", "idle_s", "solver_s.total"),
)


def rows(reports: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A table of policies, line by line: what the reports have of the columns."""
    titles: list[str] = []
    for report in reports:
        cells = dict(_flat(report))
        if not titles:
            titles = [title for title in _COLUMNS if title in cells]
            yield "  ".join(f"{title:<11}" for title in titles)
        texts = {title: _shown(cells.get(title, "-")) for title in titles}
        yield "  ".join(f"{text:<{max(11, len(title))}}" for title, text in texts.items())


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


_MOST = 1e9  # of any number; more seconds than this are centuries
_NOT_HERE = {"moves_within_epochs"}
"""Trials of an ensemble move at the ends of epochs, those of a trace at any time."""


def _add_policies(command: argparse.ArgumentParser) -> None:
    """`--policy`, as often as is wanted, and the options of all policies."""
    command.add_argument(
        "--policy",
        action="append",
        choices=list(POLICIES),
        help="default elastic; given several times, a table compares them",
    )
    group = command.add_argument_group(
        "options of policies",
        "each is for those of the given policies that have it, as in `optuna_fleet.policies`; "
        "--rescale-s is also what moves cost, in place of the file's",
    )
    for name, default in _options().items():
        owners = _owners(name)
        whose = "of all" if len(owners) == len(POLICIES) else f"of {', '.join(owners)}"
        if isinstance(default, bool):
            group.add_argument(_flag(name), help=whose, action="store_const", const=True)
        else:
            kind = str if isinstance(default, str) else float
            group.add_argument(_flag(name), help=whose, metavar="X", type=kind)


def _policies_given(options: argparse.Namespace) -> dict[str, Policy]:
    """The policies that were asked for, with their options, by name.

    Raises:
        FleetConfigError: An option is out of range, or none of the policies heeds it.
    """
    names = list(dict.fromkeys(options.policy or ["elastic"]))
    given = {n: value for n in _options() if (value := getattr(options, n)) is not None}
    for name, value in given.items():
        if isinstance(value, float):
            check_number(_flag(name), value, least=0, most=_MOST)
    policies = {
        name: POLICIES[name](**{n: given[n] for n in given.keys() & _names(POLICIES[name])})
        for name in names
    }
    for name in given:
        if not any(_heeds(policy, name) for policy in policies.values()):
            raise FleetConfigError(
                f"`{_flag(name)}` is given, but not heeded by {' or '.join(policies)}: "
                f"{_NEEDS.get(name, 'it is an option of ' + ', '.join(_owners(name)))}."
            )
    return policies


_NEEDS = {
    "alpha": "it is for policies that plan in rounds, with --paradigm global",
    "forward_looking_s": "it is for elastic with another --objective than makespan",
}


def _heeds(policy: Policy, name: str) -> bool:
    if name == "alpha":
        return policy.paradigm == "global"
    if name == "forward_looking_s":
        return getattr(policy, "objective", "makespan") != "makespan"
    return name in _names(type(policy))


def _names(kind: type[Policy]) -> set[str]:
    return {field.name for field in fields(kind)} - _NOT_HERE


def _options() -> dict[str, Any]:
    """Those of all policies, with the default of the first that has it."""
    found: dict[str, Any] = {}
    for kind in POLICIES.values():
        for field in fields(kind):
            if field.name in _names(kind):
                found.setdefault(field.name, field.default)
    return found


def _owners(name: str) -> list[str]:
    """The policies that have this option."""
    return [policy for policy, kind in POLICIES.items() if name in _names(kind)]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _devices(text: str) -> int | dict[str, int]:
    if "=" not in text:
        number: int = _COUNT(text)
        return number
    pairs = [part.rpartition("=") for part in text.split(",")]
    if len({kind for kind, _, _ in pairs if kind}) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} must name each device type once")
    return {kind: _COUNT(count) for kind, _, count in pairs}
