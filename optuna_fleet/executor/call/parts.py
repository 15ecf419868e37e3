"""What one `optimize` call works with: its runs, and what watches, launches and counts them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from optuna_fleet.events import Event, Launch
from optuna_fleet.executor.call.call_handler import CallHandler
from optuna_fleet.executor.call.call_log import CallLog
from optuna_fleet.executor.call.calls import RunCalls
from optuna_fleet.executor.call.deadlines import Deadlines
from optuna_fleet.executor.call.device_log import DeviceLog
from optuna_fleet.executor.call.handovers import Answers, Handovers, Start
from optuna_fleet.executor.call.launcher import Launcher
from optuna_fleet.executor.call.outcomes import Outcomes
from optuna_fleet.executor.call.pipeline_log import PipelineLog
from optuna_fleet.executor.call.runs import Job, RunRecord
from optuna_fleet.executor.call.summary import Tally
from optuna_fleet.executor.call.watchdog import Watchdog
from optuna_fleet.executor.fleet.runtime import Runtime
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.sampler_bridge.proposals import Proposals
from optuna_fleet.sampler_bridge.retention import CheckpointRetention


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Those of one call. What is pure among them decides, the rest does; none knows the others.

    Attributes:
        runtime: The fleet, which outlives the call.
        runs: Those that have not ended on all their devices, by run id.
    """

    runtime: Runtime
    job: Job
    ledger: Ledger
    proposals: Proposals
    retention: CheckpointRetention
    tally: Tally
    calls: CallHandler
    outcomes: Outcomes
    launcher: Launcher
    handovers: Handovers
    watchdog: Watchdog
    pipeline_log: PipelineLog
    call_log: CallLog
    deadlines: Deadlines = field(default_factory=Deadlines)
    runs: dict[int, RunRecord] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        runtime: Runtime,
        ledger: Ledger,
        proposals: Proposals,
        job: Job,
        retention: CheckpointRetention,
    ) -> Parts:
        """Those of a call that begins."""
        devices = DeviceLog(ledger.record_devices)
        tally = Tally(devices=devices, left_out=runtime.faults.reasons)
        calls = CallHandler(runtime.send, ledger, retention)
        launcher = Launcher(runtime, job, retention, adopted=proposals.adopted())

        def rehearse(launch: Launch, *, follows: int, answers: Answers) -> None:
            launcher.rehearse(
                launch,
                trial_id=compat.id_of(proposals[launch.number]),
                parameters=ledger.suggested(launch.number),
                follows=follows,
                answers=answers,
            )

        return cls(
            runtime=runtime,
            job=job,
            ledger=ledger,
            proposals=proposals,
            retention=retention,
            tally=tally,
            calls=calls,
            outcomes=Outcomes(ledger, proposals, retention, tally),
            launcher=launcher,
            handovers=Handovers(runtime.send, calls.interrupt, rehearse, launcher.call_off),
            watchdog=Watchdog(job.options.limits, runtime.process_state),
            pipeline_log=PipelineLog(ledger.record_span, runtime.last_stats, time.time()),
            call_log=CallLog.of(ledger, proposals),
        )

    def start(self, what: Start) -> list[Event]:
        """Carry out a launch: tell the trainers; return what is news to the controller."""
        launch, run = what.launch, self.runs[what.launch.run_id]
        run.launch = launch
        if what.follows is not None:
            world_size = len(launch.devices)
            run.calls = RunCalls(world_size=world_size, beginning=what.beginning, has_begun=True)
        if what.saved_at is not None:
            run.saved = what.saved_at
        is_due = run.unsaved_s >= self.job.options.checkpoints.interval_s
        if is_due and what.inherits is None:  # else it is made at the end of the epoch
            run.saved = time.monotonic()
        run.is_movable = what.follows is not None
        self.watchdog.launched(launch)
        self.launcher.launch(
            launch,
            trial_id=compat.id_of(self.proposals[launch.number]),
            parameters=self.ledger.suggested(launch.number),
            follows=what.follows,
            num_stay=what.num_stay,
            inherits=what.inherits,
            saves=is_due,
        )
        if what.saved is None:
            return []
        self.retention.folder.saved(what.saved.location)
        return [what.saved]

    def note_call(self) -> None:
        """Tell the study how the call is getting on, if it is time to."""
        if not self.call_log.is_due:
            return
        launches = [run.launch for run in self.runs.values()]
        flying = {launch.number for launch in launches}
        asked, num_asked = self.proposals.unfinished(), self.proposals.num_asked
        self.call_log.note(flying, asked, num_asked)
        num_devices = sum(len(launch.devices) for launch in launches)
        self.ledger.show_under_way(len(flying), num_devices)
