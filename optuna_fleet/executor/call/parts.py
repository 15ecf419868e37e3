"""What one `optimize` call works with: its runs, and what watches, launches and counts them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from optuna_fleet.events import Event, Launch
from optuna_fleet.executor.call.call_handler import CallHandler
from optuna_fleet.executor.call.call_progress import Progress
from optuna_fleet.executor.call.checks import Checks
from optuna_fleet.executor.call.held import HeldStates, Start
from optuna_fleet.executor.call.journal import DeviceLog, Journal
from optuna_fleet.executor.call.launcher import Launcher, ObjectiveCopies
from optuna_fleet.executor.call.outcomes import EpochEvaluator, Outcomes
from optuna_fleet.executor.call.ranks import RunCalls
from optuna_fleet.executor.call.runs import Job, RunRecord, TrialRecord
from optuna_fleet.executor.call.stop_lines import StopLines
from optuna_fleet.executor.call.summary import FleetSummary
from optuna_fleet.executor.call.tally import Tally
from optuna_fleet.executor.call.watchdog import Watchdog
from optuna_fleet.executor.fleet.runtime import Runtime
from optuna_fleet.pipeline.stats import PipelineStats
from optuna_fleet.preflight.findings import Findings
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.sampler_bridge.proposals import Proposals
from optuna_fleet.sampler_bridge.retention import CheckpointRetention

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Due:
    """It is time for something, or something is there: a call knows what; void after its end."""

    number: int


class Parts:
    """Those of one call. What is pure among them decides, the rest does.

    Args:
        began: When the call did, in seconds since the epoch.

    Attributes:
        journal: What happens; `devices`, `progress` and `tally` are its readers.
        runtime: The fleet, which outlives the call.
        runs: Those that have not ended on all their devices, by run id.
        trials: Those that were to fly and are not done, by number.
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
        self.retention = retention
        self.runs: dict[int, RunRecord] = {}
        self.trials: dict[int, TrialRecord] = {}
        self.began = began
        self._acts: dict[int, Callable[[], Sequence[Event] | None]] = {}
        options, send = job.options, runtime.send
        self.devices = DeviceLog(ledger.records.devices, lambda: runtime.nodes.devices.values())
        self.progress = Progress.of(ledger, proposals)
        self.tally = Tally(began)
        self.journal = Journal(self.runs, self.devices, self.progress, self.tally)
        self.calls = CallHandler(send, ledger, retention, self._go_on_after)
        self.outcomes = Outcomes(ledger, proposals, retention)
        self.copies = ObjectiveCopies(runtime, job)
        self.launcher = Launcher(runtime, job, retention, ledger, proposals, self.copies)
        self.checks = Checks(runtime, job, ledger, self.copies, findings, self.devices, self.later)
        self.stop_lines = StopLines(options.checkpoints.interval_s, send, self.later_of)
        self.held = HeldStates(self.runs)
        self.watchdog = Watchdog(options.limits, runtime.process_state)
        self._preprocessed_before = runtime.reports.total
        self.evaluator = EpochEvaluator(options, ledger, maximize=job.maximize)

    # -- when it is time --------------------------------------------------------------------------

    def later(
        self, seconds: float, act: Callable[..., Sequence[Event] | None], *arguments: Any
    ) -> None:
        """Have this call do something so many seconds from now; it returns what is news."""
        self.runtime.inbox.later(max(0.0, seconds), self._due(partial(act, *arguments)))

    def _due(self, act: Callable[[], Sequence[Event] | None]) -> Due:
        self._acts[number := next(_numbers)] = act
        return Due(number)

    def do(self, due: Due) -> Sequence[Event]:
        """Do it; return what is news."""
        act = self._acts.pop(due.number, None)
        return () if act is None else act() or ()

    def later_of(
        self,
        seconds: float,
        run: RunRecord,
        act: Callable[..., Sequence[Event] | None],
        *arguments: Any,
    ) -> None:
        """Likewise, unless the run has ended by then, with it as the first argument."""

        def act_if_there() -> Sequence[Event] | None:
            is_there = self.runs.get(run.launch.run_id) is run
            return act(run, *arguments) if is_there else None

        self.later(seconds, act_if_there)

    def when_done(self, what: Future[Any], act: Callable[[], Sequence[Event] | None]) -> None:
        """Have this call do something once a thread has a result, or has none."""
        due = self._due(act)
        what.add_done_callback(lambda _: self.runtime.inbox.put(due))

    def _go_on_after(self, sampling: Future[None]) -> None:
        def go_on() -> list[Event]:
            self.calls.go_on(sampling.exception())
            return self.outcomes.propose(again=True)

        self.when_done(sampling, go_on)

    # -- runs -------------------------------------------------------------------------------------

    def new_run(self, launch: Launch) -> None:
        """A run begins, or will when it is known what it goes on with."""
        agents = self.runtime.agents
        self.runs[launch.run_id] = RunRecord(
            launch=launch,
            start=self.journal.now(),
            calls=RunCalls(world_size=len(launch.devices)),
            has_one_clock=len({agents.devices[device].node for device in launch.devices}) == 1,
            trial=(trial := self.trials.setdefault(launch.number, TrialRecord())),
            began_anew=self.checks.began_anew(launch, trial),
        )

    def start(self, what: Start) -> list[Event]:
        """Carry out a launch: tell the trainers; return what is news to the controller."""
        run = self.runs[what.launch.run_id]
        run.launch = what.launch  # now the order of its ranks is known
        self.watchdog.launched(run)
        self.keep_to_time(run)
        self.launcher.launch(what, run.trial)
        return [] if what.saved is None else [what.saved]

    def keep_to_time(self, run: RunRecord) -> None:
        """See to it that a run ends in time; to be called again until that is near."""
        left_s = self.watchdog.left_s(run)
        if left_s < self.watchdog.look_every_s:
            self.later_of(left_s, run, self.fail_if_faulty)

    def fail_if_faulty(self, run: RunRecord) -> list[Event]:
        """End a run whose trial has broken a limit, or whose ranks have come apart."""
        error = self.watchdog.error(run)
        return [] if error is None else [run.fail(error)]

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
