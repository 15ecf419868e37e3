"""What of a Trainer moves along with its trial, beside what it trains."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from transformers.trainer_callback import ExportableState


class Progress:
    """The state of Trainer that is neither the model's nor the optimizer's.

    Attributes:
        num_epochs: How many epochs are done.
    """

    def __init__(self, trainer: Any) -> None:
        self.num_epochs = 0
        self._trainer = trainer
        self._saved: dict[str, Any] | None = None
        self._final: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """What rank 0 has, at the end of an epoch, or had when there were no more."""
        return self._present() if self._final is None else self._final

    def end(self) -> None:
        """All epochs are done: what the same Trainer trains from now on is another's."""
        self.num_epochs = self._trainer.state.num_train_epochs
        self._final = copy.deepcopy(self._present())

    def _present(self) -> dict[str, Any]:
        trainer = self._trainer
        of_process = ("is_local_process_zero", "is_world_process_zero")
        state = dataclasses.asdict(trainer.state)
        return {
            "epochs": self.num_epochs,
            "state": {name: value for name, value in state.items() if name not in of_process},
            "callbacks": [callback.state() for callback in self._callbacks()],
            "losses": [
                trainer._tr_loss.item(),
                trainer._total_loss_scalar,
                trainer._globalstep_last_logged,
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """It is put in its place when Trainer is ready."""
        self._saved = state

    def put_back_state(self) -> None:
        """Where Trainer is, and what callbacks hold."""
        if self._saved is None:
            return
        self.num_epochs = self._saved["epochs"]
        for name, value in self._saved["state"].items():
            setattr(self._trainer.state, name, copy.deepcopy(value))
        for callback, state in zip(self._callbacks(), self._saved["callbacks"], strict=True):
            for name, value in {**state["args"], **state["attributes"]}.items():
                setattr(callback, name, value)

    def put_back_losses(self) -> None:
        """What was added up since they were logged, and in all."""
        if self._saved is None:
            return
        trainer = self._trainer
        latest, total, last_logged = self._saved["losses"]
        if trainer.fleet_trial.rank == 0:
            trainer._tr_loss.fill_(latest)
            trainer._total_loss_scalar = total
        trainer._globalstep_last_logged = last_logged
        trainer._initial_global_step = 0
        trainer.args.eval_on_start = False  # it was done
        history = trainer.state.log_history
        if history and "train_loss" in history[-1]:
            history.pop()  # all was done, and that is said once more

    def _callbacks(self) -> list[Any]:
        trainer = self._trainer
        everyone = [*trainer.callback_handler.callbacks, trainer.control]
        return [callback for callback in everyone if isinstance(callback, ExportableState)]
