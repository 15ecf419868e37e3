"""Samples that keep a rank in step where a batch has none for it must not count."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from torchmetrics import Metric

from optuna_fleet.trainer.trial import FleetTrial


class StandIns:
    """Takes back what a LightningModule has counted of them."""

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
    """``LightningModule.log``, with a weight of 0 for them."""

    def __init__(self, trial: FleetTrial, module: LightningModule) -> None:
        self._trial = trial
        self._log = module.log

    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if self._trial.shard_size == 0:
            options["batch_size"] = 0
        self._log(name, value, *args, **options)
