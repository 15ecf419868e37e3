"""What one `optimize` call has and works with; and how it waits for times and results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from optuna_fleet.checkpoints.store import mark
from optuna_fleet.events import Event
from optuna_fleet.executor.call.journal import DeviceLog, Journal, Progress, Tally
from optuna_fleet.executor.call.runs import Job, RunRecord, TrialRecord
from optuna_fleet.executor.call.summary import FleetSummary
from optuna_fleet.executor.call.watchdog import Watchdog
from optuna_fleet.executor.fleet.runtime import Runtime
from optuna_fleet.pipeline.pipeline_messages import PipelineStats
from optuna_fleet.preflight.findings import Findings
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.sampler_bridge.proposals import Proposals
from optuna_fleet.sampler_bridge.retention import CheckpointRetention

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Due:
    """It is time for something, or something is there: a call knows what; void after its end."""

    number: int


class Sweep:
    """One call. What decides about it, and does it, are the other modules of this folder.

    Args:
        began: When the call did, in seconds since the epoch.

    Attributes:
        runtime: The fleet, which outlives the call.
        journal: What happens; `devices`, `progress` and `tally` are made of it.
        runs: Those that have not ended on all their devices, by run id.
        trials: Those that were to fly and are not done, by number.
        waiting: Runs of which the trainers were not told yet.
        objective_at: Where agents keep the objective; "" for those that have yet to answer.
        has_launched: Any trial was launched, be it by a driver that is dead.
        failure: The first failure of a trial that `catch` did not cover: it is raised once the
            trials that fly are done.
    """

    def __init__(
        self,
        runtime: Runtime,
        ledger: Ledger,
        proposals: Proposals,
        job: Job,
        retention: CheckpointRetention,
        findings: Findings,
        *,
        began: float,
    ) -> None:
        self.runtime = runtime
        self.ledger = ledger
        self.proposals = proposals
        self.job = job
        self.retention = retention
        self.findings = findings
        self.began = began
        self.runs: dict[int, RunRecord] = {}
        self.trials = {
            number: TrialRecord(was_launched=True)  # by a driver that is dead
            for number in proposals.adopted()
        }
        self.waiting: list[RunRecord] = []
        self.objective_at: dict[str, str] = {}
        self.has_launched = bool(self.trials)
        self.failure: BaseException | None = None
        self.folder_token = mark(retention.folder.root)
        self._acts: dict[int, Callable[[], Sequence[Event] | None]] = {}
        self.devices = DeviceLog(ledger.records.devices, lambda: runtime.nodes.devices.values())
        self.progress = Progress(ledger, proposals)
        self.tally = Tally(began)
        self.journal = Journal(self.runs, self.devices.take, self.progress.take, self.tally.take)
        self.watchdog = Watchdog(job.options.limits, runtime.process_state)
        self._preprocessed_before = runtime.reports.total

    def run_name(self, run_id: int) -> str:
        """Name of a run, in what it writes, unlike that of any run of another call or driver."""
        return f"{self.folder_token[:8]}-{run_id}"

    def summary(self, stats: PipelineStats | None) -> FleetSummary:
        """The call in numbers; `stats` are the pipeline's, if there is one."""
        now = self.journal.now()
        return self.tally.summary(
            self.devices,
            now,
            trials=self.ledger.ended,
            left_out=self.runtime.faults.reasons,
            pipeline=None if stats is None else stats.since(self._preprocessed_before),
            exchange=self.runtime.sharing.how,
        )

    # -- when it is time --------------------------------------------------------------------------

    def later(
        self, seconds: float, act: Callable[..., Sequence[Event] | None], *arguments: Any
    ) -> None:
        """Have this call do something so many seconds from now; it returns what is news."""
        self.runtime.inbox.later(max(0.0, seconds), self._due(partial(act, *arguments)))

    def later_of(
        self,
        seconds: float,
        run: RunRecord,
        act: Callable[..., Sequence[Event] | None],
        *arguments: Any,
    ) -> None:
        """Likewise with a run, which is the first argument; not if it has ended by then."""

        def act_if_there() -> Sequence[Event] | None:
            return act(run, *arguments) if run.launch.run_id in self.runs else None

        self.later(seconds, act_if_there)

    def when_done(self, what: Future[Any], act: Callable[[], Sequence[Event] | None]) -> None:
        """Likewise, when what another thread or process does has a result, or has none."""
        due = self._due(act)
        what.add_done_callback(lambda _: self.runtime.inbox.put(due))

    def _due(self, act: Callable[[], Sequence[Event] | None]) -> Due:
        self._acts[number := next(_numbers)] = act
        return Due(number)

    def do(self, due: Due) -> Sequence[Event]:
        """Do it; return what is news."""
        act = self._acts.pop(due.number, None)
        return () if act is None else act() or ()

    # -- the limits of runs -----------------------------------------------------------------------

    def watch(self, run: RunRecord) -> None:
        """A run begins."""
        self.watchdog.launched(run)
        self.keep_to_time(run)

    def keep_to_time(self, run: RunRecord) -> None:
        """See to it that a run ends in time; to be called again until that is near."""
        left_s = self.watchdog.left_s(run)
        if left_s < self.watchdog.look_every_s:
            self.later_of(left_s, run, self.fail_if_faulty)

    def fail_if_faulty(self, run: RunRecord) -> list[Event]:
        """End a run whose trial has broken a limit, or whose ranks have come apart."""
        error = self.watchdog.error(run)
        return [] if error is None else [run.fail(error)]
