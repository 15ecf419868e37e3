"""What the pipelines of all nodes have done, and which share their chunks. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from optuna_fleet.pipeline.exchange.cost import Measured, choose
from optuna_fleet.pipeline.exchange.plan import MOST_PEERS, Peer, Plan, Scheme, scheme_of
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
        exchange: The scheme; "auto" for the cheapest, once the rates are known. A broadcast that
            is wanted is that of the first node, the first p ("multi-broadcast:p"), or half.

    Attributes:
        plan: What agents were told last.
        reason: The scheme and why, in words; "" while nobody shares.
    """

    def __init__(self, exchange: str, tell: Callable[[str, Any], None]) -> None:
        scheme, self._num_makers = scheme_of(exchange)
        self._is_auto = scheme == "auto"
        self._scheme: Scheme = "all-shared" if scheme == "auto" else scheme
        self._makers: frozenset[str] = frozenset()
        self._tell = tell
        self._there: list[str] = []
        self._asked: set[str] = set()
        self._peers: dict[str, Peer] = {}
        self.plan = Plan()
        self.reason = ""

    def joined(self, agent: str) -> None:
        """A node has joined; one alone has nobody to share with."""
        self._there.append(agent)
        if len(self._there) < 2 or (self._scheme == "local" and not self._is_auto):
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

    def reported(self, reports: Mapping[str, PipelineReport]) -> None:
        """Pipelines have told what they have done so far: choose again, once all are known."""
        there = list(self._peers)
        known = [reports[agent] for agent in there if agent in reports]
        if not self._is_auto or len(known) < max(2, len(there)):
            return
        if (measured := measured_of(known)) is None:
            return
        makers = tuple(n for n, agent in enumerate(there) if agent in self._makers)
        if self._scheme in ("local", "all-shared"):
            makers = tuple(range(len(there)))
        choice = choose(measured, (self._scheme, makers))
        self.reason = choice.reason
        if (choice.scheme, choice.makers) != (self._scheme, makers):
            self._scheme = choice.scheme
            self._makers = frozenset(there[place] for place in choice.makers)
            self._publish()

    def _publish(self) -> None:
        if self._scheme == "multi-broadcast" and not self._is_auto:
            number = self._num_makers or math.ceil(len(self._peers) / 2)
            self._makers = frozenset(list(self._peers)[:number])
        peers = tuple(self._peers.values())[:MOST_PEERS]
        self.plan = Plan(scheme=self._scheme, peers=peers, makers=self._makers)
        self.reason = self.reason if len(self._peers) < 2 else self.reason or self._scheme
        for agent in self._peers:
            self._tell(agent, self.plan)


def measured_of(reports: list[PipelineReport]) -> Measured | None:
    """Returns the rates of nodes, in this order; None while they can't be known."""
    stats = [report.stats for report in reports]
    made = [each for each in stats if each.preprocessed and each.busy_s]
    received = [each for each in stats if each.num_received]
    if not made or not received:
        return None
    sample_s = sum(each.busy_s for each in made) / sum(each.preprocessed for each in made)
    rates = (
        report.num_most * (each.preprocessed / each.busy_s if each in made else 1 / sample_s)
        for report, each in zip(reports, stats, strict=True)
    )
    total = sum(each.num_received for each in received)
    return Measured(
        samples_per_s=tuple(rates),
        sample_s=sample_s,
        wanted_per_s=max(map(_wanted_per_s, stats)),
        sample_bytes=sum(each.received_bytes for each in received) / total,
        bytes_per_s=max(each.link_bytes_per_s for each in received),
    )


def _wanted_per_s(stats: PipelineStats) -> float:
    """What the trials of a node take while data are there."""
    active_s, starved_s = stats.use.active_s, stats.use.starved_s
    fed_s = max(active_s - starved_s, 0.01 * active_s, 1e-3)
    return (stats.preprocessed + stats.num_received) / fed_s
