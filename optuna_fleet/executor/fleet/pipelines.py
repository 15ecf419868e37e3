"""The pipelines of all nodes: what they have done, can do, and who shares chunks. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from optuna_fleet.pipeline.exchange import MOST_PEERS, Peer, Plan, scheme_of
from optuna_fleet.pipeline.pipeline_messages import PipelineStats
from optuna_fleet.wire.node_messages import PipelineReport, ShareChunks

WINDOW_S = 5.0
"""Seconds in which trials read, from one measurement to the next."""

LEAST_BUSY = 0.5
"""Preprocessors that were busy for less of their time, all that there may be, limit nobody."""

LEAST_MADE = 32
"""Samples that each must have made: what it is about to finish is then a small part."""


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


class Capacity:
    """Samples that trials got for each second of a preprocessor's work, times all that may work.

    Where all were busy, that is what trials got. Where they had time to spare it is more, so that
    no plan can hold trials below what could be made for them: what it leaves idle raises the next
    measurement. A sample that was made once counts for each trial that got it, and those that had
    been kept count too, so that it errs to the large side.

    Attributes:
        samples_per_s: As measured last; None while that was not possible, or nobody was limited.
    """

    def __init__(self) -> None:
        self.samples_per_s: float | None = None
        self._base: dict[str, PipelineStats] = {}

    def heard(self, reports: Mapping[str, PipelineReport]) -> bool:
        """Take what agents have reported last; return whether that ends a window."""
        num_most, made, got, busy_s, most_s, lasted_s = 0, 0, 0, 0.0, 0.0, 0.0
        for agent, report in reports.items():
            done = report.stats.since(self._base.setdefault(agent, report.stats))
            num_most += report.num_most
            made += done.preprocessed
            got += done.consumed
            busy_s += done.busy_s
            most_s += report.num_most * done.active_s
            lasted_s = max(lasted_s, done.active_s)
        is_busy = busy_s >= LEAST_BUSY * most_s
        if lasted_s < WINDOW_S or (is_busy and made < LEAST_MADE * num_most):
            return False
        self._base = {agent: report.stats for agent, report in reports.items()}
        # What was made last is got only now, or later.
        self.samples_per_s = num_most * max(made, got) / busy_s if is_busy else None
        return True


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
