"""Which nodes lose every trial that they get, and so must be left out. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

MAX_TRIALS_LOST = 3
"""So many trials lost in a row, while another node makes progress, are the node's doing."""


@dataclass(slots=True)
class _Row:
    """Trials lost since the last progress on a node, and the nodes that made some since then."""

    trials: set[int] = field(default_factory=set)
    progressed: set[str] = field(default_factory=set)
    cause: str = ""


class NodeFaults:
    """Counts, for each node of one call, different trials that were lost there in a row.

    One trial that is lost again and again may be to blame itself; so may be the objective, if no
    other node makes progress either.
    """

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}

    def lost(self, node: str, trial: int, cause: str) -> None:
        """A trial was lost there, by no doing of its own that is known."""
        row = self._rows.setdefault(node, _Row())
        row.trials.add(trial)
        row.cause = cause

    def progressed(self, nodes: Iterable[str]) -> None:
        """A trial got on there: it ended an epoch, or ended."""
        for node in nodes:
            self._rows.pop(node, None)
            for row in self._rows.values():
                row.progressed.add(node)

    def take_bad(self, there: Collection[str]) -> list[tuple[str, str]]:
        """Return each node that is to be left out, and why; it is named once.

        Args:
            there: The nodes that get trials.
        """
        bad = [
            (node, _why(row))
            for node, row in self._rows.items()
            if len(row.trials) >= MAX_TRIALS_LOST and row.progressed.intersection(there)
        ]
        for node, _ in bad:
            del self._rows[node]
        return bad


def _why(row: _Row) -> str:
    trials = ", ".join(map(str, sorted(row.trials)))
    return (
        f"{len(row.trials)} trials in a row ({trials}) were lost there, while others make "
        f"progress; the last one because {row.cause}"
    )
