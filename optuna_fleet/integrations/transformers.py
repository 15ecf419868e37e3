"""A `transformers.Trainer` on as many devices as the fleet gives its trial.

::

    from optuna_fleet.integrations.transformers import FleetTrainer, PruningCallback

    def objective(trial):
        trainer = FleetTrainer(
            trial,
            model=AutoModelForSequenceClassification.from_config(config),
            args=TrainingArguments(
                learning_rate=trial.suggest_float("lr", 1e-5, 1e-3, log=True),
                per_device_train_batch_size=32,  # that of the whole trial
                eval_strategy="epoch",
            ),
            train_dataset="train",  # the data sets of the SharedPipeline, by name
            eval_dataset="val",
            callbacks=[PruningCallback(trial, "eval_loss")],
        )
        trainer.train()
        return trainer.evaluate()["eval_loss"]

A Trainer class of your own: ``class Mine(FleetTrainerMixin, MyTrainer): pass``.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import optuna
import torch

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_pt_utils import nested_concat
except ImportError as error:
    raise ImportError(f"{error}; please: pip install 'optuna-fleet[transformers]'") from None

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.integrations import fleet_trial
from optuna_fleet.trainer.gradients.collectives import gather
from optuna_fleet.trainer.gradients.weights import Share
from optuna_fleet.trainer.nested import map_tensors
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
    count, on any number of devices; see `weighted`. Losses and metrics are those of all devices,
    on every rank; only rank 0 is a process that logs and saves.

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
    preprocess_logits_for_metrics: Any
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
        self._num_evaluated: Any = None
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
        """The trial's share of a data set; see `Trainer`."""
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(self.eval_dataset, dict):
            given = self.eval_dataset.get(given, given)
        return self._loader("eval_dataset", given, self.args.eval_batch_size)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The trial's share of a data set; see `Trainer`."""
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
        if not torch.is_grad_enabled():
            self._num_evaluated = num_items_in_batch
            return found
        if num_items_in_batch is None:
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

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """See `Trainer`; on all ranks the outcome is that of all of them."""
        self._prepare(self.model)
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        preprocess = self.preprocess_logits_for_metrics

        def step(inputs: Any) -> tuple[Any, Any, Any, Any]:
            # Not all let `compute_loss` know: Seq2SeqTrainer has the model itself compute it.
            self._num_evaluated = self._get_num_items_in_batch([inputs], self.args.device)
            found = self.prediction_step(self.model, inputs, prediction_loss_only, ignore_keys)
            loss, logits, labels = found
            if preprocess is not None and logits is not None:
                logits = preprocess(logits, labels)
            return loss, self._num_evaluated, logits, labels

        evaluation = Evaluation(
            dataloader,
            step,
            main_input=getattr(self.model, "main_input_name", "input_ids"),
            with_inputs="inputs" in self.args.include_for_metrics,
            gradient_state=self.accelerator.gradient_state,
        )
        self.preprocess_logits_for_metrics = None  # it is done
        try:
            return super().evaluation_loop(
                evaluation, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        finally:
            self.preprocess_logits_for_metrics = preprocess

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """See `Trainer`."""
        if not isinstance(inputs, Merged):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        logits, labels, _ = inputs.outcome.kept
        return inputs.outcome.loss, logits, labels


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


class PruningCallback(TrainerCallback):
    """Reports a metric of each evaluation in training, and prunes the trial if it is to be.

    Steps are epochs from 0, or optimizer steps with ``eval_strategy="steps"``.

    Args:
        trial: What the objective was given, on a fleet or not.
        monitor: Name of the metric, as ``"eval_loss"``.
    """

    def __init__(self, trial: optuna.Trial, monitor: str = "eval_loss") -> None:
        self._trial = trial
        self._monitor = monitor
        self._trains = False
        self._seen: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See `TrainerCallback`."""
        self._trains = True

    def on_evaluate(
        self,
        args: Any,
        state: Any,
        control: Any,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report.

        Raises:
            TrialPruned: The pruner says so.
        """
        self._seen.update(metrics or {})
        if not self._trains or state.global_step == 0 or self._monitor not in (metrics or {}):
            return
        by_steps = getattr(args.eval_strategy, "value", args.eval_strategy) == "steps"
        assert metrics is not None
        step = state.global_step if by_steps else math.ceil(state.epoch) - 1
        self._trial.report(metrics[self._monitor], step)
        if self._trial.should_prune():
            raise optuna.TrialPruned(f"Trial was pruned at step {step}.")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell of a name that no evaluation had.

        Raises:
            FleetConfigError: There was none of that name.
        """
        self._trains = False
        if self._seen and self._monitor not in self._seen:
            raise FleetConfigError(
                f"PruningCallback was to report {self._monitor!r}, but evaluations have given "
                f"{sorted(self._seen)} only: name one of them as `monitor`."
            )


# -- what of a Trainer moves along with its trial -------------------------------------------------


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


# -- data, and evaluation on all of the trial's devices -------------------------------------------


_concat: Any = nested_concat
_PADDING = -100  # what Transformers fills up logits and labels of unlike lengths with


class Loader:
    """What a Trainer takes for its DataLoader: this rank's share of each batch.

    Args:
        batch_size: That of the whole trial.
        columns: Those that the model takes; None for all.

    Attributes:
        dataset: As long as the data set; nothing else.
        shares: The shares of the batches that were read, until somebody clears it.
    """

    def __init__(
        self,
        trial: FleetTrial,
        name: str,
        batch_size: int,
        *,
        drop_last: bool,
        columns: list[str] | None,
    ) -> None:
        self.batch_size = batch_size
        self.shares: list[Share] = []
        self._trial = trial
        self._batches = trial.batches(name, batch_size, drop_last=drop_last)
        self._columns = columns
        self.dataset = range(trial.num_samples(name))

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self.shares.append(self._trial.batch_share)
            yield self._chosen(batch)

    def _chosen(self, batch: Any) -> Any:
        if self._columns is None or not isinstance(batch, Mapping):
            return batch
        return {name: value for name, value in batch.items() if name in self._columns}


@dataclasses.dataclass(slots=True)
class Part:
    """A rank's part in the loss of a batch.

    Attributes:
        share: What the loss of its samples counts in that of all.
        num_items: How many labels its samples have; None where that does not matter.
    """

    share: Any
    num_items: torch.Tensor | None = None

    @classmethod
    def of_items(cls, num_items: torch.Tensor, total: torch.Tensor) -> Part:
        """Of a mean over labels."""
        return cls(num_items / total if total > 0 else torch.zeros_like(total), num_items)

    def divisor(self, num_items_in_step: torch.Tensor) -> torch.Tensor:
        """What a model divides its sum over labels by, given those of all batches of a step.

        So the sum over the ranks of the losses times their shares is what it would be on one. A
        model that returns a mean whatever it is given is right as well.
        """
        return num_items_in_step * self.share if self.share > 0 else torch.ones_like(self.share)


class Outcome(NamedTuple):
    """What `Trainer.prediction_step` has given for one batch, or a rank's share of it.

    Attributes:
        loss: Its mean loss.
        weight: What that weighs among the shares of the batch.
        num_rows: Number of samples.
        kept: Logits, labels and inputs.
    """

    loss: torch.Tensor | None
    weight: float
    num_rows: int
    kept: tuple[Any, Any, Any]

    @classmethod
    def merged(cls, parts: list[Outcome]) -> Outcome:
        """That of a batch from those of its shares, in order."""
        if len(parts) == 1:
            return parts[0]
        weight = sum(part.weight for part in parts)
        counting = [part for part in parts if part.weight] or parts
        losses = [p.loss * (p.weight / weight) for p in counting if p.loss is not None]
        kept = tuple(_concatenated(some) for some in zip(*(p.kept for p in parts), strict=True))
        return cls(
            loss=torch.stack(losses).sum() if losses else None,
            weight=weight,
            num_rows=sum(part.num_rows for part in parts),
            kept=kept,
        )


def _concatenated(parts: tuple[Any, ...]) -> Any:
    whole, *others = parts
    for part in others if whole is not None else ():
        whole = _concat(whole, part, padding_index=_PADDING)
    return whole


class Merged(dict[str, Any]):
    """Stands for the inputs of a batch that all ranks have evaluated: `outcome` is there."""

    outcome: Outcome


class Evaluation:
    """Evaluates each rank's share, and hands out whole batches with their outcomes.

    Trainer's own loop goes over these as it does in one process. So metrics are computed of all
    samples, in their order, on every rank.

    Args:
        step: Returns the loss, its weight (None: the number of samples), logits and labels.
        main_input: Name of the inputs that Trainer looks at.
        gradient_state: Accelerate's, which knows from whoever is read when a pass ends.

    Attributes:
        end_of_dataloader: The last batch was handed out.
        remainder: Number of samples of the last batch if these are fewer than in others, else 0.
    """

    def __init__(
        self,
        loader: Loader,
        step: Callable[[Any], tuple[Any, float | None, Any, Any]],
        *,
        main_input: str,
        with_inputs: bool,
        gradient_state: Any,
    ) -> None:
        self.end_of_dataloader = False
        self.remainder = -1
        self.dataset = loader.dataset
        self._loader = loader
        self._step = step
        self._main_input = main_input
        self._with_inputs = with_inputs
        self._gradient_state = gradient_state

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Merged]:
        self._gradient_state._add_dataloader(self)
        try:
            for number, outcome in enumerate(self._outcomes(), 1):
                inputs = outcome.kept[2] if self._with_inputs else torch.empty(outcome.num_rows)
                merged = Merged({self._main_input: inputs})
                merged.outcome = outcome
                if number == len(self):
                    self.end_of_dataloader = True
                    self.remainder = outcome.num_rows % self._loader.batch_size
                yield merged
        finally:
            self._gradient_state._remove_dataloader(self)

    def _outcomes(self) -> Iterator[Outcome]:
        if self._loader._trial.world_size == 1:
            for _, outcome in self._own():
                yield outcome
            return
        everyone = gather({str(step): tuple(outcome) for step, outcome in self._own()})
        for step in map(str, range(len(self))):
            yield Outcome.merged([Outcome(*one[step]) for one in everyone if step in one])

    def _own(self) -> Iterator[tuple[int, Outcome]]:
        """This rank's, and of which step: it has none of batches that are too small for all."""
        with torch.no_grad():
            for number, inputs in enumerate(self._loader):
                share = self._loader.shares.pop()
                loss, weight, logits, labels = self._step(inputs)
                outcome = Outcome(
                    loss=None if loss is None else loss.detach().cpu(),
                    weight=float(share.local_size if weight is None else weight),
                    num_rows=share.local_size,
                    kept=_on_cpu((logits, labels, self._inputs_in(inputs))),
                )
                is_last = share.global_size < self._loader.batch_size
                yield (len(self) - 1 if is_last else number), outcome

    def _inputs_in(self, inputs: Any) -> Any:
        return inputs[self._main_input] if self._with_inputs else None


def _on_cpu(data: Any) -> Any:
    return map_tensors(data, lambda tensor: tensor.detach().cpu())


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
