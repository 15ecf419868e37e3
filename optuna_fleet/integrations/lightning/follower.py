"""A callback that goes through the trial's epochs as Lightning goes through its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.integrations.lightning.logged import Logged
from optuna_fleet.integrations.lightning.stand_ins import StandIns
from optuna_fleet.trainer.trial import FleetTrial


class Follower(Callback):
    """The first of the callbacks: others see what it has put together.

    Attributes:
        resumes: The trial goes on here, after a `fit` that it has begun elsewhere.
    """

    def __init__(self, trial: FleetTrial) -> None:
        self.resumes = False
        self._trial = trial
        self._num_epochs = 0
        self._epochs: Iterator[int] = iter(())
        self._logged = Logged(trial)
        self._stand_ins = StandIns(trial)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the trial's epochs."""
        assert trainer.max_epochs is not None  # see `FleetStrategy.setup`
        self._num_epochs = trainer.max_epochs  # with those that callbacks have added
        self._epochs = self._trial.epochs(self._num_epochs)
        self._stand_ins.begin(pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the trial's next epoch; it leaves from here if it has to move."""
        self._logged.check_monitored(trainer)
        epoch = next(self._epochs)  # where it has converged, StopIteration ends Lightning's loop
        if not self._trial.has_pending_gradients:
            pl_module.zero_grad()  # no checkpoint has those, and a step would be another one
        if self._trial.is_preflight:  # which leaves out epochs
            current: Any = trainer.fit_loop.epoch_progress.current
            current.started = current.processed = current.completed = epoch
            current.ready = epoch + 1
        if epoch != trainer.current_epoch:
            raise FleetConfigError(
                f"The Trainer begins at epoch {trainer.current_epoch}, but the trial at {epoch}: "
                "call `fit` once for each Trainer, without `ckpt_path`. A trial resumes by itself."
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note whether this rank has a stand-in."""
        self._stand_ins.begin_batch(pl_module)

    def on_train_batch_end(self, *args: Any) -> None:
        """Forget what was of a stand-in."""
        self._stand_ins.end_batch()
        self._logged.end_batch()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See `Logged.check_data`."""
        self._logged.check_data(trainer)

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See `Logged.merge`."""
        self._logged.merge(trainer)

    on_test_epoch_end = on_validation_epoch_end

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See `Logged.merge`."""
        self._logged.merge(trainer)
        self._logged.merge_steps(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See `Logged.check_monitored`: those that monitor come next."""
        self._logged.check_monitored(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the trial's epochs."""
        self._logged.check_monitored(trainer)
        self._stand_ins.end(pl_module)
        if trainer.current_epoch == self._num_epochs:
            next(self._epochs, None)  # the last one is over

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pass over epochs that were done before the trial moved, in another `fit`."""
        if self.resumes and self._num_epochs == 0 and trainer.fit_loop.done:
            next(self._trial.epochs(trainer.max_epochs or 0), None)
