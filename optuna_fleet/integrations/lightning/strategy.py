"""The trial as a strategy of Lightning's Trainer: its devices, parts and collectives."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.integrations import fleet_trial
from optuna_fleet.integrations.lightning.follower import Follower
from optuna_fleet.trainer.gradients.collectives import gather, of_first_rank
from optuna_fleet.trainer.groups import group_size, wire_device

if TYPE_CHECKING:
    import optuna

_rank_zero: Any = rank_zero_only  # of Lightning's, it is an attribute of that function
_REDUCE_OPS = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class FleetStrategy(Strategy):
    """Trains a LightningModule as part of a trial, for ``Trainer(strategy=...)``.

    The model, its optimizers and schedulers are prepared (`FleetTrial.prepare`), and Lightning's
    epochs are `FleetTrial.epochs`: between two of them the trial is checkpointed and may move. The
    state of the Trainer and its callbacks moves along; what the model keeps for itself does not,
    nor are its hooks for checkpoints called: use `trial.state`.

    What is logged per epoch (``self.log(..., on_epoch=True)``) is that of the whole trial on every
    rank, as one process would have logged it. A value per step is this rank's; the last one of an
    epoch is that of the whole trial.

    Args:
        trial: What the objective was given.
        min_devices: See `FleetTrial.prepare`.
        max_devices: See `FleetTrial.prepare`.

    Raises:
        FleetConfigError: The trial is not one of a fleet.
    """

    def __init__(
        self,
        trial: optuna.Trial,
        *,
        min_devices: int | None = None,
        max_devices: int | None = None,
    ) -> None:
        super().__init__()
        self._trial = fleet_trial(trial, type(self).__name__)
        self._bounds: dict[str, Any] = {"min_devices": min_devices, "max_devices": max_devices}
        self._has_model = False
        self._is_alone = False

    # -- who and where ----------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The trial's device."""
        return self._trial.device

    @property
    def global_rank(self) -> int:
        """Rank within the trial."""
        return self._trial.rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank writes logs and checkpoints of Lightning's own."""
        return self._trial.rank == 0

    def setup_environment(self) -> None:
        """See `Strategy`."""
        _rank_zero.rank = self._trial.rank  # of trainers, which serve many trials
        # What is logged per epoch is reduced by `Follower`.
        warnings.filterwarnings("ignore", r"It is recommended to use `self\.log\(.*sync_dist=True")
        super().setup_environment()

    def teardown(self) -> None:
        """See `Strategy`."""
        _rank_zero.rank = 0
        self._be_alone(False)
        super().teardown()

    # -- the trial's parts ------------------------------------------------------------------------

    def model_to_device(self) -> None:
        """See `Strategy`."""
        assert self.model is not None
        self.model.to(self.root_device)

    def setup(self, trainer: Trainer) -> None:
        """Prepare all that trains; in a resumed trial it is restored."""
        super().setup(trainer)
        follower = Follower(self._trial)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [follower, *(c for c in callbacks if not isinstance(c, Follower))]
        # Of what `predict` gives nobody knows the parts: each rank makes all of it.
        self._be_alone(trainer.state.fn == TrainerFn.PREDICTING)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if trainer.max_epochs is None or trainer.max_epochs < 1:
            raise FleetConfigError(
                f"The Trainer's `max_epochs` is {trainer.max_epochs}, but a fleet must know how "
                "long a trial can get: give a number >= 1. Callbacks may end it earlier."
            )
        trainer.num_sanity_val_steps = 0  # it would read data outside of the trial's epochs
        is_first, self._has_model = not self._has_model, True
        parts: list[Any] = [self.lightning_module, *self.optimizers][0 if is_first else 1 :]
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        scaler = getattr(self.precision_plugin, "scaler", None)
        progress = _Progress(trainer)
        parts += [*schedulers, *([] if scaler is None else [scaler]), progress]
        self._trial.prepare(*parts, **self._bounds)
        follower.resumes = is_first and progress.is_restored

    def _be_alone(self, is_alone: bool) -> None:
        if is_alone != self._is_alone:
            self._is_alone = is_alone
            self._trial.give_whole_batches(is_alone)

    # -- collectives ------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        return 1 if self._is_alone else group_size()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over the trial's ranks; see `Strategy`."""
        if not isinstance(tensor, torch.Tensor) or self._size == 1:
            return tensor
        name = "mean" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
        if name not in _REDUCE_OPS:
            raise FleetConfigError(f"`reduce_op` is {reduce_op!r}, not of {sorted(_REDUCE_OPS)}.")
        reduced = tensor.detach().to(wire_device(), copy=True)
        dist.all_reduce(reduced, op=_REDUCE_OPS[name])
        return (reduced / self._size if name in ("mean", "avg") else reduced).to(tensor.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Whether all ranks of the trial, or any, have decided so."""
        votes = self.reduce(torch.tensor(int(decision)), reduce_op="sum")
        return bool(votes == self._size if all else votes > 0)

    def barrier(self, name: str | None = None) -> None:
        """Wait for the trial's ranks."""
        of_first_rank([0])

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What the rank `src` of the trial gives: plain values and tensors."""
        return gather({"": obj})[src][""]

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Of all ranks of the trial, along a new first axis; without gradients.

        Raises:
            FleetConfigError: Gradients are asked for.
            TrialError: Shapes are unlike; the trial goes on on one device.
        """
        if sync_grads:
            raise FleetConfigError(
                "all_gather(sync_grads=True) is not supported on a fleet: a loss over the whole "
                "batch can't be split over devices. Use FleetStrategy(trial, max_devices=1)."
            )
        if self._size == 1:
            return tensor.unsqueeze(0)
        own = tensor.detach().to(wire_device()).contiguous()
        shapes = [shape[""] for shape in gather({"": list(own.shape)})]
        if any(shape != shapes[0] for shape in shapes):  # torch would abort the process
            why = f"all_gather() has tensors of unlike shapes on the trial's devices: {shapes}."
            self._trial.stay_on(1, why)
        parts = [torch.empty_like(own) for _ in range(self._size)]
        dist.all_gather(parts, own)
        return torch.stack(parts).to(tensor.device)


class _Progress:
    """The state of Lightning's Trainer that is neither the model's nor the optimizers'."""

    def __init__(self, trainer: Trainer) -> None:
        self.is_restored = False
        self._trainer: Any = trainer  # which types do not say all of

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
