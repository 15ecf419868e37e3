"""What a user gives: checked where it is given, not where it fails."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import math
import numbers
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from optuna_fleet.exceptions import FleetConfigError


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    whole: bool = False,
    optional: bool = False,
) -> None:
    """Check that a value, of Python or NumPy, is a number: not NaN, nor True or False.

    Unless it is to be `whole`, infinity is accepted too; None if it is `optional`.

    Raises:
        FleetConfigError: It is not; the message says what was given and what is wanted.
    """
    if optional and value is None:
        return
    wanted_type: Any = numbers.Integral if whole else numbers.Real
    if isinstance(value, int) and value.bit_length() >= sys.float_info.max_exp:
        raise FleetConfigError(f"`{name}` is an integer that is too large for a float.")
    if (
        not isinstance(value, wanted_type)
        or isinstance(value, bool)
        or math.isnan(value)
        or (least is not None and value < least)
        or (above is not None and value <= above)
        or (most is not None and value > most)
    ):
        limits = {">=": least, ">": above, "<=": most}
        bounds = [f"{sign} {bound}" for sign, bound in limits.items() if bound is not None]
        kind = "a whole number" if whole else "a number"
        wanted = " and ".join([" ".join([kind, *bounds[:1]]), *bounds[1:]])
        or_none = ", or None" if optional else ""
        raise FleetConfigError(f"`{name}` is {value!r}, but must be {wanted}{or_none}.")


def number_of(*, whole: bool = False, **limits: float) -> Callable[[str], Any]:
    """Return a `type=` for argparse: a number within these limits, as `check_number` has them."""

    def number(text: str) -> Any:
        value: Any = text
        with contextlib.suppress(ValueError):
            value = int(text) if whole else float(text)
        try:
            check_number("the value", value, whole=whole, **limits)  # type: ignore[arg-type]
        except FleetConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return value

    return number


def plain(number: Any) -> Any:
    """Return a number as one of Python, which JSON takes, if it is one of NumPy."""
    return number.item() if hasattr(number, "item") else number


def check_that(
    name: str, value: Any, holds: Callable[[Any], object], wanted: str, *, optional: bool = False
) -> None:
    """Check a value that is no number.

    `wanted` says what must be, in words, and an example: it follows "must", and may end in a
    question.

    Raises:
        FleetConfigError: It does not hold.
    """
    if not ((optional and value is None) or holds(value)):
        end = "" if wanted.endswith("?") else "."
        raise FleetConfigError(f"`{name}` is {value!r}, but must {wanted}{end}")


def is_a(*kinds: type) -> Callable[[Any], bool]:
    """For `check_that`: it must be an instance of one of `kinds`."""
    return lambda value: isinstance(value, kinds)


def check_choice(
    name: str, value: Any, choices: Collection[str], *, optional: bool = False
) -> None:
    """Check that a value is one of a few names; see `check_that`."""
    names = (" or " if len(choices) == 2 else ", ").join(map(repr, choices))
    wanted = f"be {names}" if len(choices) == 2 else f"be one of {names}"
    if isinstance(value, str):
        wanted += did_you_mean(value, choices)
    check_that(
        name,
        value,
        lambda given: isinstance(given, str) and given in choices,
        wanted,
        optional=optional,
    )


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a question after the argument that was probably meant, or ""."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean `{near[0]}`?" if near else ""


def path(name: str, given: Any, kind: str = "folder") -> Path:
    """Return the path that a user gave, made absolute; "" would be the working directory.

    Raises:
        FleetConfigError: It is no path.
    """
    wanted = f"be the path of a {kind}, as a string or a Path"
    check_that(name, given, lambda value: isinstance(value, (str, os.PathLike)) and value, wanted)
    try:
        return Path(given).resolve()
    except (OSError, ValueError, TypeError) as error:  # a NUL in it, say
        raise FleetConfigError(f"`{name}` is {given!r}, but must {wanted} ({error}).") from error


def folder(name: str, given: Any) -> Path:
    """Return the folder that a user named, made if need be, for nobody else to read.

    Raises:
        FleetConfigError: It is no path, or can't be a folder.
    """
    resolved = path(name, given)
    try:
        resolved.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise FleetConfigError(
            f"`{name}` is {os.fspath(given)!r}, but must be a folder, or one that can be made "
            f"({error}): name another."
        ) from error
    return resolved
