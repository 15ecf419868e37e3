"""Which devices belong to the fleet now. Pure, and a part of the controller."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from optuna_fleet.alloc.problem import SEVERAL
from optuna_fleet.resources import Device


class Presence:
    """The devices that have joined, each until it is gone.

    One that is lost stays: a successor of its trainer is expected. What is known of a device is
    kept when it is gone, for the sake of runs that were on it.
    """

    def __init__(self) -> None:
        self._known: dict[int, Device] = {}
        self._here: set[int] = set()
        self._num_by_kind: Counter[str] = Counter()
        self._sizes: dict[str, Counter[int]] = defaultdict(Counter)  # of nodes, by type
        self._fewest: dict[tuple[str, int], tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._here)

    def __iter__(self) -> Iterator[int]:
        return iter(self._here)

    def join(self, device: Device) -> bool:
        """A device joins, for the first time or again; return whether there is one more now."""
        is_more = not self.leave(device.index)
        self._known[device.index] = device
        self._here.add(device.index)
        self._count(device, 1)
        return is_more

    def leave(self, device: int) -> bool:
        """A device is gone; return whether that is news."""
        if device not in self._here:
            return False
        self._here.remove(device)
        self._count(self._known[device], -1)
        return True

    def _count(self, device: Device, change: int) -> None:
        self._num_by_kind[device.kind] += change
        self._sizes[device.kind][device.node] += change
        self._fewest.clear()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Device types, in ascending order."""
        return tuple(sorted(kind for kind, number in self._num_by_kind.items() if number))

    @property
    def num_by_kind(self) -> dict[str, int]:
        """Number of devices of each type, in ascending order."""
        return {kind: self._num_by_kind[kind] for kind in self.kinds}

    @property
    def widest(self) -> int:
        """Most devices of one type."""
        return max(self._num_by_kind.values(), default=0)

    def fewest_nodes(self, kind: str, width: int) -> tuple[int, ...]:
        """On how few nodes 1, 2, ... devices of a type can be; 1 where there are not so many."""
        key = kind, width
        if key not in self._fewest:
            sizes = sorted(filter(None, self._sizes[kind].values()), reverse=True)
            nodes = [n for n, size in enumerate(sizes, 1) for _ in range(size)][:width]
            self._fewest[key] = (*nodes, *[1] * (width - len(nodes)))
        return self._fewest[key]

    def nodes_of(self, devices: Iterable[int]) -> frozenset[int]:
        """The nodes of devices that have joined at any time."""
        return frozenset(self._known[device].node for device in devices)

    def kind_of(self, device: int) -> str:
        """Type of a device that has joined at any time."""
        return self._known[device].kind

    def num_of_each(self, devices: Iterable[int]) -> Counter[str]:
        """How many of these devices, which have joined at any time, are of each type."""
        return Counter(map(self.kind_of, devices))

    def kind_of_all(self, devices: Iterable[int]) -> str:
        """Type of devices that have joined at any time, at least one; or `SEVERAL`."""
        kinds = self.num_of_each(devices)
        return SEVERAL if len(kinds) > 1 else next(iter(kinds))

    def place_of(self, device: int) -> tuple[int, str]:
        """Node and type of a device that has joined at any time."""
        return self._known[device].node, self._known[device].kind
