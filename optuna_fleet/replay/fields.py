"""Reads fields of a JSON file; what is wrong is said in one line: where, what, what is allowed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from optuna_fleet.exceptions import FleetConfigError

MOST = 10**6
"""Of what is counted one by one: devices, trials, epochs."""

SMALLEST, LARGEST = 1e-15, 1e15
"""Beyond these, sums and quotients of times and rates overflow."""

_REQUIRED = object()


class Fields:
    """The fields of one JSON object, `data`; `where` is how messages name it."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, Mapping):
            raise FleetConfigError(f"{where} is {_shown(data)}, but must be a JSON object.")
        self.data = data
        self._where = where

    @classmethod
    def of_file(cls, path: Path) -> Fields:
        """The object a JSON file holds.

        Raises:
            FleetConfigError: The file can't be read, is no JSON, or holds no object.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise FleetConfigError(f"{path} can't be read: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise FleetConfigError(f"{path} is not JSON: {error}.") from error
        return cls(data, str(path))

    def take(
        self, name: str, rule: str, is_right: Callable[[Any], bool], default: Any = _REQUIRED
    ) -> Any:
        """A field for which `is_right` holds; the rule is said where it does not."""
        value = self.data.get(name, default)
        if value is _REQUIRED:
            names = ", ".join(map(repr, self.data)) or "none"
            raise FleetConfigError(f"{self._where} has no field `{name}`; its fields are {names}.")
        if not is_right(value):
            raise self.refuse(name, rule)
        return value

    def number(
        self,
        name: str,
        default: Any = _REQUIRED,
        *,
        is_above: bool = False,
        most: float = LARGEST,
    ) -> float:
        """A number from 0, or above it, to `most`."""
        rule = f"{'' if is_above else '0 or '}a number from {SMALLEST:g} to {most:g}"

        def is_right(x: Any) -> bool:
            return is_number(x) and x <= most and (x > 0 or not is_above)

        return float(self.take(name, rule, is_right, default))

    def whole(self, name: str, default: Any = _REQUIRED, *, most: int = MOST) -> int:
        """A whole number from 1 to `most`."""
        rule = f"a whole number >= 1 and <= {most}"
        return int(self.take(name, rule, lambda x: type(x) is int and 1 <= x <= most, default))

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        """A text that is not empty."""
        return str(self.take(name, "a text", lambda x: isinstance(x, str) and x != "", default))

    def array(self, name: str, rule: str, is_right: Callable[[Any], bool]) -> list[Any]:
        """A list, not empty, of values that are right."""
        found: list[Any] = self.take(
            name, rule, lambda x: isinstance(x, list) and x != [] and all(map(is_right, x))
        )
        return found

    def numbers(self, name: str, length: int | None = None) -> list[float]:
        """Numbers from 0, `length` of them."""
        rule = f"a list of {'numbers' if length is None else f'{length} numbers'} >= 0"
        found = self.array(name, rule, is_number)
        if length not in (None, len(found)):
            raise self.refuse(name, rule)
        return [float(x) for x in found]

    def child(self, name: str) -> Fields:
        """An object within this one."""
        return Fields(self.take(name, "", lambda _: True), f"{self._where}: `{name}`")

    def children(self, name: str) -> list[Fields]:
        """A list of objects, not empty."""
        items = self.array(name, "a list that is not empty", lambda _: True)
        return [Fields(item, f"{self._where}: `{name}[{k}]`") for k, item in enumerate(items)]

    def refuse(self, name: str, rule: str) -> FleetConfigError:
        """The error that says what the field must be."""
        value = _shown(self.data.get(name))
        return FleetConfigError(f"{self._where}: `{name}` is {value}, but must be {rule}.")


def is_number(value: Any) -> bool:
    """Whether it is a number from 0 with which can be reckoned."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return value == 0 or SMALLEST <= value <= LARGEST


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
