"""Numbers that a user gives: checked where they are given, not where they fail."""

from __future__ import annotations

import math
import numbers
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
