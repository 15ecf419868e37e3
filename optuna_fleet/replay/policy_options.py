"""Policies and their options on the command line, as `optuna_fleet.policies` has them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from optuna_fleet.arguments import check_number
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.policies import POLICIES, Policy

_ALL = "all"
_MOST = 1e9  # of any number; more seconds than this are centuries
_NOT_HERE = {"moves_within_epochs"}
"""Trials of an ensemble move at the ends of epochs, those of a trace at any time."""


def add_policies(command: argparse.ArgumentParser, *, all_are: Collection[str]) -> None:
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


def policies_given(options: argparse.Namespace) -> dict[str, Policy]:
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
