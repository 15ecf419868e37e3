"""What moves along with a trial of Lightning's besides the model and its optimizers."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


class Progress:
    """The state of Lightning's Trainer that is neither the model's nor the optimizers'."""

    def __init__(self, trainer: Trainer) -> None:
        self.is_restored = False
        self._trainer: Any = trainer  # which types do not say all of

    @property
    def kept(self) -> list[Callback]:
        """Callbacks that say what they hold, so that it moves along."""
        with_hooks = self._with_hooks()
        return [c for c in self._trainer.callbacks if c in with_hooks or c.state_dict()]

    def state_dict(self) -> dict[str, Any]:
        """Where the loops are, between two epochs, and what callbacks and metrics hold."""
        loops = self._trainer.fit_loop.state_dict()
        for progress in loops["epoch_progress"].values():
            progress["ready"] = progress["completed"]  # the next epoch has been announced
        callbacks = {
            callback.state_key: state
            for callback in self._trainer.callbacks
            if (state := callback.state_dict())
        }
        metrics = {name: value.cpu() for name, value in self._trainer.callback_metrics.items()}
        checkpoint: dict[str, Any] = {}
        for callback in self._with_hooks():
            checkpoint = checkpoint or {"state_dict": self._trainer.lightning_module.state_dict()}
            callback.on_save_checkpoint(self._trainer, self._trainer.lightning_module, checkpoint)
        return {
            "loops": loops,
            "callbacks": callbacks,
            "metrics": metrics,
            "checkpoint": checkpoint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `state_dict`."""
        self.is_restored = True
        fit_loop = self._trainer.fit_loop
        fit_loop.load_state_dict(state["loops"])
        # With `max_steps` Lightning would take the epoch that comes for the one that is done.
        fit_loop._restarting = fit_loop.epoch_loop.restarting = False
        for callback in self._trainer.callbacks:
            saved = state["callbacks"].get(callback.state_key)
            if isinstance(callback, ModelCheckpoint) and saved:
                callback.dirpath = saved["dirpath"]  # in another folder it would forget the best
            if saved:
                callback.load_state_dict(saved)
        for callback in self._with_hooks():
            module = self._trainer.lightning_module
            callback.on_load_checkpoint(self._trainer, module, state["checkpoint"])
        self._trainer.callback_metrics.update(state["metrics"])

    def _with_hooks(self) -> list[Callback]:
        """Callbacks that put something into checkpoints themselves, as averages of weights."""
        plain = Callback.on_save_checkpoint
        return [c for c in self._trainer.callbacks if type(c).on_save_checkpoint is not plain]
