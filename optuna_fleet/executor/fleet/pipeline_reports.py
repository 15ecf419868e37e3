"""What the pipelines of all nodes have done, as they last said. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

from optuna_fleet.pipeline.stats import PipelineStats
from optuna_fleet.wire.node_messages import PipelineReport


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
