"""How runs begin: each once it is known what it goes on with, and all that it needs is there.

A process holds the state of the last run until it begins another one, but writes it to the end.
So a trial that goes on elsewhere waits until it is known whether the checkpoint is written.
"""

from __future__ import annotations

from dataclasses import replace

from optuna_fleet.events import CheckpointSaved, Event
from optuna_fleet.executor.call.runs import Left, RunRecord
from optuna_fleet.executor.call.sweep import Sweep
from optuna_fleet.resources import needs_gloo
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.wire.messages import CheckpointFailed, Ended, RunTrial
from optuna_fleet.wire.node_messages import KeepObjective


def begin(sweep: Sweep, run: RunRecord) -> list[Event]:
    """Have a run begin, now or later; return what is news by it."""
    launch, trial = run.launch, run.trial
    if not trial.was_launched:
        sweep.retention.drop(launch.number)  # of another study of that name
    trial.was_launched = sweep.has_launched = True
    for other in sweep.trials.values():
        if other is not trial and other.left is not None and other.left.device in launch.devices:
            other.left.holds = False
    sweep.waiting.append(run)
    return send_waiting(sweep)


def send_waiting(sweep: Sweep) -> list[Event]:
    """Have those runs begin that can by now; return what is news by it."""
    news: list[Event] = []
    for run in list(sweep.waiting):
        if not run.has_state:
            news += _find_state(sweep, run)
        if run.has_state and _is_sent(sweep, run):
            sweep.waiting.remove(run)
    return news


def _find_state(sweep: Sweep, run: RunRecord) -> list[Event]:
    """See with what a run goes on, if that is known by now; return what is news by it."""
    launch, left, news = run.launch, run.trial.left, list[Event]()
    if left is not None:
        if left.holds and left.device in launch.devices:
            others = (device for device in launch.devices if device != left.device)
            run.launch = replace(launch, devices=(left.device, *others))
            run.held = left.run_id
        elif left.is_pending:
            return []
        left.holds, left.follower = False, launch.run_id
        if left.saved is not None:
            news = [replace(left.saved, run_id=launch.run_id)]
            run.launch = replace(run.launch, checkpoint=left.saved.location)
            left.saved = None
    run.has_state = True
    sweep.watch(run)
    return news


def _is_sent(sweep: Sweep, run: RunRecord) -> bool:
    """Tell a run's ranks to begin, if their nodes have the objective, and the store is open."""
    runtime, devices = sweep.runtime, run.launch.devices
    if len(devices) > 1:
        runtime.rendezvous.open()
    objective_at = [objective_on(sweep, device) for device in devices]
    store = runtime.rendezvous.store
    if "" in objective_at or (len(devices) > 1 and store is None):
        return False
    order = replace(_order(sweep, run), store=store)
    for rank, (device, where) in enumerate(zip(devices, objective_at, strict=True)):
        runtime.send(device, replace(order, rank=rank, objective_at=where))
    return True


def _order(sweep: Sweep, run: RunRecord) -> RunTrial:
    """What the ranks of a run are told alike."""
    job, options, location = sweep.job, sweep.job.options, run.launch.checkpoint
    launch, runtime, retention = run.launch, sweep.runtime, sweep.retention
    agents, folder = runtime.agents, retention.folder
    return RunTrial(
        run_id=launch.run_id,
        number=launch.number,
        trial_id=compat.id_of(sweep.proposals[launch.number]),
        rank=0,
        world_size=len(launch.devices),
        seed=options.seed,
        objective_id=job.objective_id,
        measure=launch.measure,
        group=runtime.group_name(launch.run_id),
        store=None,
        study_name=folder.study_name,
        by_gloo=needs_gloo((agents.devices[d] for d in launch.devices), agents.nodes.here()),
        run_name=sweep.run_name(launch.run_id),
        folder=str(folder.path),
        folder_token=sweep.folder_token,
        checkpoints=() if location is None else folder.resumable(location),
        bests=() if location is None else folder.bests(launch.number),
        leaves_final=retention.keeps_any,
        gc_after_trial=job.gc_after_trial,
        maximize=job.maximize,
        heartbeat_s=options.limits.heartbeat_s,
        collective_s=options.limits.collective_s,
        num_devices=runtime.most_devices(spans_types=False),
        num_of_all_types=runtime.most_devices(spans_types=True),
        held=run.held,
    )


def objective_on(sweep: Sweep, device: int) -> str:
    """Where a device's node keeps the objective; "" until it has it. It is sent there once."""
    process, job = sweep.runtime.trainers.process_on(device), sweep.job
    if process is None:
        return ""
    if process.agent not in sweep.objective_at:
        sweep.objective_at[process.agent] = ""
        message = KeepObjective(
            objective_id=job.objective_id, objective=job.objective, settings=job.settings
        )
        sweep.runtime.agents.tell(process.agent, message)
    return sweep.objective_at[process.agent]


# -- what runs leave ------------------------------------------------------------------------------


def rank_ended(run: RunRecord, ended: Ended) -> None:
    """A rank has ended; if it is rank 0, its process may hold the state."""
    if ended.rank == 0 and ended.holds:
        run.trial.left = Left(
            run_id=ended.run_id, device=ended.device, is_pending=not run.has_told
        )


def checkpoint_told(sweep: Sweep, message: CheckpointSaved | CheckpointFailed) -> list[Event]:
    """A checkpoint is written, or can't be: by a run, or after its end by the process it was in.

    It is news of the run, or of the one that has gone on with what it left; and who waits for it
    begins.
    """
    run_id, news = message.run_id, list[Event]()
    run = sweep.runs.get(run_id)
    number = _number_of(sweep, run_id) if run is None else run.launch.number
    if number is None:
        return []
    left, saved = sweep.trials[number].left, None
    if isinstance(message, CheckpointSaved):
        saved = message
        sweep.retention.folder.saved(saved.location)
    else:
        _complain(sweep, number, message)
    if run is not None:
        run.has_told = True
        news = [] if saved is None else [saved]
    if left is None:
        return news
    if left.follower == run_id and saved is not None:
        left.is_pending = False  # this one is newer
    elif left.run_id == run_id and left.is_pending:
        left.is_pending = False
        if run is None and left.follower in sweep.runs:
            return [] if saved is None else [replace(saved, run_id=left.follower)]
        if run is None:
            left.saved = saved
            return send_waiting(sweep)
    return news


def _number_of(sweep: Sweep, run_id: int) -> int | None:
    """The trial whose last run this was; None if it is done, or another was since."""
    lefts = ((number, trial.left) for number, trial in sweep.trials.items())
    return next((n for n, left in lefts if left is not None and left.run_id == run_id), None)


def _complain(sweep: Sweep, number: int, message: CheckpointFailed) -> None:
    """Say so, once per trial."""
    trial = sweep.trials[number]
    if not trial.has_complained:
        trial.has_complained = True
        compat.fleet_logger.warning(
            f"Trial {number} goes on without a new checkpoint. {message.problem} Until "
            "that is mended, it can't change its devices, and should its process die, it is "
            "run again from its last good checkpoint, or without one from its beginning."
        )


def device_lost(sweep: Sweep, device: int) -> list[Event]:
    """A trainer has died: no run begins where one is missing, and what it held is not awaited."""
    sweep.waiting = [run for run in sweep.waiting if device not in run.launch.devices]
    for trial in sweep.trials.values():
        if trial.left is not None and trial.left.device == device:
            trial.left.holds = trial.left.is_pending = False
    return send_waiting(sweep)
