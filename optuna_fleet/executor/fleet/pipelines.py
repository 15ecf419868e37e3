"""The pipelines of all nodes: what they have done, and who shares chunks. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from optuna_fleet.pipeline.exchange import MOST_PEERS, Peer, Plan, scheme_of
from optuna_fleet.pipeline.stats import PipelineStats
from optuna_fleet.wire.node_messages import PipelineReport, ShareChunks


class PipelineReports:
    """The last report of each agent, and what those had done that are gone.

    Attributes:
        last: Of the agents that are there, what each said last.
    """

    def __init__(self) -> None:
        self.last: dict[str, PipelineReport] = {}
        self._past = PipelineStats()

    def take(self, report: PipelineReport) -> None:
        """An agent reports."""
        self.last[report.agent] = report

    def node_lost(self, agent: str) -> None:
        """An agent is gone; what its pipeline has done counts on."""
        if report := self.last.pop(agent, None):
            self._past = self._past.plus(report.stats.gone())

    @property
    def total(self) -> PipelineStats:
        """Of all nodes, lost ones included."""
        each = (report.stats for report in self.last.values())
        return functools.reduce(PipelineStats.plus, each, self._past)

    @property
    def are_there(self) -> bool:
        """Whether any agent that is there has reported."""
        return bool(self.last)

    def ask(self) -> None:
        """All are asked: what they said before is no answer."""
        self.last = {a: replace(report, is_answer=False) for a, report in self.last.items()}

    def have_answered(self, agents: Iterable[str]) -> bool:
        """Whether these have, since they were asked."""
        reports = (self.last.get(agent) for agent in agents)
        return all(report is not None and report.is_answer for report in reports)


class ChunkSharing:
    """Which nodes share chunks, and by which scheme: the driver tells all agents.

    Args:
        exchange: The scheme. Makers are the first p nodes ("multi-broadcast:p"); without a p, the
            first one ("single-broadcast") or half.

    Attributes:
        plan: What agents were told last.
        how: The scheme, once several nodes have shared; "" before.
    """

    def __init__(self, exchange: str, tell: Callable[[str, Any], None]) -> None:
        self._scheme, self._num_makers = scheme_of(exchange)
        self._tell = tell
        self._there: list[str] = []
        self._asked: set[str] = set()
        self._peers: dict[str, Peer] = {}
        self.plan = Plan()
        self.how = ""

    def joined(self, agent: str) -> None:
        """A node has joined; one alone has nobody to share with."""
        self._there.append(agent)
        if len(self._there) < 2 or self._scheme == "local":
            return
        for each in self._there:
            if each not in self._asked:
                self._asked.add(each)
                self._tell(each, ShareChunks())

    def ready(self, peer: Peer) -> None:
        """A node gives its chunks to whoever connects."""
        self._peers[peer.agent] = peer
        self._publish()

    def left(self, agent: str) -> None:
        """A node is gone."""
        if agent in self._there:
            self._there.remove(agent)
        if self._peers.pop(agent, None) is not None:
            self._publish()

    def _publish(self) -> None:
        makers: list[str] = []
        if "broadcast" in self._scheme:
            some = 1 if self._scheme == "single-broadcast" else math.ceil(len(self._peers) / 2)
            makers = list(self._peers)[: self._num_makers or some]
        peers = tuple(self._peers.values())[:MOST_PEERS]
        self.plan = Plan(scheme=self._scheme, peers=peers, makers=frozenset(makers))
        if len(self._peers) > 1:
            self.how = self._scheme
        for agent in self._peers:
            self._tell(agent, self.plan)
