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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

try:
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.trainer.states import TrainerFn
    from torchmetrics import Metric
except ImportError as error:
    raise ImportError(f"{error}; please: pip install 'optuna-fleet[lightning]'") from None

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.integrations import fleet_trial
from optuna_fleet.trainer.data.shard_loader import Shards
from optuna_fleet.trainer.gradients.collectives import gather, of_first_rank
from optuna_fleet.trainer.groups import group_size, wire_device
from optuna_fleet.trainer.trial import FleetTrial

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
        # What is logged per epoch is reduced by `_Follower`.
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
        follower = _Follower(self._trial)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [follower, *(c for c in callbacks if not isinstance(c, _Follower))]
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


# -- the trial's epochs, and what is logged -------------------------------------------------------


class _Follower(Callback):
    """Goes through the trial's epochs as Lightning goes through its own.

    It is the first of the callbacks: others see what it has put together of what all ranks have
    logged. It takes back what samples have counted that only keep a rank in step.

    Attributes:
        resumes: The trial goes on here, after a `fit` that it has begun elsewhere.
    """

    def __init__(self, trial: FleetTrial) -> None:
        self.resumes = False
        self._trial = trial
        self._num_epochs = 0
        self._epochs: Iterator[int] = iter(())
        self._logged = _Logged(trial)
        self._metrics: list[tuple[Any, dict[str, Any], int]] = []  # before a stand-in's step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the trial's epochs."""
        assert trainer.max_epochs is not None  # see `FleetStrategy.setup`
        self._num_epochs = trainer.max_epochs  # with those that callbacks have added
        self._epochs = self._trial.epochs(self._num_epochs)
        log = pl_module.log

        def log_samples(*args: Any, **options: Any) -> None:
            if self._trial.shard_size == 0:  # it must not count
                options["batch_size"] = 0
            log(*args, **options)

        pl_module.log = log_samples  # type: ignore[method-assign]

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
        """Note what metrics hold before the step of a stand-in, which must not count."""
        if self._trial.shard_size == 0:
            metrics: Any = [m for m in pl_module.modules() if isinstance(m, Metric)]
            self._metrics = [(m, m._copy_state_dict(), m._update_count) for m in metrics]

    def on_train_batch_end(self, *args: Any) -> None:
        """Have metrics hold that again."""
        for metric, state, count in self._metrics:
            vars(metric).update(state, _update_count=count, _computed=None)
        self._metrics = []
        self._logged.last_size = self._trial.shard_size

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged.check_data(trainer)

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged.merge(trainer)

    on_test_epoch_end = on_validation_epoch_end

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged.merge(trainer)
        self._logged.merge_steps(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged.check_monitored(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the trial's epochs."""
        self._logged.check_monitored(trainer)
        del pl_module.log
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
        self.last_size = 0  # of this rank's part of the last batch that was trained on

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
            known.update(self._trial.mean(steps, weight=self.last_size))

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
