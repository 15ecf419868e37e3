"""Where the parts of the arena are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """Where the parts of an arena are: memory from 0 on, the disk from ``disk_begin`` on."""

    memory_bytes: int
    disk_begin: int
    disk_bytes: int

    @property
    def num_files(self) -> int:
        """How many files that are: one, or two."""
        return 2 if self.disk_bytes else 1

    def is_on_disk(self, address: int) -> bool:
        """Returns whether an address is one of the disk."""
        return address >= self.disk_begin
