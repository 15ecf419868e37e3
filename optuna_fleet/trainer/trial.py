"""The trial object that an objective gets in a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from optuna_fleet.exceptions import TrialError
from optuna_fleet.options import Convergence
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.trainer.remote import RemoteTrial
from optuna_fleet.trainer.session import Reports, Session
from optuna_fleet.wire.packing import plain

if TYPE_CHECKING:
    import torch

    from optuna_fleet.trainer.data.shard_loader import Shards
    from optuna_fleet.trainer.gradients.weights import Share
    from optuna_fleet.trainer.totals import Totals
    from optuna_fleet.trainer.training import Training
    from optuna_fleet.virtual_workers import Pipeline


class FleetTrial(RemoteTrial):
    """An `optuna.Trial` with the methods of training on the fleet.

    An objective that uses none of them is a plain Optuna objective: it runs unchanged, on one
    device.
    """

    def __init__(self, session: Session, open_training: Callable[[], Training]) -> None:
        super().__init__(session)
        self._open_training = open_training
        self.opened: Training | None = None

    @property
    def _training(self) -> Training:
        if self.opened is None:
            self.opened = self._open_training()
        return self.opened

    @property
    def rank(self) -> int:
        """This process's rank within the trial, from 0."""
        return self._session.run.rank

    @property
    def world_size(self) -> int:
        """Number of devices the trial trains on at present."""
        return self._session.run.world_size

    @property
    def is_resumed(self) -> bool:
        """Whether the objective has run before in this trial, which goes on from where it was.

        After a move, or a death: what is to happen once (the start of a log) comes under
        ``if not trial.is_resumed``. False where a trial begins, and where one that died before its
        first checkpoint begins again.
        """
        return self._session.run.resumes and self._training.kept.goes_on

    @property
    def is_preflight(self) -> bool:
        """Whether this is a rehearsal of the pre-flight check, in a process that is thrown away.

        Use it where the objective's beginning does what must be done for real trials only: ``if
        not trial.is_preflight: database.insert(...)``. It must not change what is trained. There
        `number` is 0, and what is reported goes nowhere.
        """
        return False

    @property
    def shard_size(self) -> int:
        """Samples of the present batch on this rank: its weight in ``mean(loss, weight=...)``.

        0 where the batch has fewer samples than the trial has ranks: such a rank gets a stand-in
        sample, which keeps it in step and counts for nothing in the gradient.
        """
        return self.batch_share.local_size

    @property
    def device(self) -> torch.device:
        """The torch device of this process."""
        return self._training.device

    @property
    def state(self) -> dict[str, Any]:
        """The objective's own variables that must survive a move: part of every checkpoint.

        Values may be numbers, strings, tensors and plain lists, tuples, sets, dicts, `OrderedDict`
        or `Counter` of these; no `defaultdict`.
        """
        return self._training.kept.state

    @property
    def totals(self) -> Totals:
        """Sums over an epoch, which follow the trial when it moves within one.

        ``trial.totals["loss"] += loss.detach() * trial.shard_size`` in the loop over the batches;
        after it `trial.totals["loss"]` is the sum over all devices,
        ``trial.totals.mean("loss", "samples")`` a quotient. All are 0 when an epoch begins.
        """
        return self._training.totals

    @property
    def best_value(self) -> float | None:
        """The best value reported so far in the study's direction; None if there is none.

        A local variable of the objective is lost when the trial moves or is resumed; this is not.
        NaN never is the best; of two reports for one step the first counts, as in the study.

        Raises:
            NotImplementedError: The study has several objectives, where Optuna takes no reports.
        """
        return self._reports("best_value").best

    def should_stop(self, patience: int, min_improvement: float = 0.0) -> bool:
        """Whether none of the last `patience` reported values improved on the best before them.

        As ``if trial.should_stop(patience=5): break``; return `best_value`.

        Args:
            patience: Number of reports in a row without an improvement.
            min_improvement: By how much a value must beat the best so far to count as one.

        Raises:
            FleetConfigError: An argument is out of range.
            TrialError: Nothing was reported.
            NotImplementedError: The study has several objectives, where Optuna takes no reports.
        """
        criterion = Convergence(patience=patience, min_improvement=min_improvement)
        reports = self._reports("should_stop")
        if not reports.values:
            raise TrialError(
                "trial.should_stop() was called before anything was reported: call "
                "trial.report(value, step) first."
            )
        maximize = bool(self._session.run.maximize)
        return criterion.is_reached(list(reports.values.values()), maximize=maximize)

    def _reports(self, asked_by: str) -> Reports:
        run = self._session.run
        if run.maximize is None:
            raise NotImplementedError(
                f"Trial.{asked_by} is not supported for multi-objective optimization."
            )
        if run.resumes:
            self._training  # noqa: B018 - knows what was reported before
        return self._session.reports

    def report(self, value: float, step: int) -> None:
        """See `optuna.Trial.report`; does not wait until the value is stored.

        Should that fail, because the value is not the same on all ranks of the trial, say, the
        error is raised by the next call that has an answer, or else it is the objective's end.
        """
        if self._session.run.world_size > 1:
            self._training.check_ranks()
        num_objectives = 2 if self._session.run.maximize is None else 1
        value = value if type(value) is float else plain(value)
        value, step = compat.checked_report(value, step, num_objectives=num_objectives)
        if self._session.report(value, step) and self.opened is not None:
            self.opened.leaving.keep_best()

    def prepare(
        self,
        *objects: Any,
        min_devices: int | None = None,
        max_devices: int | None = None,
        kind: str | None = None,
        **named: Any,
    ) -> Any:
        """Make modules, optimizers, schedulers and scalers part of the trial.

        Modules move to the trial's device and, on several devices, train data parallel with the
        exact mean gradient and synchronised BatchNorm. Whatever has a `state_dict` is
        checkpointed, and restored here when the trial was resumed.

        Args:
            objects: Anything with `state_dict` and `load_state_dict`.
            min_devices: Fewest devices that the trial may have. The objective is begun on one
                device nevertheless, up to its first batch. With more than 1 it is not checked
                whether the trial gives the same on several devices.
            max_devices: Most devices that the trial may have; None for as many as it can use.
            kind: What the trial is, in a word: all trials of one kind are checked once, by one
                of them. None to tell kinds by the choices that were suggested, and by the types
                of what is prepared.
            named: More objects, under the names by which `load_best_model` finds them:
                ``trial.prepare(model, optimizer, ema=ema)``.

        Returns:
            The same objects in the same order (one alone as itself); none is wrapped.

        Raises:
            FleetConfigError: An object has no `state_dict`, or there are fewer devices than
                `min_devices`.
        """
        said = {"min_devices": min_devices, "max_devices": max_devices}
        return self._training.prepare(*objects, named=named, kind=kind, **said)

    def pipeline(
        self,
        model: torch.nn.Sequential,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Any], torch.Tensor],
        *,
        in_flight: int | None = None,
        clock_distance: int | None = None,
        virtual_workers: int | None = None,
        layout: str | None = None,
        max_grad_norm: float | None = None,
        memory_bytes: float | None = None,
        min_devices: int | None = None,
        max_devices: int | None = None,
    ) -> Pipeline:
        """Train a model in stages, one on each of the trial's devices, instead of `prepare`.

        Results are the same on any number of them, of any types. Ranks get whole batches; `sum`,
        `mean` and `totals` add up nothing. Don't call the model: each rank keeps some layers only.

        Args:
            model: Its layers in their order; what one returns is what the next one gets.
            optimizer: Of the model's parameters; it must treat them one by one.
            loss: From the model's output and the targets to the mean over the samples.
            in_flight: Parts of a batch (BatchNorm sees parts); default 4. With a clock distance
                batches in flight; default as many as help, if memory allows.
            clock_distance: Waves that several pipelines may be apart; no device waits then for a
                batch's end, but weights are older by the batches in flight, and SGD's only.
            virtual_workers: How many share each batch at most; default: those that are fastest.
            layout: Which devices become one of these: "NP", "ED", "HD", "ED-local" (HetPipe).
            max_grad_norm: To clip the norm of all gradients.
            memory_bytes: Of a device; default: what is free on a GPU, no limit on a CPU.
            min_devices: As in `prepare`.
            max_devices: None for as many as pipelines can use.

        Raises:
            FleetConfigError: The model can't be cut, or this optimizer can't train it so.
        """
        return self._training.pipeline(
            *(model, optimizer, loss),
            in_flight=in_flight,
            clock_distance=clock_distance,
            virtual_workers=virtual_workers,
            layout=layout,
            max_grad_norm=max_grad_norm,
            memory_bytes=memory_bytes,
            min_devices=min_devices,
            max_devices=max_devices,
        )

    def weighted(
        self, loss: torch.Tensor, weight: Any, *, fetched_ahead: bool = False
    ) -> torch.Tensor:
        """Return a loss whose gradients are exact where it is no plain mean over the samples.

        Gradients are averaged over the devices by the number of samples. A weighted mean,
        sum(w * l) / sum(w), needs the sum of its weights, one over tokens `mask.sum()`::

            loss = F.cross_entropy(model(x), y, weight=class_weights)
            trial.weighted(loss, class_weights[y].sum()).backward()

        The result can be scaled, added to other losses, and stepped through a GradScaler. All
        ranks must call it alike.

        Args:
            loss: The weighted mean over this rank's samples, a tensor of one element. Where this
                rank has no weight at all it may be NaN (0 / 0).
            weight: The sum of their weights, a number or a tensor of one element.
            fetched_ahead: The loss may be of an earlier batch than the one that was read last.
                Then `weight` must be 0 for a stand-in sample, for which `shard_size` was 0 when
                its batch was read.

        Returns:
            A loss of the same value, of this rank's samples. On one device `loss` itself.

        Raises:
            FleetConfigError: `loss` is no tensor of one element, or `weight` no number >= 0.
        """
        return self._training.weighted(loss, weight, fetched_ahead=fetched_ahead)  # type: ignore[no-any-return]

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Iterate over the epochs still to train: from 0, or from where the trial stopped.

        Between two epochs a trial may be checkpointed and moved to other devices: the objective is
        then run again there with the same parameters. The loop also ends when the trial has
        converged.
        """
        return self._training.epochs(num_epochs)

    def steps(self, num_steps: int, *, every: int) -> Iterator[int]:
        """Iterate over periods of `every` training steps, of `num_steps` in all.

        As over `epochs`: between two periods a trial may be checkpointed and moved. In a period
        `batches` of training data has so many (the last may have fewer), and goes on where the
        period before has ended, over the end of the data's epoch too. What is not shuffled is read
        whole. Keep to one batch size in a loop, or samples are left out or repeated.
        """
        return self._training.steps(num_steps, every)

    def batches(
        self,
        name: str,
        batch_size: int | None = None,
        *,
        drop_last: bool = False,
        movable: bool = False,
    ) -> Shards:
        """Return this rank's share of the batches of one epoch from the shared pipeline.

        `batch_size` is that of the whole trial: the batch is cut into one shard per rank, so
        results do not depend on the number of devices. By default it is the one that the objective
        gave last. `len()` of the result is the number of steps. Without `prepare` the trial stays
        on one device.

        `movable=True` says that the loop keeps nothing of its own from batch to batch, but in what
        was prepared, `state` and `totals`. Then the trial may be checkpointed, or move, between
        two batches of an epoch's first pass: the objective runs again up to this loop, which goes
        on with the next batch.

        Raises:
            FleetConfigError: No such data set, or a bad batch size, or none so far.
            PreprocessingError: A sample could not be preprocessed.
        """
        return self._training.loader.batches(
            name, batch_size, drop_last=drop_last, movable=movable
        )

    # -- for integrations of training frameworks --------------------------------------------------

    @property
    def prepared(self) -> tuple[Any, ...]:
        """What was given to `prepare` so far."""
        return tuple(self._training.kept.objects)

    @property
    def has_pending_gradients(self) -> bool:
        """Whether gradients wait for the step of some optimizer; a checkpoint then has them."""
        return self._training.kept.has_pending_gradients

    @property
    def batch_share(self) -> Share:
        """This rank's part of the batch that was read last."""
        return self._training.weights.present

    def num_samples(self, name: str) -> int:
        """Return the number of samples of a data set of the pipeline."""
        return self._training.loader.num_samples(name)

    def give_whole_batches(self, is_whole: bool) -> None:
        """Let `batches` give each rank all of a batch from now on, or again its share."""
        self._training.loader.give_whole_batches(is_whole=is_whole)

    def stay_on(self, num_devices: int, why: str) -> NoReturn:
        """Leave the objective: the trial goes on from its last checkpoint, on so many at most.

        `why` is a sentence for the user.
        """
        raise self._training.weights.too_wide(why, max_devices=num_devices)

    # -- sums over the ranks ----------------------------------------------------------------------

    def sum(self, value: Any) -> Any:
        """Return the sum of `value` over the trial's ranks (number, tensor, or dict of these).

        A new value without gradients, on any number of devices: call `loss.backward()` on the
        rank's own loss.
        """
        return self._training.sum(value)

    def mean(self, value: Any, weight: float | None = None) -> Any:
        """Return the mean of `value` over the trial's ranks, weighted by `weight` >= 0 if given.

        A new value without gradients, as of `sum`.
        """
        return self._training.mean(value, weight)
