"""Who is in which process: stages of virtual workers, and parameter servers beside them.

A server keeps a piece of the model: the largest run of layers that no virtual worker cuts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from optuna_fleet.virtual_workers.stage_messages import StageAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """Ranks of a trial.

    Attributes:
        stages: Rank of each stage.
        pieces: Of the model, in which virtual workers share weights.
        hosts: Rank of each piece's parameter server, where there are any.
        users: Pieces of each stage, by their place.
    """

    stages: Mapping[StageAddress, int]
    pieces: tuple[Piece, ...]
    hosts: tuple[int, ...]
    users: Mapping[StageAddress, tuple[int, ...]]

    @classmethod
    def of(
        cls,
        ranks: Sequence[Sequence[int]],
        cuts: Sequence[Sequence[int]],
        layer_bytes: Sequence[float],
        nodes: Sequence[int],
        *,
        has_servers: bool,
    ) -> Directory:
        """Who is where.

        A server is beside one of the stages that ask it, on the node that most of these are on
        (ED-local, where they can all be on one), and where servers have the fewest bytes so far.

        Args:
            ranks: Of the stages of each virtual worker.
            cuts: Where its stages end, without the last.
            layer_bytes: Of the parameters of each layer.
            nodes: Of each rank.
            has_servers: Whether there are any.
        """
        stages = {
            StageAddress(worker, stage): rank
            for worker, own in enumerate(ranks)
            for stage, rank in enumerate(own)
        }
        pieces = pieces_of(cuts, len(layer_bytes))
        users: dict[StageAddress, tuple[int, ...]] = {}
        for worker, stage in stages:
            bounds = (0, *cuts[worker], len(layer_bytes))
            within = pieces_within(pieces, bounds[stage], bounds[stage + 1])
            users[StageAddress(worker, stage)] = tuple(map(pieces.index, within))
        load = dict.fromkeys(stages.values(), 0.0)
        hosts: list[int] = []
        for place, piece in enumerate(pieces if has_servers else ()):
            near = [stages[address] for address, used in users.items() if place in used]
            on = [nodes[rank] for rank in near]
            host = min(near, key=lambda rank: (-on.count(nodes[rank]), load[rank]))
            load[host] += sum(layer_bytes[piece.first : piece.end])
            hosts.append(host)
        return cls(stages=stages, pieces=pieces, hosts=tuple(hosts), users=users)

    def address_of(self, rank: int) -> StageAddress:
        """Of the stage on a rank."""
        return next(address for address, its in self.stages.items() if its == rank)

    def near(self, rank: int) -> list[int]:
        """Ranks of the stages before and after."""
        worker, stage = self.address_of(rank)
        beside = (StageAddress(worker, stage - 1), StageAddress(worker, stage + 1))
        return [self.stages[address] for address in beside if address in self.stages]

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


class Piece(NamedTuple):
    """Layers ``first`` up to, without, ``end``."""

    first: int
    end: int


def pieces_of(cuts: Sequence[Sequence[int]], num_layers: int) -> tuple[Piece, ...]:
    """Pieces of a model in order.

    Every stage of every virtual worker is a union of pieces, so each piece gets one update for a
    wave from each virtual worker. Where all are cut alike, pieces are stages.

    Args:
        cuts: Of each virtual worker, where its stages end, without the last.
        num_layers: Layers of the model.
    """
    bounds = sorted({0, num_layers, *(cut for worker in cuts for cut in worker)})
    return tuple(Piece(*pair) for pair in pairwise(bounds))


def pieces_within(pieces: Sequence[Piece], first: int, end: int) -> tuple[Piece, ...]:
    """The pieces of a stage with layers `first` up to, without, `end`."""
    return tuple(piece for piece in pieces if first <= piece.first and piece.end <= end)
