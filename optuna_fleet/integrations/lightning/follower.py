"""A callback that goes through the trial's epochs as Lightning goes through its own.

It puts together what was logged on all ranks, and takes back what samples have counted that only
keep a rank in step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torchmetrics import Metric

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.data.shard_loader import Shards
from optuna_fleet.trainer.gradients.collectives import gather
from optuna_fleet.trainer.groups import group_size
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
        self._logged = _Logged(trial)
        self._stand_ins = _StandIns(trial)

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
        """See `_Logged.check_data`."""
        self._logged.check_data(trainer)

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See `_Logged.merge`."""
        self._logged.merge(trainer)

    on_test_epoch_end = on_validation_epoch_end

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See `_Logged.merge`."""
        self._logged.merge(trainer)
        self._logged.merge_steps(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See `_Logged.check_monitored`: those that monitor come next."""
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


class _Logged:
    """Gives each rank the values of the whole trial, or has it go on on fewer devices."""

    def __init__(self, trial: FleetTrial) -> None:
        self._trial = trial
        self._last_size = 0  # of this rank's part of the last batch that was trained on

    def end_batch(self) -> None:
        """A batch was trained on."""
        self._last_size = self._trial.shard_size

    def check_data(self, trainer: Any) -> None:
        """A rank that has no sample at all logs nothing: others would wait for its metrics."""
        for loader in trainer._evaluation_loop._combined_loader.flattened:
            if isinstance(loader, Shards) and (most := loader.most_samples) < group_size():
                self._trial.stay_on(
                    most,
                    f"It is evaluated on batches of {most} at most, so that more devices have "
                    "no sample to log metrics of: give a larger `batch_size` to use more.",
                )

    def merge_steps(self, trainer: Any) -> None:
        """Of what was logged per step, give each rank the last step's value of the whole trial."""
        known = trainer.callback_metrics
        metas = [result.meta for result in (trainer._results or {}).values()]
        names = {meta.forked_name(True) for meta in metas if meta.on_step} & known.keys()
        steps = {name: known[name] for name in sorted(names)}
        if group_size() > 1 and steps:
            known.update(self._trial.mean(steps, weight=self._last_size))

    def merge(self, trainer: Trainer) -> None:
        """Put the values of all ranks together, so that each has those of the whole trial."""
        logged = {
            key: result
            for key, result in (trainer._results or {}).items()
            if result.is_tensor and result.meta.on_epoch and not result.has_reset
        }
        everyone = gather({key: _contents(result) for key, result in logged.items()})
        self._check_logged(everyone)
        for key, result in logged.items():
            parts = zip(*(one[key] for one in everyone), strict=True)
            values, sizes = (torch.stack(part).to(trainer.strategy.root_device) for part in parts)
            if result.meta.is_max_reduction:
                result._computed = values.amax(0)
            elif result.meta.is_min_reduction:
                result._computed = values.amin(0)
            else:
                is_mean = result.meta.is_mean_reduction
                result._computed = values.sum(0) / (sizes.sum(0) if is_mean else 1)
        self._tell_again(trainer, {result.meta.dataloader_idx for result in logged.values()})

    def check_monitored(self, trainer: Any) -> None:
        """What decides of training must not be one rank's value: each would decide for itself."""
        if group_size() == 1:
            return
        monitors = [getattr(callback, "monitor", None) for callback in trainer.callbacks]
        configs = trainer.lr_scheduler_configs
        monitors += [config.monitor for config in configs if config.reduce_on_plateau]
        values = {
            str(name): str(trainer.callback_metrics[name].item())  # NaN is NaN
            for name in monitors
            if name in trainer.callback_metrics
        }
        everyone = gather(values)
        unlike = {n for n in set().union(*everyone) if len({each.get(n) for each in everyone}) > 1}
        if unlike:
            names = ", ".join(f"`{name}`" for name in sorted(unlike))
            self._trial.stay_on(
                1,
                f"{names}: monitored by a callback or a scheduler, but not the same on all of the "
                "trial's devices, as each has logged that of its own samples, at the end of an "
                "epoch or per step. To use more devices, log it in a step with `on_epoch=True`, "
                "or log a `Metric` of torchmetrics.",
            )

    def _tell_again(self, trainer: Any, loaders: set[int | None]) -> None:
        """Of each of several loaders Lightning has taken this rank's values, when it was read."""
        results, connector = trainer._results, trainer._logger_connector
        for loader in loaders - {None}:
            results.dataloader_idx = loader
            trainer._evaluation_loop._logged_outputs[loader] = (
                connector.update_eval_epoch_metrics()
            )
            results.dataloader_idx = None

    def _check_logged(self, everyone: list[dict[str, Any]]) -> None:
        names = set().union(*everyone)
        num_complete = sum(one.keys() == names for one in everyone)
        if num_complete == len(everyone):
            return
        self._trial.stay_on(
            max(1, num_complete),
            f"Of {sorted(names)}, some were logged on {num_complete} of the trial's devices only.",
        )


def _contents(result: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, and of how many samples, of what was logged; or its maximum, say."""
    size = getattr(result, "cumulated_batch_size", torch.zeros(()))
    return result.value.detach().cpu(), size.cpu()


class _StandIns:
    """Samples that keep a rank in step where a batch has none for it, and must not count."""

    def __init__(self, trial: FleetTrial) -> None:
        self._trial = trial
        self._metrics: list[tuple[Any, dict[str, Any], int]] = []

    def begin(self, module: LightningModule) -> None:
        """Training begins."""
        module.log = _Log(self._trial, module)  # type: ignore[method-assign]

    def end(self, module: LightningModule) -> None:
        """Training is over."""
        del module.log

    def begin_batch(self, module: LightningModule) -> None:
        """Note what metrics hold before a step that must not count."""
        if self._trial.shard_size == 0:
            metrics: Any = [m for m in module.modules() if isinstance(m, Metric)]
            self._metrics = [(m, m._copy_state_dict(), m._update_count) for m in metrics]

    def end_batch(self) -> None:
        """Have metrics hold that again."""
        for metric, state, count in self._metrics:
            vars(metric).update(state, _update_count=count, _computed=None)
        self._metrics = []


class _Log:
    """``LightningModule.log``, with a weight of 0 for `_StandIns`."""

    def __init__(self, trial: FleetTrial, module: LightningModule) -> None:
        self._trial = trial
        self._log = module.log

    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if self._trial.shard_size == 0:
            options["batch_size"] = 0
        self._log(name, value, *args, **options)
