"""``optuna-fleet simulate``, ``replay`` and ``trace``: what they take, and what they print."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from optuna_fleet.arguments import check_number, number_of
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.executor.deciding.trials import PARADIGMS
from optuna_fleet.policies import POLICIES, Policy
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
from optuna_fleet.replay.trial_files import MIXES, load_ensemble, load_jobs
from optuna_fleet.replay.workload import MOST, SimulatedTrial

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
    _add_policies(command, all_are=PARADIGMS)
    command.add_argument(
        "--seed",
        type=_SEED,
        default=0,
        help="of what is drawn: noise, pruned trials",
    )
    command.add_argument(
        "--noise",
        type=number_of(least=0, most=10),
        default=0.0,
        help="how wrong the policy's rates are: standard deviation of their logarithm",
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
    _add_policies(command, all_are=["elastic"])
    command.add_argument("--max-trials", type=_COUNT, default=10, help="trials at once")
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


# -- policies -------------------------------------------------------------------------------------


_ALL = "all"
_MOST = 1e9  # of any number; more seconds than this are centuries
_NOT_HERE = {"moves_within_epochs"}
"""Trials of an ensemble move at the ends of epochs, those of a trace at any time."""


def _add_policies(command: argparse.ArgumentParser, *, all_are: Collection[str]) -> None:
    """`--policy`, as often as is wanted, or `all` of some paradigms; and the options of all."""
    command.set_defaults(all_are=all_are)
    command.add_argument(
        "--policy",
        action="append",
        choices=[*POLICIES, _ALL],
        help="default elastic; given several times, or `all`, a table compares them",
    )
    group = command.add_argument_group(
        "options of policies",
        "each is for those of the given policies that have it; --rescale-s is also what moves "
        "cost, in place of the file's",
    )
    for name, default in _options().items():
        if isinstance(default, bool):
            group.add_argument(_flag(name), help=_about(name), action="store_const", const=True)
        else:
            kind = str if isinstance(default, str) else float
            group.add_argument(_flag(name), help=_about(name), metavar="X", type=kind)


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
        for name in (POLICIES if _ALL in names else names)
    }
    if _ALL in names:
        possible = {n: one for n, one in policies.items() if one.paradigm in options.all_are}
        policies = possible or policies
    for name in given:
        if not any(_heeds(policy, name) for policy in policies.values()):
            others = [other for other, kind in POLICIES.items() if name in _names(kind)]
            raise FleetConfigError(
                f"`{_flag(name)}` is given, but not heeded by {' or '.join(policies)}: "
                f"{_NEEDS.get(name, 'it is an option of ' + ', '.join(others))}."
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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _about(name: str) -> str:
    """What the docstrings of the policies say of it, with the names of those that have it."""
    owners = [other for other, kind in POLICIES.items() if name in _names(kind)]
    pattern = re.compile(rf"^ +{name}: (.*?)(?=\n\s*\n|\n +\w+: |\Z)", re.DOTALL | re.MULTILINE)
    texts = (kind.__doc__ or "" for name in owners for kind in POLICIES[name].__mro__)
    said = next((match[1] for text in texts if (match := pattern.search(text))), "")
    whose = "" if len(owners) == len(POLICIES) else f"of {', '.join(owners)}: "
    return re.sub(r"\s+", " ", whose + said).replace("%", "%%")


def _devices(text: str) -> int | dict[str, int]:
    if "=" not in text:
        number: int = _COUNT(text)
        return number
    pairs = [part.rpartition("=") for part in text.split(",")]
    if len({kind for kind, _, _ in pairs if kind}) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} must name each device type once")
    return {kind: _COUNT(count) for kind, _, count in pairs}
