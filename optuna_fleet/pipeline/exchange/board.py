"""Memory that an agent shares with its forks: the plan, and which peers are left out for now."""

from __future__ import annotations

import mmap
import pickle
import struct
import time
from hashlib import blake2b

from optuna_fleet.pipeline.exchange.plan import Peer, Plan

_BYTES = 16 << 20  # of address space: pages are taken when they are written
_MOST_PEERS = 8192
_PLAN_AT = 8 * _MOST_PEERS
_HEAD = struct.Struct("=16sI")
_TIME = struct.Struct("=d")


class Board:
    """The agent writes plans, its forks read them; whoever waits for a peer in vain leaves it out.

    Args:
        left_out_s: Seconds for which a peer is not asked then, unless a new plan comes.
    """

    def __init__(self, left_out_s: float = 60.0) -> None:
        self._memory = mmap.mmap(-1, _BYTES)
        self._left_out_s = left_out_s
        self._seen = b""
        self._plan = Plan()

    def publish(self, plan: Plan) -> None:
        """Puts a plan in the place of the last; nobody is left out any more."""
        data = pickle.dumps(plan)
        self._memory[:_PLAN_AT] = bytes(_PLAN_AT)
        head = _HEAD.pack(blake2b(data, digest_size=16).digest(), len(data))
        self._memory[_PLAN_AT : _PLAN_AT + len(head) + len(data)] = head + data

    def plan(self) -> Plan:
        """Returns the plan; the last one while the next is being written."""
        head = self._memory[_PLAN_AT : _PLAN_AT + _HEAD.size]
        if head != self._seen and any(head):
            digest, length = _HEAD.unpack(head)
            begin = _PLAN_AT + _HEAD.size
            data = self._memory[begin : begin + length]
            if blake2b(data, digest_size=16).digest() == digest:
                self._plan, self._seen = pickle.loads(data), head
        return self._plan

    def leave_out(self, peer: Peer) -> None:
        """Nobody here asks this peer for a while."""
        if (place := self._place(peer)) is not None:
            _TIME.pack_into(self._memory, place, time.monotonic() + self._left_out_s)

    def is_left_out(self, peer: Peer) -> bool:
        """Returns whether that while is not over."""
        place = self._place(peer)
        return place is None or _TIME.unpack_from(self._memory, place)[0] > time.monotonic()

    def _place(self, peer: Peer) -> int | None:
        peers = self.plan().peers
        return _TIME.size * peers.index(peer) if peer in peers else None
