"""The parameter server of a piece of the model (HetPipe, section 5), and a stage's end of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import assert_never

from optuna_fleet.virtual_workers.stage_messages import (
    Activations,
    Gradients,
    Inputs,
    Message,
    Pull,
    Push,
    ServerAddress,
    Snapshot,
    StageAddress,
    Targets,
    Tensors,
    Transport,
    added,
)
from optuna_fleet.virtual_workers.wsp import check_clocks


class ParameterServer:
    """Adds up waves: a wave's updates are in the weights once all virtual workers pushed it.

    They are added in the order of virtual workers, so weights of a clock do not depend on who was
    faster.

    Args:
        weights: w_0 of the piece; is copied.
        clock_distance: D; what was pushed may be one wave further apart.
    """

    def __init__(
        self,
        *,
        address: ServerAddress,
        weights: Tensors,
        num_workers: int,
        clock_distance: int,
        transport: Transport,
    ) -> None:
        self._address = address
        self._transport = transport
        self._clock_distance = clock_distance
        self._snapshots: dict[int, Tensors] = {
            0: {name: w.detach().clone() for name, w in weights.items()}
        }
        self._pushed = [0] * num_workers
        self._waves: dict[int, dict[int, Tensors]] = {}
        self._parked: list[Pull] = []
        self._seen = [0] * num_workers

    @property
    def clock(self) -> int:
        """Waves that every virtual worker has pushed: c_global."""
        return min(self._pushed)

    @property
    def weights(self) -> Tensors:
        """w_global, at the clock."""
        return self._snapshots[self.clock]

    def receive(self, message: Message) -> None:
        """Take a push, or answer a pull as soon as its weights are there."""
        match message:
            case Push():
                self._push(message)
            case Pull():
                if not self._answer(message):
                    self._parked.append(message)
            case Inputs() | Activations() | Targets() | Gradients() | Snapshot():
                raise AssertionError(f"{self._address} is no stage")
            case _:
                assert_never(message)

    @torch.no_grad()
    def _push(self, push: Push) -> None:
        if push.wave != self._pushed[push.worker]:
            raise AssertionError(
                f"Virtual worker {push.worker} pushed wave {push.wave}, but "
                f"{self._pushed[push.worker]} is next."
            )
        before = self.clock
        self._waves.setdefault(push.wave, {})[push.worker] = push.updates
        self._pushed[push.worker] += 1
        check_clocks(self._pushed, self._clock_distance)
        if self.clock > before:
            self._advance(before)
            self._parked = [pull for pull in self._parked if not self._answer(pull)]

    def _advance(self, wave: int) -> None:
        weights = self._snapshots[wave]
        for _, updates in sorted(self._waves.pop(wave).items()):
            weights = added(weights, updates)
        self._snapshots[wave + 1] = weights
        self._forget()

    def _answer(self, pull: Pull) -> bool:
        if pull.clock > self.clock:
            return False
        clock = pull.clock if pull.exactly else self.clock
        self._seen[pull.asker.worker] = max(self._seen[pull.asker.worker], clock)
        self._reply(pull.asker, clock)
        self._forget()
        return True

    def _reply(self, asker: StageAddress, clock: int) -> None:
        weights = self._snapshots[clock]
        snapshot = Snapshot(piece=self._address.piece, clock=clock, weights=weights)
        self._transport.send(self._address, asker, snapshot)

    def _forget(self) -> None:
        """Virtual workers ask for newer and newer weights."""
        oldest = min(self._seen)
        kept = {c: w for c, w in self._snapshots.items() if c >= oldest or c == self.clock}
        self._snapshots = kept


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
