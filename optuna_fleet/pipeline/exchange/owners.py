"""Who makes which chunk: the schemes of Pittman et al. (SC18, IV) as owner functions. Pure.

| scheme | the owner of a chunk is |
|---|---|
| local | each node, for itself |
| all-shared | one of all nodes, by a hash of (chunk, node) |
| single-broadcast, multi-broadcast | one of the makers, likewise by a hash |

The hash is a rendezvous hash: when a node comes or goes, only its own chunks change hands. In
single-broadcast the last of the makers gets the chunks of the others, and gives all of them to the
nodes that make none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, cast

from optuna_fleet.arguments import check_choice, check_that
from optuna_fleet.pipeline.spec import ChunkKey

Scheme = Literal["local", "all-shared", "single-broadcast", "multi-broadcast"]
SCHEMES: tuple[Scheme, ...] = ("local", "all-shared", "single-broadcast", "multi-broadcast")

_MANY = re.compile(r"(single|multi)-broadcast:(0*[1-9]\d{0,5})")
"""With its number of makers, p."""

MOST_PEERS = 500
"""Of a plan, which has to fit into one packet: nodes that join later only ask the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where the chunks of a node are to be had.

    Attributes:
        agent: The incarnation of the node's agent.
        host: Address to connect to.
        port: Likewise.
    """

    agent: str
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The nodes that share chunks, and how. The driver sends a new one when either changes.

    Attributes:
        scheme: How.
        peers: All of them, in the order in which they joined.
        makers: Those that preprocess for all (their agents), in the broadcasts; the first node if
            there are none.
    """

    scheme: Scheme = "local"
    peers: tuple[Peer, ...] = ()
    makers: frozenset[str] = frozenset()

    @property
    def is_shared(self) -> bool:
        """Whether there is anybody to get chunks from."""
        return self.scheme != "local" and len(self.peers) > 1

    def owner(self, key: ChunkKey) -> Peer | None:
        """Returns whose chunk this is; None if each node makes it for itself."""
        if not self.is_shared:
            return None
        among = self.peers if self.scheme == "all-shared" else self._makers
        return max(among, key=lambda peer: _score(key, peer))

    @property
    def broadcaster(self) -> Peer | None:
        """Who gives all chunks to the nodes that make none; None if owners do."""
        return self._makers[-1] if self.is_shared and self.scheme == "single-broadcast" else None

    @property
    def _makers(self) -> tuple[Peer, ...]:
        return tuple(peer for peer in self.peers if peer.agent in self.makers) or self.peers[:1]


def _score(key: ChunkKey, peer: Peer) -> bytes:
    return blake2b(f"{peer.agent} {key.epoch} {key.chunk} {key.name}".encode()).digest()


def scheme_of(exchange: Any) -> tuple[Scheme, int | None]:
    """Returns what was given: a scheme, and how many nodes make chunks where ":p" says so.

    Raises:
        FleetConfigError: It is none.
    """
    if isinstance(exchange, str) and ":" in exchange:
        wanted = 'give a number of makers so: "multi-broadcast:4"'
        check_that("exchange", exchange, _MANY.fullmatch, wanted)
        scheme, _, count = exchange.partition(":")
        return cast("Scheme", scheme), int(count)
    check_choice("exchange", exchange, SCHEMES)
    return cast("Scheme", exchange), None
