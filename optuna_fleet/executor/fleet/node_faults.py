"""Which nodes lose every trial that they get, and so must be left out. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

MAX_TRIALS_LOST = 3
"""So many losses in a row, while another node makes progress, are the node's doing."""


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
