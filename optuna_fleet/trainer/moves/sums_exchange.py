"""What each rank has added to ``trial.totals``, told to all of them while they train.

A rank that dies takes its part along. So it is told in each step: without waiting, by the time
that it is looked at it has long arrived.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from optuna_fleet.trainer.groups import group_size
from optuna_fleet.trainer.splitting import tracked

Sums = dict[str, Any]

_LEAST_BYTES = 1024
_HEAD_BYTES = 16  # the length of what follows, and a note
_KINDS = {str(kind): kind for kind in (torch.float64, torch.int64)}  # of tensors in totals


class SumsExchange:
    """Of one rank; all must tell equally often, and look at each before they tell the next."""

    def __init__(self) -> None:
        self.begin_run()

    def begin_run(self) -> None:
        """All ranks have as much room for what they tell."""
        self._room = _LEAST_BYTES

    def tell(self, own: Sums, note: int) -> Told:
        """Begin to tell the others, and to hear of them.

        Args:
            own: This rank's sums.
            note: A number besides.
        """
        text = _packed(own)
        row = torch.zeros(_HEAD_BYTES + self._room, dtype=torch.uint8)
        row[:_HEAD_BYTES].view(torch.int64)[:] = torch.tensor([len(text), note])
        if len(text) <= self._room:
            row[_HEAD_BYTES : _HEAD_BYTES + len(text)] = torch.frombuffer(
                bytearray(text), dtype=torch.uint8
            )
        rows = torch.empty(group_size(), len(row), dtype=torch.uint8)
        work = dist.all_gather(list(rows.unbind()), row, async_op=True)
        assert work is not None
        return Told(work, rows)

    def hear(self, told: Told) -> bool:
        """Wait for it; return whether there was room for all. If not, there is next time."""
        told.wait()
        most = max(told.lengths())
        while self._room < most:
            self._room *= 2
        return told.is_whole()


class Told:
    """What all ranks have told at one step."""

    def __init__(self, work: dist.Work, rows: torch.Tensor) -> None:
        self._work: dist.Work | None = work
        self._rows = rows

    def wait(self) -> None:
        """Until it is there.

        Raises:
            RuntimeError: A rank is gone.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None

    def has_arrived(self) -> bool:
        """Whether it is there, as a whole; waits for nobody."""
        if self._work is not None and not self._work.is_completed():
            return False
        with suppress(RuntimeError):  # a rank is gone
            self.wait()
        return self._work is None and self.is_whole()

    def lengths(self) -> list[int]:
        """Bytes that each rank had to tell."""
        return [length for length, _ in self._heads()]

    def greatest_note(self) -> int:
        """The greatest number that any rank has told besides."""
        return max(note for _, note in self._heads())

    def _heads(self) -> list[list[int]]:
        heads: list[list[int]] = self._rows[:, :_HEAD_BYTES].clone().view(torch.int64).tolist()
        return heads

    def is_whole(self) -> bool:
        """Whether there was room for what each rank had to tell."""
        return max(self.lengths()) <= self._rows.size(1) - _HEAD_BYTES

    def parts(self) -> list[Sums]:
        """The sums of each rank."""
        ends = [_HEAD_BYTES + length for length in self.lengths()]
        rows = [row.numpy().tobytes() for row in self._rows]
        return [_unpacked(row[_HEAD_BYTES:end]) for row, end in zip(rows, ends, strict=True)]


def _packed(own: Sums) -> bytes:
    """As text, which says numbers exactly and which is safe to read."""
    plain = {name: tracked.plain(value) for name, value in own.items()}
    kinds = {
        name: [str(value.dtype), value.tolist()] if isinstance(value, torch.Tensor) else value
        for name, value in plain.items()
    }
    return json.dumps(kinds).encode()


def _unpacked(text: bytes) -> Sums:
    return {
        name: torch.tensor(value[1], dtype=_KINDS[value[0]]) if isinstance(value, list) else value
        for name, value in json.loads(text).items()
    }
