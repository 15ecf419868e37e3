"""What keeps failing: counted in a row, and left out once that was too often. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from optuna_fleet.sampler_bridge.compat import fleet_logger

MOST_IN_A_ROW = 3
"""So many failures of a device, an agent, a trainer at its start or the store are too many."""

MAX_TRIALS_LOST = 3
"""So many losses in a row, while another node makes progress, are the node's doing."""


class Faults:
    """What has failed, how often in a row, by its name; and what is left out.

    Attributes:
        left_out: Devices that get no more trials, for their errors or with their node.
        reasons: Why devices and nodes are left out, by their names.
    """

    def __init__(self) -> None:
        self.left_out: set[int] = set()
        self.reasons: dict[str, str] = {}
        self._in_a_row: Counter[str] = Counter()

    def worked(self, name: str) -> None:
        """It did not fail this time."""
        self._in_a_row.pop(name, None)

    def failed(self, name: str) -> int:
        """It has failed; return how often in a row."""
        self._in_a_row[name] += 1
        return self._in_a_row[name]

    def leave_out(self, name: str, devices: Iterable[int], why: str) -> None:
        """A device, or a node with its devices, gets no more trials."""
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

    @property
    def any_lost(self) -> bool:
        """Whether there is anything to count: else it makes no difference who gets on."""
        return bool(self._rows)

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
