"""Reads fields of a JSON file; what is wrong is said in one line: where, what, what is allowed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optuna_fleet.exceptions import FleetConfigError

MOST = 10**6
"""Of what is counted one by one: devices, trials, epochs."""

SMALLEST, LARGEST = 1e-15, 1e15
"""Beyond these, sums and quotients of times and rates overflow."""

_SCALE = f"0, or from {SMALLEST:g} to {LARGEST:g}"


class Fields:
    """The fields of one JSON object; `where` is how messages name it."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, Mapping):
            raise FleetConfigError(f"{where} is {_shown(data)}, but must be a JSON object.")
        self._data = data
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

    def get(self, name: str) -> Any:
        """Whatever it is; None if there is no such field."""
        return self._data.get(name)

    def number(
        self,
        name: str,
        *,
        least: float = 0.0,
        above: bool = False,
        most: float = math.inf,
        default: float | None = None,
    ) -> float:
        """A number of at least `least`, or above it, and at most `most`."""
        value = self._get(name, default)
        if _is_number(value) and (least < value <= most or (value == least and not above)):
            return self._in_scale(name, value)
        rule = f"a number {'>' if above else '>='} {least:g}"
        rule += f" and <= {most:g}" if most < math.inf else ""
        raise self.refuse(name, rule)

    def whole(self, name: str, *, least: int, default: int | None = None) -> int:
        """A whole number of at least `least`, and at most `MOST`."""
        value = self._get(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            if value > MOST:
                raise self.refuse(name, f"<= {MOST}")
            return value
        raise self.refuse(name, f"a whole number >= {least}")

    def flag(self, name: str) -> bool:
        """Whether a field is true; it is not if it is not there."""
        value = self._data.get(name, False)
        if isinstance(value, bool):
            return value
        raise self.refuse(name, "true or false")

    def text(self, name: str, *, default: str | None = None) -> str:
        """A text that is not empty."""
        value = self._get(name, default)
        if isinstance(value, str) and value:
            return value
        raise self.refuse(name, "a text")

    def array(self, name: str) -> list[Any]:
        """A list that is not empty."""
        value = self._get(name, None)
        if isinstance(value, list) and value:
            return value
        raise self.refuse(name, "a list that is not empty")

    def numbers(self, name: str, *, length: int) -> list[float]:
        """So many numbers >= 0."""
        value = self.array(name)
        if not all(_is_number(x) and x >= 0 for x in value) or len(value) != length:
            raise self.refuse(name, f"{length} numbers >= 0")
        return [self._in_scale(name, x) for x in value]

    def child(self, name: str) -> Fields:
        """An object within this one."""
        return Fields(self._get(name, None), f"{self._where}: `{name}`")

    def children(self, name: str) -> list[Fields]:
        """A list of objects, not empty."""
        items = self.array(name)
        return [Fields(item, f"{self._where}: `{name}[{k}]`") for k, item in enumerate(items)]

    def names(self) -> list[str]:
        """Names of the fields."""
        return list(self._data)

    def refuse(self, name: str, rule: str) -> FleetConfigError:
        """The error that says what the field must be."""
        value = _shown(self._data.get(name))
        return FleetConfigError(f"{self._where}: `{name}` is {value}, but must be {rule}.")

    def _in_scale(self, name: str, number: float) -> float:
        if number and not SMALLEST <= number <= LARGEST:
            raise self.refuse(name, _SCALE)
        return float(number)

    def _get(self, name: str, default: Any) -> Any:
        if name not in self._data and default is None:
            raise FleetConfigError(
                f"{self._where} has no field `{name}`; its fields are "
                f"{', '.join(map(repr, self._data)) or 'none'}."
            )
        return self._data.get(name, default)


def _is_number(value: Any) -> bool:
    """Whether it is a number, and finite."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return -math.inf < value < math.inf


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
