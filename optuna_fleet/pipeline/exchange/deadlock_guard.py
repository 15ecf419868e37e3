"""Keeps nodes from waiting for each other in a circle while they change from one plan to the next.

Within a plan every wait leads to a node that ranks before. A circle needs a node that is waited
for by one plan and waits by another, for the same chunk: whichever comes second is refused.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable


class DeadlockGuard:
    """What is fetched and given at the moment, by versions of the plan; for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fetched: dict[Hashable, int] = {}
        self._given: Counter[tuple[Hashable, int]] = Counter()

    def fetch(self, key: Hashable, version: int) -> bool:
        """Returns whether we may wait for the chunk by this plan; if so, end with ``fetched``."""
        with self._lock:
            if any(asked == key and other != version for asked, other in self._given):
                return False
            self._fetched[key] = version
            return True

    def fetched(self, key: Hashable) -> None:
        """It is no longer waited for."""
        with self._lock:
            del self._fetched[key]

    def give(self, key: Hashable, version: int) -> bool:
        """Returns whether a node may wait for us by this plan; if so, end with ``given``."""
        with self._lock:
            if self._fetched.get(key, version) != version:
                return False
            self._given[key, version] += 1
            return True

    def given(self, key: Hashable, version: int) -> None:
        """That node no longer waits."""
        with self._lock:
            self._given[key, version] -= 1
            if not self._given[key, version]:
                del self._given[key, version]
