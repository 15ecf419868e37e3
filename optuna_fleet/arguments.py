"""What a user gives: checked where it is given, not where it fails."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable
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
    """Check one argument.

    Args:
        name: What the user calls it.
        value: What was given; NumPy's numbers will do, True and False will not.
        least: It must be this or more.
        above: It must be more than this.
        most: It must be this or less.
        whole: It must be a whole number; otherwise infinity will do, but NaN will not.
        optional: None will do.

    Raises:
        FleetConfigError: It won't do; the message says what was given and what is wanted.
    """
    if optional and value is None:
        return
    wanted_type: Any = numbers.Integral if whole else numbers.Real
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


def check_that(
    name: str, value: Any, holds: Callable[[Any], bool], wanted: str, *, optional: bool = False
) -> None:
    """Check one argument that is no number.

    Args:
        name: What the user calls it.
        value: What was given.
        holds: Whether it will do.
        wanted: What is wanted, in words, and an example; follows "must".
        optional: None will do.

    Raises:
        FleetConfigError: It won't do.
    """
    if not ((optional and value is None) or holds(value)):
        raise FleetConfigError(f"`{name}` is {value!r}, but must {wanted}.")


def is_a(*kinds: type) -> Callable[[Any], bool]:
    """For `check_that`: it must be an instance of one of `kinds`."""
    return lambda value: isinstance(value, kinds)


def folder(name: str, path: Any) -> Path:
    """Return the folder that a user named, made if need be, for nobody else to read.

    Raises:
        FleetConfigError: It is no path, or can't be a folder.
    """
    check_that(
        name, path, is_a(str, os.PathLike), "be the path of a folder, as a string or a Path"
    )
    resolved = Path(path).resolve()
    try:
        resolved.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise FleetConfigError(
            f"`{name}` is {os.fspath(path)!r}, but must be a folder, or one that can be made "
            f"({error}): name another."
        ) from error
    return resolved
