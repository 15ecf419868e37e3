"""Which devices fail by themselves, and which nodes lose every trial that they get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.sampler_bridge.compat import fleet_logger

_MAX_IN_A_ROW = 3

MAX_TRIALS_LOST = 3
"""So many losses in a row, while another node makes progress, are the node's doing."""


class DeviceFaults:
    """Counts the errors of devices themselves, in a row for each of them.

    Attributes:
        left_out: Those that get no more trials, for these errors or with their node.
        reasons: Why devices and nodes are left out, by their names.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[int, int] = {}
        self.left_out: set[int] = set()
        self.reasons: dict[str, str] = {}

    def worked(self, device: int) -> None:
        """A trial has left a device without such an error."""
        self._in_a_row.pop(device, None)

    def failed(
        self, device: int, problem: str, *, there: Iterable[int], is_starting: bool = False
    ) -> bool:
        """A device has failed; return whether it is left out from now on.

        It may be the last of those that are `there`, if no other node `is_starting`.

        Raises:
            LaunchError: It was the last.
        """
        number = self._in_a_row[device] = self._in_a_row.get(device, 0) + 1
        if number < _MAX_IN_A_ROW:
            fleet_logger.warning(
                f"Device {device} itself has failed, {number} in a row: {problem}"
            )
            return False
        why = f"it has failed {number} times in a row, the last time with: {problem}"
        self.leave_out([device], f"device {device}", why)
        if not is_starting and self.left_out.issuperset(there):
            raise LaunchError(
                f"No device is left: each has failed {_MAX_IN_A_ROW} times in a row, the last one "
                f"with: {problem}"
            )
        return True

    def leave_out(self, devices: Iterable[int], name: str, why: str) -> None:
        """These get no more trials: a device, or a whole node."""
        fleet_logger.warning(f"{name[0].upper()}{name[1:]} is left out from now on: {why}")
        self.left_out.update(devices)
        self.reasons[name] = why


@dataclass(slots=True)
class _Row:
    """Losses since the last progress on a node, by trial; which nodes and trials got on since."""

    trials: Counter[int] = field(default_factory=Counter)
    progressed: set[str] = field(default_factory=set)
    cleared: set[int] = field(default_factory=set)
    cause: str = ""

    @property
    def number(self) -> int:
        """A trial that may be to blame itself counts once."""
        return sum(n if trial in self.cleared else 1 for trial, n in self.trials.items())


class NodeFaults:
    """Counts, for each node of one call, trials that were lost there in a row.

    One trial that is lost again and again may be to blame itself, unless it gets on elsewhere; so
    may be the objective, if no other node makes progress either.
    """

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}

    def lost(self, node: str, trial: int, cause: str) -> None:
        """A trial was lost there, by no doing of its own that is known."""
        row = self._rows.setdefault(node, _Row())
        row.trials[trial] += 1
        row.cause = cause

    def progressed(self, nodes: Iterable[str], trial: int) -> None:
        """A trial got on there: it ended an epoch, or ended."""
        for node in nodes:
            self._rows.pop(node, None)
            for row in self._rows.values():
                row.progressed.add(node)
                row.cleared.add(trial)

    def take_bad(self, there: Collection[str]) -> list[tuple[str, str]]:
        """Return each node that is to be left out, and why; it is named once."""
        bad = [
            (node, _why(row))
            for node, row in self._rows.items()
            if row.number >= MAX_TRIALS_LOST and row.progressed.intersection(there)
        ]
        for node, _ in bad:
            del self._rows[node]
        return bad


def _why(row: _Row) -> str:
    trials = ", ".join(map(str, sorted(row.trials)))
    return (
        f"trials were lost there {row.trials.total()} times in a row ({trials}), while others "
        f"make progress; the last one because {row.cause}"
    )
