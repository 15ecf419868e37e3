"""A LightningModule and its Trainer on as many devices as the fleet gives their trial.

::

    from optuna_fleet.integrations.lightning import FleetStrategy

    def objective(trial):
        model = Classifier(lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True))
        trainer = Trainer(
            max_epochs=10,
            strategy=FleetStrategy(trial),
            callbacks=[PyTorchLightningPruningCallback(trial, monitor="val_acc")],
        )
        trainer.fit(model, trial.batches("train", batch_size=32), trial.batches("val"))
        return trainer.callback_metrics["val_acc"].item()

Where Lightning asks for a loader, in a ``LightningDataModule`` too, it is given what
`FleetTrial.batches` returns.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from optuna_fleet.exceptions import FleetConfigError, TrialError
from optuna_fleet.trainer.checkpoints.checkpoint import gather
from optuna_fleet.trainer.data.shard_loader import Shards
from optuna_fleet.trainer.groups import group_size, of_first_rank, wire_device
from optuna_fleet.trainer.trial import FleetTrial

try:
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.trainer.states import TrainerFn
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError(f"{error}; please: pip install 'optuna-fleet[lightning]'") from None

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
    rank, as one process would have logged it. A value per step is this rank's.

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
        if not isinstance(trial, FleetTrial):
            raise FleetConfigError(
                f"FleetStrategy was given a `{type(trial).__name__}`, but takes the trial of an "
                "objective that runs on a fleet: study.optimize(..., executor=FleetExecutor(...))."
            )
        self._trial = trial
        self._bounds = {"min_devices": min_devices, "max_devices": max_devices}
        self._has_model = False

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
        # What is logged per epoch is reduced by `_Follower`.
        warnings.filterwarnings("ignore", r"It is recommended to use `self\.log\(.*sync_dist=True")
        super().setup_environment()

    def teardown(self) -> None:
        """See `Strategy`."""
        _rank_zero.rank = 0
        super().teardown()

    # -- the trial's parts ------------------------------------------------------------------------

    def model_to_device(self) -> None:
        """See `Strategy`."""
        assert self.model is not None
        self.model.to(self.root_device)

    def setup(self, trainer: Trainer) -> None:
        """Prepare all that trains; in a resumed trial it is restored."""
        super().setup(trainer)
        follower = _Follower(self._trial)
        callbacks = _callbacks_of(trainer)
        callbacks[:] = [follower, *(c for c in callbacks if not isinstance(c, _Follower))]
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

    # -- collectives ------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over the trial's ranks; see `Strategy`."""
        if not isinstance(tensor, torch.Tensor) or group_size() == 1:
            return tensor
        name = "mean" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
        if name not in _REDUCE_OPS:
            raise FleetConfigError(f"`reduce_op` is {reduce_op!r}, not of {sorted(_REDUCE_OPS)}.")
        reduced = tensor.detach().to(wire_device(), copy=True)
        dist.all_reduce(reduced, op=_REDUCE_OPS[name])
        return (reduced / group_size() if name in ("mean", "avg") else reduced).to(tensor.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Whether all ranks of the trial, or any, have decided so."""
        votes = self.reduce(torch.tensor(int(decision)), reduce_op="sum")
        return bool(votes == group_size() if all else votes > 0)

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
        """
        if sync_grads:
            raise FleetConfigError(
                "all_gather(sync_grads=True) is not supported on a fleet: a loss over the whole "
                "batch can't be split over devices. Use FleetStrategy(trial, max_devices=1)."
            )
        if group_size() == 1:
            return tensor.unsqueeze(0)
        own = tensor.detach().to(wire_device()).contiguous()
        parts = [torch.empty_like(own) for _ in range(group_size())]
        dist.all_gather(parts, own)
        return torch.stack(parts).to(tensor.device)


class _Follower(Callback):
    """Goes through the trial's epochs as Lightning goes through its own."""

    def __init__(self, trial: FleetTrial) -> None:
        self.resumes = False
        self._trial = trial
        self._num_epochs = 0
        self._epochs: Iterator[int] = iter(())
        self._metrics: list[tuple[Any, dict[str, Any], int]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert trainer.max_epochs is not None  # see `FleetStrategy.setup`
        self._num_epochs = trainer.max_epochs  # with those that callbacks have added
        self._epochs = self._trial.epochs(self._num_epochs)
        pl_module.log = _Log(self._trial, pl_module)  # type: ignore[method-assign]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The trial leaves from here if it has to move. Where it has converged, StopIteration
        # ends Lightning's loop.
        epoch = next(self._epochs)
        if epoch != trainer.current_epoch:
            raise FleetConfigError(
                f"The Trainer begins at epoch {trainer.current_epoch}, but the trial at {epoch}: "
                "call `fit` once for each Trainer, without `ckpt_path`. A trial resumes by itself."
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._trial.shard_size == 0:  # metrics must not count the stand-in
            metrics: Any = [m for m in pl_module.modules() if isinstance(m, Metric)]
            self._metrics = [(m, m._copy_state_dict(), m._update_count) for m in metrics]

    def on_train_batch_end(self, *args: Any) -> None:
        for metric, state, count in self._metrics:
            vars(metric).update(state, _update_count=count, _computed=None)
        self._metrics = []

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check_data(trainer)

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check_data(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._merge(trainer)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._merge(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._merge(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        del pl_module.log
        if trainer.current_epoch == self._num_epochs:
            next(self._epochs, None)  # the last one is over

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.resumes and self._num_epochs == 0 and trainer.fit_loop.done:
            # It was done before the trial moved, in another `fit`: Lightning has passed over it.
            next(self._trial.epochs(trainer.max_epochs or 0), None)

    def _check_data(self, trainer: Any) -> None:
        """A rank that has no sample at all logs nothing: others would wait for its metrics."""
        for loader in trainer._evaluation_loop._combined_loader.flattened:
            if isinstance(loader, Shards) and (most := _most_samples(loader)) < group_size():
                self._go_on_with_fewer(
                    f"It is evaluated on batches of {most} at most, so that more devices have "
                    "no sample to log metrics of: give a larger `batch_size` to use more.",
                    most,
                )

    def _merge(self, trainer: Trainer) -> None:
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
        self._go_on_with_fewer(
            f"Of {sorted(names)}, some were logged on {num_complete} of the trial's devices only.",
            max(1, num_complete),
        )

    def _go_on_with_fewer(self, why: str, num_devices: int) -> NoReturn:
        self._trial._training.go_on_with_fewer(why, num_devices)
        raise TrialError(why)


def _contents(result: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, and of how many samples, of what was logged; or its maximum, say."""
    size = getattr(result, "cumulated_batch_size", torch.zeros(()))
    return result.value.detach().cpu(), size.cpu()


def _most_samples(loader: Any) -> int:
    """Of a batch, over all ranks."""
    name, most = loader._asked.name, int(loader._asked.batch_size)
    return min(most, int(loader._loader._pipeline.spec.dataset(name).num_samples))


def _callbacks_of(trainer: Any) -> list[Callback]:
    return trainer.callbacks  # type: ignore[no-any-return]


class _Log:
    """``LightningModule.log`` where a rank may hold a stand-in sample, which must not count."""

    def __init__(self, trial: FleetTrial, module: LightningModule) -> None:
        self._trial = trial
        self._log = module.log

    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if self._trial.shard_size == 0:
            options["batch_size"] = 0
        self._log(name, value, *args, **options)


class _Progress:
    """The state of Lightning's Trainer that is neither the model's nor the optimizers'."""

    def __init__(self, trainer: Trainer) -> None:
        self.is_restored = False
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Where the loops are, between two epochs, and what callbacks and metrics hold."""
        loops = self._trainer.fit_loop.state_dict()
        for progress in loops["epoch_progress"].values():
            progress["ready"] = progress["completed"]  # the next epoch has been announced
        callbacks = {
            callback.state_key: state
            for callback in _callbacks_of(self._trainer)
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
        for callback in _callbacks_of(self._trainer):
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
        return [c for c in _callbacks_of(self._trainer) if type(c).on_save_checkpoint is not plain]
