"""Parameter servers (HetPipe, section 5): where they are, what they do, and a stage's end of them.

A server keeps a piece of the model: the largest run of layers that no virtual worker cuts. Every
stage is made of whole pieces, so each gets one update for a wave from each virtual worker. Where
all are cut alike, pieces are stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from optuna_fleet.virtual_workers.stage_messages import (
    Pull,
    Push,
    Snapshot,
    StageAddress,
    Tensors,
    Transport,
    added,
)
from optuna_fleet.virtual_workers.wsp import check_clocks


class Piece(NamedTuple):
    """Layers ``first`` up to, without, ``end``."""

    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """Who is on which rank of a trial.

    Attributes:
        stages: Rank of each stage.
        pieces: Of the model, in order.
        layers: By their names the places of their pieces.
        hosts: Rank of each piece's server, where there are any.
        users: Of each stage, the places of its pieces.
    """

    stages: Mapping[StageAddress, int]
    pieces: tuple[Piece, ...]
    layers: Mapping[str, int]
    hosts: tuple[int, ...]
    users: Mapping[StageAddress, tuple[int, ...]]

    @classmethod
    def of(
        cls,
        ranks: Sequence[Sequence[int]],
        cuts: Sequence[Sequence[int]],
        layer_bytes: Mapping[str, float],
        nodes: Sequence[int],
        *,
        has_servers: bool = True,
    ) -> Directory:
        """A server is beside one of the stages that ask it; one virtual worker alone needs none.

        That is on the node that most of these are on (ED-local, where they can all be on one), and
        where servers have the fewest bytes so far.

        Args:
            ranks: Of the stages of each virtual worker.
            cuts: Where its stages end, without the last.
            layer_bytes: Of the parameters of each layer, by its name.
            nodes: Of each rank.
            has_servers: There are none where pipelines are flushed.
        """
        num_layers = len(layer_bytes)
        ends = sorted({0, num_layers, *(cut for worker in cuts for cut in worker)})
        pieces = tuple(Piece(*pair) for pair in pairwise(ends))
        stages: dict[StageAddress, int] = {}
        users: dict[StageAddress, tuple[int, ...]] = {}
        for worker, own in enumerate(ranks):
            for stage, (first, end) in enumerate(pairwise((0, *cuts[worker], num_layers))):
                within = (i for i, p in enumerate(pieces) if first <= p.first and p.end <= end)
                users[StageAddress(worker, stage)] = tuple(within)
                stages[StageAddress(worker, stage)] = own[stage]
        load = dict.fromkeys(stages.values(), 0.0)
        hosts: list[int] = []
        for place, piece in enumerate(pieces if has_servers and len(ranks) > 1 else ()):
            near = [stages[address] for address, used in users.items() if place in used]
            on = [nodes[rank] for rank in near]
            host = min(near, key=lambda rank: (-on.count(nodes[rank]), load[rank]))
            load[host] += sum([*layer_bytes.values()][piece.first : piece.end])
            hosts.append(host)
        places = (i for i, piece in enumerate(pieces) for _ in range(piece.first, piece.end))
        layers = dict(zip(layer_bytes, places, strict=True))
        return cls(stages=stages, pieces=pieces, layers=layers, hosts=tuple(hosts), users=users)

    def address_of(self, rank: int) -> StageAddress:
        """Of the stage on a rank."""
        return next(address for address, its in self.stages.items() if its == rank)

    def near(self, rank: int) -> list[int]:
        """Ranks of the stages before and after."""
        worker, stage = self.address_of(rank)
        beside = (StageAddress(worker, stage - 1), StageAddress(worker, stage + 1))
        return [self.stages[address] for address in beside if address in self.stages]

    def piece_of(self, name: str) -> int:
        """The piece of a layer, or of something in it."""
        return self.layers[name.partition(".")[0]]

    def ranks_with(self, piece: int) -> list[int]:
        """Of the stages that have a piece, of each virtual worker one."""
        return [rank for address, rank in self.stages.items() if piece in self.users[address]]

    def hosted(self, rank: int) -> list[int]:
        """Pieces whose servers are on a rank."""
        return [piece for piece, host in enumerate(self.hosts) if host == rank]

    def servers_of(self, rank: int) -> list[int]:
        """Other ranks that have servers of its stage."""
        used = self.users[self.address_of(rank)] if self.hosts else ()
        return sorted({self.hosts[piece] for piece in used} - {rank})

    def clients_of(self, rank: int) -> list[int]:
        """Other ranks whose stages have servers on it."""
        return sorted(other for other in self.stages.values() if rank in self.servers_of(other))

    def name_of(self, rank: int) -> str:
        """For people."""
        worker, stage = self.address_of(rank)
        several = 1 + max(address.worker for address in self.stages)
        of = f" of virtual worker {worker}" if several > 1 else ""
        return f"stage {stage}{of}"


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
        piece: int,
        weights: Tensors,
        num_workers: int,
        clock_distance: int,
        transport: Transport,
    ) -> None:
        self._piece = piece
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

    def receive(self, message: Push | Pull) -> None:
        """Take a push, or answer a pull as soon as its weights are there."""
        if isinstance(message, Push):
            self._push(message)
        elif not self._answer(message):
            self._parked.append(message)

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
            weights = self._snapshots[before]
            for _, updates in sorted(self._waves.pop(before).items()):
                weights = added(weights, updates)
            self._snapshots[before + 1] = weights
            self._forget()
            self._parked = [pull for pull in self._parked if not self._answer(pull)]

    def _answer(self, pull: Pull) -> bool:
        if pull.clock > self.clock:
            return False
        clock = pull.clock if pull.exactly else self.clock
        self._seen[pull.worker] = max(self._seen[pull.worker], clock)
        found = Snapshot(self._piece, clock, self._snapshots[clock])
        self._transport.send(StageAddress(pull.worker, pull.stage), found)
        self._forget()
        return True

    def _forget(self) -> None:
        """Virtual workers ask for newer and newer weights."""
        oldest = min(self._seen)
        kept = {c: w for c, w in self._snapshots.items() if c >= oldest or c == self.clock}
        self._snapshots = kept


class ServerClient:
    """Pushes waves piece by piece, and puts snapshots together from their pieces."""

    def __init__(self, address: StageAddress, directory: Directory, transport: Transport) -> None:
        self._address = address
        self._piece_of = directory.piece_of
        self._transport = transport
        self._first, *self._others = directory.users[address]
        self._asked = dict.fromkeys(directory.users[address], 0)
        self._parts: dict[int, dict[int, Tensors]] = {}

    def push(self, wave: int, updates: Tensors) -> None:
        """Send the sum of a wave's updates."""
        for piece in self._asked:
            part = {name: u for name, u in updates.items() if self._piece_of(name) == piece}
            self._transport.ask(Push(piece, self._address.worker, wave, part))

    def pull(self, clock: int, *, exactly: bool) -> None:
        """Ask for weights of this clock, or newer; once for each clock.

        What may be newer is settled by the first piece; the others are asked for the same then.
        """
        self._ask([self._first], clock, exactly=exactly)
        if exactly:
            self._ask(self._others, clock, exactly=True)

    def receive(self, snapshot: Snapshot) -> dict[str, Tensor] | None:
        """Return the whole snapshot once all its pieces are there."""
        if snapshot.piece == self._first:
            self._asked[self._first] = max(self._asked[self._first], snapshot.clock)
            self._ask(self._others, snapshot.clock, exactly=True)
        parts = self._parts.setdefault(snapshot.clock, {})
        parts[snapshot.piece] = snapshot.weights
        if len(parts) < len(self._asked):
            return None
        del self._parts[snapshot.clock]
        return {name: w for part in parts.values() for name, w in part.items()}

    def _ask(self, pieces: Sequence[int], clock: int, *, exactly: bool) -> None:
        for piece in pieces:
            if clock > self._asked[piece]:
                self._asked[piece] = clock
                self._transport.ask(Pull(piece, *self._address, clock, exactly))
