"""What was logged on all ranks of a trial, put together."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer

from optuna_fleet.trainer.data.reading import Shards
from optuna_fleet.trainer.gradients.collectives import gather
from optuna_fleet.trainer.groups import group_size
from optuna_fleet.trainer.trial import FleetTrial


class Logged:
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
