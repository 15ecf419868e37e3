"""What parameter servers keep: the largest runs of layers that no virtual worker cuts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


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
