"""A stage's side of the parameter servers of its pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from optuna_fleet.trainer.pipeline_parallel.messages import (
    Pull,
    Push,
    ServerAddress,
    Snapshot,
    StageAddress,
    Tensors,
    Transport,
)


class ServerClient:
    """Pushes waves piece by piece, and puts snapshots together from their pieces.

    Args:
        pieces: Piece -> names of its parameters, for each piece of the stage.
    """

    def __init__(
        self, address: StageAddress, pieces: Mapping[int, Sequence[str]], transport: Transport
    ) -> None:
        self._address = address
        self._pieces = pieces
        self._transport = transport
        self._first, *self._others = pieces
        self._asked = 0
        self._asked_of_others = 0
        self._parts: dict[int, dict[int, Tensors]] = {}

    def push(self, wave: int, updates: Tensors) -> None:
        """Send the sum of a wave's updates."""
        for piece, names in self._pieces.items():
            part = {name: updates[name] for name in names if name in updates}
            push = Push(worker=self._address.worker, wave=wave, updates=part)
            self._send(piece, push)

    def pull(self, clock: int, *, exactly: bool) -> None:
        """Ask for weights of this clock, or newer; once for each clock.

        What may be newer is settled by the first piece; the others are asked for the same then.
        """
        if clock <= self._asked:
            return
        self._asked = clock
        self._ask(self._first, clock, exactly=exactly)
        if exactly:
            self._ask_others(clock)

    def receive(self, snapshot: Snapshot) -> dict[str, Tensor] | None:
        """Return the whole snapshot once all its pieces are there."""
        if snapshot.piece == self._first:
            self._asked = max(self._asked, snapshot.clock)
            self._ask_others(snapshot.clock)
        parts = self._parts.setdefault(snapshot.clock, {})
        parts[snapshot.piece] = snapshot.weights
        if len(parts) < len(self._pieces):
            return None
        del self._parts[snapshot.clock]
        return {name: w for part in parts.values() for name, w in part.items()}

    def _ask_others(self, clock: int) -> None:
        if clock > self._asked_of_others:
            self._asked_of_others = clock
            for piece in self._others:
                self._ask(piece, clock, exactly=True)

    def _ask(self, piece: int, clock: int, *, exactly: bool) -> None:
        self._send(piece, Pull(asker=self._address, clock=clock, exactly=exactly))

    def _send(self, piece: int, message: Push | Pull) -> None:
        self._transport.send(self._address, ServerAddress(piece), message)
