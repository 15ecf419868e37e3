"""Sums over an epoch that follow a trial from device to device: `FleetTrial.totals`.

What a rank has added dies with it. So it is told to all of them in each step: beside the
gradients; or by itself, without waiting, and by the time that it is looked at it has long arrived.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.gradients.weights import Weights
from optuna_fleet.trainer.groups import group_size
from optuna_fleet.trainer.splitting import tracked

Sums = dict[str, Any]

_LEAST_BYTES = 256
_MOST_BYTES = 2**14  # a matrix of more would take more time than it is worth
_HEAD = struct.Struct("=qq")  # how many bytes there are to tell, and a note
_KINDS = {"torch.float64": np.float64, "torch.int64": np.int64}  # of tensors in totals


class Totals:
    """Named sums: what this rank adds while it reads batches, the sum over all ranks afterwards.

    ``trial.totals["loss"] += loss * trial.shard_size`` adds a number or a tensor. What was never
    added to is 0, and all are 0 when an epoch begins.

    Args:
        weights: Whether batches are being read, and whether this rank's part of one counts.
        device: Where tensors are kept that are no scalars.
        gather: Returns what it is given on each rank.

    Attributes:
        own: What this rank has added.
        begun: What each rank had added when this run, or the epoch, began.
        num_added: How often it has.
    """

    def __init__(
        self, weights: Weights, device: torch.device, gather: Callable[[Sums], list[Sums]]
    ) -> None:
        self.own: Sums = {}
        self.begun: list[Sums] = []
        self.num_added = 0
        self._weights = weights
        self._device = device
        self._gather = gather
        self._sums: Sums | None = None

    def __getitem__(self, name: str) -> Any:
        """This rank's part while it reads batches, else the sum, which all ranks must ask for."""
        if self._weights.is_reading:
            value = self.own.get(name, 0)
            return value.clone() if isinstance(value, torch.Tensor) else value
        self.merge()
        assert self._sums is not None
        return self._sums.get(name, 0)

    def __setitem__(self, name: str, value: Any) -> None:
        if not self._weights.is_reading:
            raise FleetConfigError(
                f"trial.totals[{name!r}] was set outside of a loop over trial.batches(...): it is "
                "0 when an epoch begins, and takes what is added while batches are read. Keep "
                "other variables in trial.state."
            )
        if not isinstance(name, str):
            raise FleetConfigError(
                f"trial.totals[{name!r}] was set, but names are strings: take "
                f"trial.totals[{str(name)!r}]."
            )
        self.num_added += 1
        if self._weights.present.dummy:  # a stand-in sample, which counts for nothing
            self.own.setdefault(name, 0)
        else:
            self.own[name] = self._summand(value, name)

    def mean(self, total: str, weight: str) -> Any:
        """Return ``totals[total] / totals[weight]``; NaN where that is 0."""
        divisor = self[weight]
        return self[total] / divisor if divisor else math.nan

    def begin(self, parts: Sequence[Sums] = (), rank: int = 0, world_size: int = 1) -> None:
        """Begin at 0, or where so many ranks have stopped with these parts."""
        self._sums = None
        if len(parts) != world_size:  # or as before, with the same rounding
            parts = [_added(parts), *[{}] * world_size]
        self.begun = list(parts)
        # All where they are added to: a sum on the CPU takes nothing from a GPU.
        own = {name: _on(self._device, tracked.plain(v)) for name, v in parts[rank].items()}
        self.own = {name: self._summand(value, name) for name, value in own.items()}

    def void(self) -> None:
        """Some ranks may add something."""
        self._sums = None

    def merge(self) -> None:
        """Add up what all ranks have added, unless it is known."""
        if self._sums is None:
            self._weights.begin("trial.totals")
            self._sums = _added(self._gather(self.own))

    def _summand(self, value: Any, name: str) -> Any:
        """A number, or a tensor without its graph and in double precision."""
        if isinstance(value, torch.Tensor) and not value.is_complex():
            value = value.detach().to(self._device if value.shape else value.device)
            return value.double() if value.is_floating_point() else value.long()
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, (int, float)):
            return value
        raise FleetConfigError(
            f"trial.totals[{name!r}] was given {value!r}, but takes numbers and tensors of real "
            "numbers: keep other variables in trial.state."
        )


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _added(parts: Sequence[Sums]) -> Sums:
    """Their sum, in the order of the ranks; scalar tensors become the numbers that they hold."""
    sums: Sums = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums[name] + value if name in sums else value
    return {name: _number(value) for name, value in sums.items()}


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and not value.shape else value


class SumsExchange:
    """Of one rank; all must tell equally often, and hear each before they tell the next."""

    def __init__(self) -> None:
        self.begin_run()

    def begin_run(self) -> None:
        """All ranks have as much room for what they tell."""
        self._room = _LEAST_BYTES

    def tell(self, own: Sums, note: int) -> Told:
        """Begin to tell the others, and to hear of them."""
        row = torch.frombuffer(self._row(own, note), dtype=torch.uint8)
        rows = torch.empty(group_size(), len(row), dtype=torch.uint8)
        return Told(rows, dist.all_gather(list(rows.unbind()), row, async_op=True))

    def beside(self, own: Sums, note: int) -> torch.Tensor:
        """What to add up over the ranks, for `added`, to the same end."""
        row = self._row(own, note)
        rows, begin = bytearray(group_size() * len(row)), dist.get_rank() * len(row)
        rows[begin : begin + len(row)] = row
        return torch.frombuffer(rows, dtype=torch.uint8)

    def added(self, rows: torch.Tensor) -> Told:
        """What the others have told `beside`."""
        return Told(rows.cpu().view(group_size(), -1), None)

    def _row(self, own: Sums, note: int) -> bytearray:
        tensors = [value for value in own.values() if isinstance(value, torch.Tensor)]
        least = 2 * sum(value.nbytes for value in tensors)  # what they take as text
        text = _packed(own) if least <= _MOST_BYTES else b""
        head = _HEAD.pack(len(text) or least, note)
        fitting = text if len(text) <= self._room else b""
        return bytearray(head + fitting.ljust(self._room, b"\0"))

    def hear(self, told: Told) -> int:
        """Wait for it; return the greatest note. There may be room for more next time."""
        told.wait()
        lengths, notes = zip(*told.heads(), strict=True)
        while self._room < min(max(lengths), _MOST_BYTES):
            self._room *= 2
        return int(max(notes))


class Told:
    """What all ranks have told at one step."""

    def __init__(self, rows: torch.Tensor, work: dist.Work | None) -> None:
        self._rows = rows
        self._work = work

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
        room = self._rows.size(1) - _HEAD.size
        return self._work is None and all(length <= room for length, _ in self.heads())

    def heads(self) -> list[tuple[int, int]]:
        """How many bytes each rank had to tell, and its note."""
        return [_HEAD.unpack_from(row) for row in self._rows.numpy()]

    def parts(self) -> list[Sums]:
        """The sums of each rank."""
        ends = [_HEAD.size + length for length, _ in self.heads()]
        rows = [row.tobytes() for row in self._rows.numpy()]
        return [_unpacked(row[_HEAD.size : end]) for row, end in zip(rows, ends, strict=True)]


def _packed(own: Sums) -> bytes:
    """As text, which says numbers exactly and which is safe to read."""
    return json.dumps({name: _plain(value) for name, value in own.items()}).encode()


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return tracked.plain(value)
    return [str(value.dtype), value.shape, value.cpu().numpy().tobytes().hex()]


def _unpacked(text: bytes) -> Sums:
    return {
        name: _tensor(*value) if isinstance(value, list) else value
        for name, value in json.loads(text).items()
    }


def _tensor(kind: str, shape: list[int], numbers: str) -> torch.Tensor:
    flat = np.frombuffer(bytes.fromhex(numbers), dtype=_KINDS[kind])
    return torch.tensor(flat.reshape(shape))
