"""What one `optimize` call works with: its runs, and what watches, launches and counts them."""

from __future__ import annotations

import time

from optuna_fleet.events import Event
from optuna_fleet.executor.call.call_handler import CallHandler
from optuna_fleet.executor.call.call_log import CallLog
from optuna_fleet.executor.call.checks import Checks
from optuna_fleet.executor.call.held import HeldStates, Start
from optuna_fleet.executor.call.launcher import Launcher
from optuna_fleet.executor.call.objective_copies import ObjectiveCopies
from optuna_fleet.executor.call.outcomes import EpochEvaluator, Outcomes
from optuna_fleet.executor.call.runs import Job, RunRecord
from optuna_fleet.executor.call.saves import Saves
from optuna_fleet.executor.call.stop_lines import StopLines
from optuna_fleet.executor.call.summary import counted
from optuna_fleet.executor.call.tally import DeviceLog, PipelineLog, Tally
from optuna_fleet.executor.call.waits import Deadlines
from optuna_fleet.executor.call.watchdog import Watchdog
from optuna_fleet.executor.fleet.runtime import Runtime
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
        began: When the call did, by the monotonic clock.

    Attributes:
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
        self.tally = Tally(
            began=began,
            devices=DeviceLog(ledger.records.devices),
            trials=ledger.ended,
            left_out=runtime.faults.reasons,
        )
        self.calls = CallHandler(runtime.send, ledger, retention, runtime.inbox)
        self.outcomes = Outcomes(ledger, proposals, retention, self.tally)
        self.copies = ObjectiveCopies(runtime, job)
        self.launcher = Launcher(runtime, job, retention, ledger, proposals, self.copies)
        self.checks = Checks(runtime, job, ledger, self.copies, findings, self.tally.devices)
        self.stop_lines = StopLines(runtime.send)
        self.held = HeldStates(self.runs)
        self.saves = Saves(job.options.checkpoints.interval_s, self.runs, self.stop_lines.save)
        self.watchdog = Watchdog(job.options.limits, runtime.process_state)
        self.pipeline_log = PipelineLog(
            ledger.records.pipeline_span, runtime.reports.total, time.time()
        )
        self.call_log = CallLog.of(ledger, proposals)
        self.evaluator = EpochEvaluator(job.options, ledger, maximize=job.maximize)

    def start(self, what: Start) -> list[Event]:
        """Carry out a launch: tell the trainers; return what is news to the controller."""
        self.runs[what.launch.run_id].begin(what.launch)
        self.watchdog.launched(what.launch)
        self.tally.launched()
        self.launcher.launch(what)
        return [] if what.saved is None else [what.saved]

    def leaves(self, run: RunRecord) -> None:
        """A run leaves its devices, unless it can't: from now on the time counts as its move's."""
        self.tally.moves.leaves(run.launch.number)
        self.held.leaves(run.launch.run_id)

    def note_call(self) -> None:
        """Tell the study how the call is getting on, if it is time to."""
        if not self.call_log.is_due:
            return
        launches = [run.launch for run in self.runs.values()]
        flying = {launch.number for launch in launches}
        self.call_log.note(flying, self.proposals.unfinished(), self.proposals.num_asked)
        num_devices = sum(len(launch.devices) for launch in launches)
        self.ledger.show_under_way(len(flying), num_devices)
        if flying and not self._has_spoken and self.tally.age_s >= SILENT_S:
            self._has_spoken = True
            if not self.ledger.ended:
                on = f"{counted(len(flying), 'trial')} on {counted(num_devices, 'device')}"
                fleet_logger.info(f"Under way: {on}. None has ended yet.")
