"""What one `optimize` call works with: its runs, and what watches, launches and counts them."""

from __future__ import annotations

from optuna_fleet.events import Event
from optuna_fleet.executor.call.call_handler import CallHandler
from optuna_fleet.executor.call.call_progress import Progress
from optuna_fleet.executor.call.checks import Checks
from optuna_fleet.executor.call.device_log import DeviceLog
from optuna_fleet.executor.call.held import HeldStates, Start
from optuna_fleet.executor.call.journal import Journal
from optuna_fleet.executor.call.launcher import Launcher
from optuna_fleet.executor.call.moves import Moves
from optuna_fleet.executor.call.objective_copies import ObjectiveCopies
from optuna_fleet.executor.call.outcomes import EpochEvaluator, Outcomes
from optuna_fleet.executor.call.pipeline_log import PipelineLog
from optuna_fleet.executor.call.runs import Job, RunRecord
from optuna_fleet.executor.call.saves import Saves
from optuna_fleet.executor.call.stop_lines import StopLines
from optuna_fleet.executor.call.summary import FleetSummary, counted
from optuna_fleet.executor.call.tally import Tally
from optuna_fleet.executor.call.waits import Deadlines
from optuna_fleet.executor.call.watchdog import Watchdog
from optuna_fleet.executor.fleet.runtime import Runtime
from optuna_fleet.pipeline.stats import PipelineStats
from optuna_fleet.preflight.findings import Findings
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.sampler_bridge.proposals import Proposals
from optuna_fleet.sampler_bridge.retention import CheckpointRetention

SILENT_S = 5.0
"""A call that takes longer without a result says what is under way."""


class Parts:
    """Those of one call. What is pure among them decides, the rest does.

    Args:
        began: When the call did, in seconds since the epoch.

    Attributes:
        journal: What happens; `devices`, `moves`, `progress` and `tally` are its readers.
        runtime: The fleet, which outlives the call.
        runs: Those that have not ended on all their devices, by run id.
        deadlines: Until when devices have time to end what they were told to end.
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
        self.runs: dict[int, RunRecord] = {}
        self.deadlines = Deadlines()
        self._has_spoken = False
        self.began = began
        self.devices = DeviceLog(ledger.records.devices, lambda: runtime.nodes.devices.values())
        self.moves = Moves()
        self.progress = Progress.of(ledger, proposals)
        self.tally = Tally(began, ledger.records.decision)
        self.journal = Journal(self.devices, self.moves, self.progress, self.tally)
        self.calls = CallHandler(runtime.send, ledger, retention, runtime.inbox)
        self.outcomes = Outcomes(ledger, proposals, retention)
        self.copies = ObjectiveCopies(runtime, job)
        self.launcher = Launcher(runtime, job, retention, ledger, proposals, self.copies)
        self.checks = Checks(runtime, job, ledger, self.copies, findings, self.devices)
        self.stop_lines = StopLines(runtime.send)
        self.held = HeldStates(self.runs)
        self.saves = Saves(job.options.checkpoints.interval_s, self.runs, self.stop_lines.save)
        self.watchdog = Watchdog(job.options.limits, runtime.process_state)
        self.pipeline_log = PipelineLog(
            ledger.records.pipeline_span, runtime.reports.total, self.journal.now()
        )
        self.evaluator = EpochEvaluator(job.options, ledger, maximize=job.maximize)

    def start(self, what: Start) -> list[Event]:
        """Carry out a launch: tell the trainers; return what is news to the controller."""
        self.runs[what.launch.run_id].begin(what.launch)
        self.watchdog.launched(what.launch)
        self.launcher.launch(what)
        return [] if what.saved is None else [what.saved]

    def note_call(self) -> None:
        """Tell the study how the call is getting on, if it is time to."""
        if not self.progress.is_due:
            return
        launches = [run.launch for run in self.runs.values()]
        flying = {launch.number for launch in launches}
        self.progress.note(flying, self.proposals.unfinished(), self.proposals.num_asked)
        num_devices = sum(len(launch.devices) for launch in launches)
        self.ledger.show_under_way(len(flying), num_devices)
        if flying and not self._has_spoken and self.journal.now() - self.began >= SILENT_S:
            self._has_spoken = True
            if not self.ledger.ended:
                on = f"{counted(len(flying), 'trial')} on {counted(num_devices, 'device')}"
                fleet_logger.info(f"Under way: {on}. None has ended yet.")

    def summary(self, stats: PipelineStats | None) -> FleetSummary:
        """The call in numbers; `stats` are the pipeline's, if there is one."""
        now = self.journal.now()
        return self.tally.summary(
            self.devices,
            now,
            trials=self.ledger.ended,
            left_out=self.runtime.faults.reasons,
            pipeline=None if stats is None else self.pipeline_log.finish(stats, now),
            exchange=self.runtime.sharing.how,
        )
