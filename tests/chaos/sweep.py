"""The sweep that is disturbed: a command of its own, since its driver is killed too.

What is proposed and what is pruned depends on nothing but the trial itself, so any two runs must
end with the same records.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import signal
import sys
from dataclasses import dataclass
from typing import Any

import optuna
import torch
import torch.nn.functional as F
from optuna.exceptions import StorageInternalError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.exc import OperationalError

from optuna_fleet import Checkpoints, FleetExecutor, Limits, SharedPipeline, policies
from optuna_fleet.alloc import EqualSplitAllocator
from optuna_fleet.sampler_bridge.compat import fleet_logger
from tests import leftovers
from tests.behaviour.samplers import ByNumber
from tests.chaos.moments import reach, watch_checkpoints
from tests.fleets import Noise, evaluate, small_model, train_epoch

EPOCHS = 8
STUDY = "chaos"
_TRAIN, _VAL, _BATCH = 41, 20, 4
_LOSSES = -(-_TRAIN // _BATCH) + 1
"""That an epoch adds: of each step, and a random number."""


class WatchedNoise(Noise):
    """Reaches a moment each time that its seventh sample is made."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 7:
            reach("sample")
        return super().__getitem__(index)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedAllocator:
    """Equal shares; reaches a moment, in the solver's process, each time."""

    name: str = "watched"

    def allocate(self, problem: Any) -> Any:
        reach("decision")
        return EqualSplitAllocator().allocate(problem)


def is_wide(number: int) -> bool:
    """Whether this trial trains on two devices or more."""
    return number % 3 == 2


def is_narrow(number: int) -> bool:
    """Whether this trial trains on one device, however many are free."""
    return number % 3 == 1


def is_movable(number: int) -> bool:
    """Whether this trial can be left and saved in the midst of its epochs."""
    return number % 2 == 1


def objective(trial: Any) -> float:
    """Train with momentum and BatchNorm; the losses of all steps go into a user attribute."""
    watch_checkpoints()
    model = small_model()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=trial.suggest_float("lr", 0.0003, 0.006), momentum=0.9
    )
    least = 2 if is_wide(trial.number) else 1
    most = 1 if is_narrow(trial.number) else None
    model, optimizer = trial.prepare(model, optimizer, min_devices=least, max_devices=most)
    losses = trial.state.setdefault("losses", [])
    for epoch in trial.epochs(EPOCHS):
        train_epoch(
            trial,
            model,
            optimizer,
            losses,
            batch_size=_BATCH,
            movable=is_movable(trial.number),
            after_step=functools.partial(_reach_mid_epoch, trial, epoch, losses),
        )
        losses.append(torch.rand(()).item())  # alike on every rank: of the generators' states
        value = evaluate(trial, model, _summed_loss) / _VAL
        trial.report(value, epoch)
        _reach(trial, "report", epoch)
        if trial.should_prune():
            trial.set_user_attr("losses", losses)
            raise optuna.TrialPruned
    trial.set_user_attr("losses", losses)
    return value


def _summed_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, labels, reduction="sum")


def _reach_mid_epoch(trial: Any, epoch: int, losses: list[float], _: int) -> None:
    if len(losses) == epoch * _LOSSES + 3:
        _reach(trial, "batch", epoch)


def _reach(trial: Any, site: str, epoch: int) -> None:
    reach(site, trial=trial.number, epoch=epoch, rank=trial.rank, ranks=trial.world_size)


def open_storage(url: str) -> optuna.storages.BaseStorage:
    """A database, or a journal file; a lock on SQLite is soon said to be one."""
    if "://" in url:
        soon = {"connect_args": {"timeout": 0.5}} if url.startswith("sqlite") else {}
        return optuna.storages.RDBStorage(url, engine_kwargs=soon)
    return JournalStorage(JournalFileBackend(url))


def main() -> None:
    """Run the sweep, or what is left of it: ``url, checkpoint folder, trials, hang_s``."""
    faulthandler.register(signal.SIGUSR1)
    url, checkpoints, num_trials, hang_s = sys.argv[1:]
    fleet_logger.addFilter(_reach_gone)
    reach("begin")
    segments = leftovers.shared_memory()
    with _fleet(checkpoints, float(hang_s)) as fleet:
        _study(url).optimize(
            objective,
            n_trials=int(num_trials),
            catch=Exception,
            callbacks=[lambda study, trial: reach("told", trial=trial.number)],
            executor=fleet,
        )
        reach("end")
    left = leftovers.shared_memory() - segments - {"filler"}  # the demon's
    if left:
        raise SystemExit(f"Left in shared memory: {left}")


def _reach_gone(record: logging.LogRecord) -> bool:
    if "storage is gone" in record.getMessage():
        reach("gone")
    return True


def _study(url: str) -> Any:
    while True:  # begun anew while the demon has the database locked, one would just try again
        with contextlib.suppress(OperationalError, StorageInternalError):
            return optuna.create_study(
                storage=open_storage(url),
                study_name=STUDY,
                sampler=ByNumber(),
                pruner=optuna.pruners.ThresholdPruner(upper=1.25, n_warmup_steps=2),
                load_if_exists=True,
            )


def _fleet(checkpoints: str, hang_s: float) -> FleetExecutor:
    return FleetExecutor(
        SharedPipeline(train=WatchedNoise(_TRAIN, augment=True), val=Noise(_VAL)),
        devices=4,
        device_type="cpu",
        policy=policies.Own(allocator=WatchedAllocator(), paradigm="elastic"),
        max_trials=3,  # so that there are devices to share out
        checkpoints=Checkpoints(checkpoints, interval_s=0.0),
        limits=Limits(max_restarts=100, hang_s=hang_s),
        seed=5,
    )
