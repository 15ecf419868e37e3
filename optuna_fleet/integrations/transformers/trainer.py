"""A Trainer that trains as part of a trial."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import optuna
import torch
from transformers import Trainer, TrainerCallback

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.integrations import fleet_trial
from optuna_fleet.integrations.transformers.trainer_parts import Evaluation, Loader, Part, Progress
from optuna_fleet.trainer.gradients.collectives import gather
from optuna_fleet.trainer.trial import FleetTrial

_Base: Any = object if not TYPE_CHECKING else Trainer

# In trainers there is a process group, in which Accelerate has no part.
logging.getLogger("transformers.training_args").addFilter(
    lambda record: not record.getMessage().startswith("torch.distributed process group is init")
)


class FleetTrainerMixin(_Base):  # type: ignore[misc]
    """Makes a Trainer class train as part of a trial.

    ``class Mine(FleetTrainerMixin, MyTrainer): pass``

    The model, its optimizer and scheduler are prepared (`FleetTrial.prepare`), data come from the
    shared pipeline, and Trainer's epochs are `FleetTrial.epochs`: between two of them the trial is
    checkpointed and may move. Trainer's state moves along, and that of callbacks which are
    `ExportableState`. Trainer's own checkpoints are off.

    Losses of models that are told of `num_items_in_batch` are exact means over the labels that
    count, on any number of devices; see `weighted`. What is logged is of all devices, on every
    rank; only rank 0 is a process that logs and saves. Each rank evaluates all samples.

    Args:
        trial: What the objective was given.
        args: Those of the Trainer class. `train_dataset` and `eval_dataset` are names of data
            sets of the SharedPipeline; batch sizes are those of the whole trial.
        min_devices: See `FleetTrial.prepare`.
        max_devices: See `FleetTrial.prepare`.
        kwargs: See `args`.

    Raises:
        FleetConfigError: The trial is not one of a fleet, or an argument can't work on one.
    """

    args: Any
    current_flos: Any
    _total_loss_scalar: Any

    def __init__(
        self,
        trial: optuna.Trial,
        *args: Any,
        min_devices: int | None = None,
        max_devices: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.fleet_trial = fleet_trial(trial, type(self).__name__)
        if kwargs.get("data_collator") is not None:
            raise FleetConfigError(
                "`data_collator` was given to a Trainer on a fleet, but batches are made by the "
                "pipeline: SharedPipeline(..., collate_fn=...)."
            )
        self._bounds: dict[str, Any] = {"min_devices": min_devices, "max_devices": max_devices}
        self._epochs: Iterator[int] = iter(())
        self._parts: deque[Part] = deque()
        super().__init__(*args, **kwargs)
        _check_arguments(self.args, self.fleet_trial)
        self.args = _arguments_of(self.args, self.fleet_trial.rank)
        self.callback_handler.callbacks.insert(0, _Follower(self))

    def weighted(self, loss: torch.Tensor, num_items: Any) -> torch.Tensor:
        """Return the loss of this rank's samples as it counts among those of all ranks.

        Override it with ``return loss`` where `compute_loss` uses `FleetTrial.weighted` itself.

        Args:
            loss: What `compute_loss` has returned.
            num_items: How many labels it is the mean of.
        """
        return self.fleet_trial.weighted(loss, num_items, fetched_ahead=True)

    # -- data -------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """The trial's share of the training data; see `Trainer`."""
        return self._loader("train_dataset", self.train_dataset, self._train_batch_size)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """A data set, of which each rank evaluates all; see `Trainer`."""
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(self.eval_dataset, dict):
            given = self.eval_dataset.get(given, given)
        return self._loader("eval_dataset", given, self.args.eval_batch_size)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """A data set, of which each rank evaluates all; see `Trainer`."""
        return self._loader("test_dataset", test_dataset, self.args.eval_batch_size)

    def _loader(self, argument: str, name: Any, batch_size: int) -> Loader:
        if not isinstance(name, str):
            raise FleetConfigError(
                f"`{argument}` is a `{type(name).__name__}`, but must be the name of a data set "
                'of the pipeline: FleetExecutor(SharedPipeline(train=...)), train_dataset="train".'
            )
        self._set_signature_columns_if_needed()
        return Loader(
            self.fleet_trial,
            name,
            batch_size,
            drop_last=self.args.dataloader_drop_last,
            columns=self._signature_columns if self.args.remove_unused_columns else None,
        )

    # -- what trains ------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer`.

        Raises:
            FleetConfigError: It is to resume from a checkpoint of Trainer's own.
        """
        if resume_from_checkpoint:
            raise FleetConfigError(
                f"`resume_from_checkpoint` is {resume_from_checkpoint!r}, but a trial resumes by "
                "itself from checkpoints of its own: FleetExecutor(checkpoints=...)."
            )
        output = super().train(None, *args, **kwargs)
        return output._replace(training_loss=output.metrics["train_loss"])

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        super()._init_training_state(*args, **kwargs)
        self._progress = Progress(self)
        self.fleet_trial.prepare(self._progress)  # in a resumed trial it is restored here
        self._progress.put_back_state()
        return self._progress.num_epochs, 0

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        model_and_loader = super()._prepare_for_training(*args, **kwargs)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # not Accelerate's
        self._prepare(self.model, optimizer, self.lr_scheduler, self.accelerator.scaler)
        return model_and_loader

    def _prepare(self, *parts: Any) -> None:
        known = self.fleet_trial.prepared  # another Trainer may have the same model
        new = [part for part in parts if part is not None and all(part is not k for k in known)]
        if new:
            self.fleet_trial.prepare(*new, **self._bounds)

    # -- epochs -----------------------------------------------------------------------------------

    def begin_epochs(self) -> None:
        """Trainer is about to begin with its epochs, or with what the trial has left of them."""
        self._epochs = self.fleet_trial.epochs(self.state.num_train_epochs)
        next(self._epochs, None)
        self._progress.put_back_losses()

    def end_epochs(self) -> None:
        """There will be no more; should the trial move later, they are not done again."""
        self._tr_loss.zero_()  # it was added to the total
        self._merge_losses()
        self._progress.end()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        super()._run_epoch(*args, **kwargs)
        self._progress.num_epochs += 1
        is_last = self._progress.num_epochs >= self.state.num_train_epochs
        if self.control.should_training_stop and not is_last:
            return
        self._merge_losses()
        self.store_flos()
        # The trial leaves from here if it has to move. Where it has converged, it has no more.
        if next(self._epochs, None) is None:
            self.control.should_training_stop = True

    # -- losses -----------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Batches of one step, and how many labels they have on all ranks; see `Trainer`."""
        loader = self.callback_handler.train_dataloader
        loader.shares.clear()
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.fleet_trial.world_size == 1:
            return batches, num_items
        self._parts = deque(Part(share.weight) for share in loader.shares)
        if num_items is None:
            return batches, None
        counts = [
            torch.as_tensor(self._get_num_items_in_batch([batch], device)).double()
            * (share.local_size > 0)
            for batch, share in zip(batches, loader.shares, strict=True)
        ]
        totals = self.fleet_trial.sum(counts)
        self._parts = deque(map(Part.of_items, counts, totals))
        return batches, sum(totals)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """One backward pass; returns this rank's part of the trial's loss. See `Trainer`."""
        if self.fleet_trial.world_size == 1:
            return super().training_step(model, inputs, num_items_in_batch)
        self._part = part = self._parts.popleft()
        if num_items_in_batch is not None:
            num_items_in_batch = part.divisor(num_items_in_batch)
        loss = super().training_step(model, inputs, num_items_in_batch)
        return loss * part.share if part.share > 0 else torch.zeros_like(loss)

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """See `Trainer`; a training loss is `weighted` by the number of labels that it is of."""
        found = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        if num_items_in_batch is None or not torch.is_grad_enabled():
            return found
        num_items = num_items_in_batch
        if self.fleet_trial.world_size > 1:
            num_items = self._part.num_items
        loss, outputs = found if return_outputs else (found, None)
        loss = self.weighted(loss, num_items)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """See `Trainer`; its own losses are those of all ranks."""
        own = {name: logs[name] for name in ("loss", "train_loss") if name in logs}
        if own and self.is_in_train and self.fleet_trial.world_size > 1:
            logs.update(self.fleet_trial.sum(own))
        super().log(logs, *args, **kwargs)

    def store_flos(self) -> None:
        """See `Trainer`; those of all ranks."""
        if self.fleet_trial.world_size > 1:
            self.current_flos = self.fleet_trial.sum(self.current_flos)
        super().store_flos()

    def _merge_losses(self) -> None:
        """Rank 0 has what all have added up: its state is that of the trial."""
        if self.fleet_trial.world_size == 1:
            return
        own = [self._tr_loss.item(), self._total_loss_scalar]
        latest, total = self.fleet_trial.sum(own)
        is_first = self.fleet_trial.rank == 0
        self._tr_loss.fill_(latest if is_first else 0.0)
        self._total_loss_scalar = total if is_first else 0.0

    # -- evaluation -------------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer`; each rank evaluates all samples, and all have rank 0's numbers."""
        self._prepare(self.model)
        evaluation = Evaluation(dataloader, self.accelerator.gradient_state)
        self.fleet_trial.give_whole_batches(True)
        try:
            with torch.no_grad():  # with gradients, shuffled batches would be ones to train on
                output = super().evaluation_loop(evaluation, *args, **kwargs)
        finally:
            self.fleet_trial.give_whole_batches(False)
        numbers = {n: x for n, x in output.metrics.items() if isinstance(x, int | float)}
        return output._replace(metrics={**output.metrics, **gather(numbers)[0]})


class FleetTrainer(FleetTrainerMixin, Trainer):
    """A `transformers.Trainer` that trains as part of a trial; see `FleetTrainerMixin`."""


class _Follower(TrainerCallback):
    """Tells of where Trainer is, before other callbacks hear of it."""

    def __init__(self, trainer: FleetTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.begin_epochs()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.end_epochs()


# -- TrainingArguments ----------------------------------------------------------------------------


def _arguments_of(args: Any, rank: int) -> Any:
    """A copy for a process that logs and saves if it is rank 0, and nothing between epochs."""
    own = copy.copy(args)
    own.distributed_state = copy.copy(args.distributed_state)  # a copy shares nothing
    own.distributed_state.process_index = own.distributed_state.local_process_index = rank
    own.save_strategy = type(args.save_strategy)("no")
    return own


def _check_arguments(args: Any, trial: FleetTrial) -> None:
    """Raise an error for what is done by others on a fleet, or can't be done."""
    if (kind := getattr(args.distributed_state, "distributed_type", "NO")) != "NO":
        raise FleetConfigError(
            f"Accelerate takes this for one of several processes ({kind}), as there are variables "
            "of a launcher in its environment (LOCAL_RANK, WORLD_SIZE, PMI_SIZE, ...): start the "
            "script without torchrun, `accelerate launch` or mpirun."
        )
    if args.device.type != trial.device.type:
        raise FleetConfigError(
            f"TrainingArguments are for {args.device.type!r}, but the trial's device is "
            f"{trial.device.type!r}: leave out `use_cpu` on GPUs, and set it on a fleet of CPUs."
        )
    for name, allowed, advice in _OF_OTHERS:
        value = getattr(args, name, allowed)
        if value and getattr(value, "value", value) != allowed:
            raise FleetConfigError(f"`{name}` is {value!r}, which a trial can't have: {advice}.")


_ONE_DEVICE = "on a fleet each device has the whole model"
_OF_OTHERS = (
    (
        "load_best_model_at_end",
        False,
        "return trial.best_value with a PruningCallback; with FleetExecutor(checkpoints=...) "
        "load_best_model(study) has those weights",
    ),
    ("auto_find_batch_size", False, "suggest the batch size"),
    ("train_sampling_strategy", "random", "the order is SharedPipeline(sampler=...)'s"),
    ("include_num_input_tokens_seen", "no", "each device sees its own samples only"),
    ("deepspeed", None, _ONE_DEVICE),
    ("fsdp", None, _ONE_DEVICE),
    ("parallelism_config", None, _ONE_DEVICE),
)
