"""What keeps failing: counted in a row, and left out once that was too often. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

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


class NodeFaults:
    """Counts, for each node of one call, trials that were lost there in a row.

    One that is lost again and again may be to blame itself, and counts once, unless it gets on
    elsewhere in between; so may be the objective, if no other node makes progress.
    """

    def __init__(self) -> None:
        # By node, since it last got on: trials, each with how often it had got on, and why; and
        # who has got on since the first.
        self._lost: dict[str, dict[tuple[int, int], str]] = {}
        self._steps = Counter[int]()
        self._others: dict[str, set[str]] = {}

    @property
    def any_lost(self) -> bool:
        """Whether there is anything to count: else it makes no difference who gets on."""
        return bool(self._lost)

    def lost(self, node: str, trial: int, cause: str) -> None:
        """A trial was lost there, by no doing of its own that is known."""
        lost = self._lost.setdefault(node, {})
        key = trial, self._steps[trial]
        lost.pop(key, None)  # so that it is the last one
        lost[key] = cause
        self._others.setdefault(node, set())

    def progressed(self, nodes: Iterable[str], trial: int) -> None:
        """A trial got on there: it ended an epoch, or ended."""
        self._steps[trial] += 1
        for node in nodes:
            self._forget(node)
            for others in self._others.values():
                others.add(node)

    def take_bad(self, there: Collection[str]) -> list[tuple[str, str]]:
        """Return each node that is to be left out, and why; it is named once."""
        bad = [
            (node, _why(lost))
            for node, lost in self._lost.items()
            if len(lost) >= MAX_TRIALS_LOST and self._others[node].intersection(there)
        ]
        for node, _ in bad:
            self._forget(node)
        return bad

    def _forget(self, node: str) -> None:
        self._lost.pop(node, None)
        self._others.pop(node, None)


def _why(lost: Mapping[tuple[int, int], str]) -> str:
    trials, (*_, cause) = ", ".join(str(trial) for trial, _ in lost), lost.values()
    return (
        f"trials {trials} were lost there in a row, while others make progress; the last one "
        f"because {cause}"
    )
