"""What `FleetTrial.pipeline` returns: a model that is trained in stages, one on each device."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.trainer.checkpoints import checkpoint
from optuna_fleet.trainer.groups import group_size
from optuna_fleet.trainer.nested import to_device
from optuna_fleet.trainer.pipeline_parallel.clipping import clip_gradients
from optuna_fleet.trainer.pipeline_parallel.flushed import FlushedWeights
from optuna_fleet.trainer.pipeline_parallel.messages import (
    Activations,
    Inputs,
    StageAddress,
    Targets,
)
from optuna_fleet.trainer.pipeline_parallel.microbatches import microbatches, num_samples
from optuna_fleet.trainer.pipeline_parallel.parts import parameters_of
from optuna_fleet.trainer.pipeline_parallel.passes import Loss, StageModule
from optuna_fleet.trainer.pipeline_parallel.placement import Demand, blocks_of, memory_of
from optuna_fleet.trainer.pipeline_parallel.placing import (
    Placed,
    Surroundings,
    memory_of_device,
    place,
)
from optuna_fleet.trainer.pipeline_parallel.stage import PassDone, PipelineStage
from optuna_fleet.trainer.pipeline_parallel.updates import SgdRule
from optuna_fleet.trainer.pipeline_parallel.versions import VersionedWeights, Weights
from optuna_fleet.trainer.pipeline_parallel.whole import Holding, WholeModel, WholeOptimizer
from optuna_fleet.wsp.schedules import Alone, Flush, Tag, WaveSynchronous
from optuna_fleet.wsp.turns import Pass, Turn

Metric = Callable[[Any, Any], Any]


class Pipeline:
    """A model in as many stages as the trial has devices; `FleetTrial.pipeline` makes one.

    All ranks call its methods alike. The first batch decides which layers are where: their times
    and memory are measured with it.
    """

    def __init__(
        self,
        model: nn.Sequential,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        *,
        in_flight: int,
        flush: bool,
        max_grad_norm: float | None,
        memory_bytes: float | None,
        surroundings: Surroundings,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._in_flight = in_flight
        self._is_flushed = flush
        self._max_grad_norm = max_grad_norm
        self._memory_bytes = memory_bytes
        self._around = surroundings
        self._names = list(parameters_of(model))
        self._holding = Holding(model, optimizer)
        self._holding.settle = self.flush
        self._rule = self._rule_of(model)
        self._placed: Placed | None = None
        self._stage: PipelineStage | None = None
        self._num_before = 0  # minibatches, before this stage was made
        self._num_begun = 0  # since then
        self._losses: deque[Tensor] = deque()
        self._progress = _Progress(self)
        self.objects = (WholeModel(self._holding), WholeOptimizer(self._holding), self._progress)

    @property
    def num_stages(self) -> int:
        """Stages, which is the number of devices that the trial has at present."""
        return group_size()

    @property
    def cuts(self) -> tuple[int, ...]:
        """Layers that stages begin with, but for the first; empty before the first batch."""
        return () if self._placed is None else self._placed.placement.cuts

    def check_beside(self, objects: Iterable[Any]) -> None:
        """Refuse what can't be prepared beside it.

        Raises:
            FleetConfigError: It trains as well, or is this pipeline's own.
        """
        for thing in objects:
            if isinstance(thing, nn.Module) or thing is self._optimizer:
                raise FleetConfigError(
                    f"trial.prepare() was given a `{type(thing).__name__}` after "
                    "trial.pipeline(), which has prepared its model and optimizer; only "
                    "schedulers and the like can be prepared beside it."
                )

    # -- training ---------------------------------------------------------------------------------

    def step(self, inputs: Any, targets: Any) -> Tensor | None:
        """Train on a batch; every rank gives the whole one.

        Args:
            inputs: Of the first layer: a tensor, or dicts, lists and tuples of tensors, whose
                first dimension counts samples.
            targets: What the loss function gets with the model's output; likewise.

        Returns:
            The batch's loss, on every rank. Without flushes that of the batch which is `in_flight`
            steps back, and None while there is none.

        Raises:
            FleetConfigError: The devices have too little memory.
        """
        self._around.check()
        placed = self._place(inputs, targets)
        with placed.naming_errors():
            if self._is_flushed:
                return self._step_and_flush(placed, inputs, targets)
            assert self._rule is not None
            self._rule.foresee()
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers
            self._give(placed, inputs, targets)
            self._run(placed, lambda stage: stage.started >= self._num_begun)
            return self._losses.popleft() if self._num_begun > self._in_flight else None

    def flush(self) -> list[Tensor]:
        """Train to their end the batches that are in flight, and return their losses.

        There are none unless ``flush=False``. Evaluation, and an epoch's end, do so too: losses
        that nobody has asked for are forgotten then.
        """
        placed, stage = self._placed, self._stage
        if self._is_flushed or placed is None or stage is None:
            return []
        with placed.naming_errors(), torch.no_grad():
            self._run(placed, lambda stage: stage.completed >= self._num_begun)
            own = parameters_of(placed.part)
            for name, weight in stage.weights.latest().items():
                own[name].copy_(weight)
        losses = list(self._losses)
        self.begin_anew(self.num_minibatches)  # as a trial does that goes on elsewhere
        return losses

    @property
    def num_minibatches(self) -> int:
        """How many have been trained on."""
        return self._num_before + self._num_begun

    def begin_anew(self, num_minibatches: int) -> None:
        """The weights are those after so many minibatches, and none is in flight."""
        self._stage = None
        self._num_before, self._num_begun = num_minibatches, 0
        self._losses.clear()

    def _step_and_flush(self, placed: Placed, inputs: Any, targets: Any) -> Tensor:
        for part in microbatches(inputs, targets, self._in_flight):
            self._give(placed, part.inputs, part.targets, part.weight)
        self._run(placed, lambda stage: stage.completed >= self._num_begun)
        torch.clear_autocast_cache()  # of casts of weights that are old now
        loss = functools.reduce(torch.add, self._losses)
        self._losses.clear()
        return loss.to(self._around.device)

    def _give(self, placed: Placed, inputs: Any, targets: Any, weight: float = 1.0) -> None:
        if self._stage is None:
            self._stage = self._new_stage(placed)
        self._num_begun += 1
        number, device = self._num_begun, self._around.device
        if placed.is_first:
            self._stage.receive(Inputs(number=number, values=to_device(inputs, device)))
        if placed.is_last:
            values = to_device(targets, device)
            self._stage.receive(Targets(number=number, values=values, weight=weight))

    def _run(self, placed: Placed, is_done: Callable[[PipelineStage], bool]) -> None:
        """Do passes as they can be done, until enough are."""
        stage, edges = self._stage, placed.edges
        assert stage is not None
        with torch.enable_grad():
            while not is_done(stage):
                while edges is not None and (message := edges.poll()) is not None:
                    stage.receive(message)
                if (turn := stage.next_turn()) is not None:
                    self._do(placed, stage, turn)
                else:
                    assert edges is not None
                    stage.receive(edges.receive())

    def _do(self, placed: Placed, stage: PipelineStage, turn: Turn) -> None:
        if turn.what is Pass.BACKWARD:
            stage.run(turn)
            return
        with placed.noise.of(self._num_before + turn.number):
            stage.run(turn)

    def _note(self, done: PassDone) -> None:
        if done.loss is not None:
            self._losses.append(done.loss)

    # -- evaluation -------------------------------------------------------------------------------

    def evaluate(self, batches: Iterable[tuple[Any, Any]], metric: Metric | None = None) -> Any:
        """Return the mean of a metric over samples that are not trained on, on every rank.

        Args:
            batches: Inputs and targets of each batch, as `step` takes them; read without
                gradients.
            metric: From the model's output, in eval mode, and the targets to the batch's mean, or
                a dict of means: numbers, or tensors of one element. By default the loss.
        """
        self.flush()
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        sums: dict[str, float] = {}
        try:
            with torch.no_grad():
                for inputs, targets in batches:
                    self._around.check()
                    self._evaluate(inputs, targets, metric or self._loss, sums)
        finally:
            for module, mode in modes:
                module.training = mode
        return _mean_of(self._of_last_stage(sums))

    def _evaluate(self, inputs: Any, targets: Any, metric: Metric, sums: dict[str, float]) -> None:
        placed, device = self._place(inputs, targets), self._around.device
        with placed.naming_errors():
            if placed.is_first:
                values = to_device(inputs, device)
            else:
                assert placed.edges is not None
                received = placed.edges.receive()
                assert isinstance(received, Activations)
                values = received.values
            output = placed.part(values)
            if not placed.is_last:
                assert placed.edges is not None
                sent = Activations(number=0, tag=Tag(0, 0), values=output)
                own, to = placed.stage, placed.stage + 1
                placed.edges.send(StageAddress(0, own), StageAddress(0, to), sent)
                return
            size = num_samples(inputs)
            found = metric(output, to_device(targets, device))
            named = found if isinstance(found, dict) else {"": found}
            for name, value in {**named, _SAMPLES: 1.0}.items():
                sums[name] = sums.get(name, 0.0) + float(value) * size

    def _of_last_stage(self, sums: dict[str, float]) -> dict[str, float]:
        if self._placed is None:
            return sums
        return checkpoint.gather(sums)[self._placed.placement.ranks[-1]]

    # -- what it is made of -----------------------------------------------------------------------

    def _place(self, inputs: Any, targets: Any) -> Placed:
        if self._placed is None:
            batch = inputs, targets
            if self._is_flushed:
                first = next(microbatches(inputs, targets, self._in_flight))
                batch = first.inputs, first.targets
            limit = self._memory_bytes
            demand = Demand(
                blocks=blocks_of(self._model, may_part_ties=self._is_flushed),
                in_flight=self._in_flight,
                memory=memory_of(self._optimizer, is_flushed=self._is_flushed),
                memory_bytes=memory_of_device(self._around.device) if limit is None else limit,
                is_flushed=self._is_flushed,
            )
            self._placed = place(self._holding, self._loss, batch, demand, self._around)
            self._rule = self._rule_of(self._placed.part)
        return self._placed

    def _rule_of(self, part: nn.Module) -> SgdRule | None:
        return None if self._is_flushed else SgdRule(self._optimizer, parameters_of(part).items())

    def _new_stage(self, placed: Placed) -> PipelineStage:
        schedule = (Flush if self._is_flushed else WaveSynchronous)(self._in_flight)
        return PipelineStage(
            address=StageAddress(0, placed.stage),
            num_stages=len(placed.placement.ranks),
            module=StageModule(
                placed.part,
                is_first=placed.is_first,
                loss=self._loss if placed.is_last else None,
            ),
            weights=self._weights(placed),
            schedule=Alone(schedule),
            transport=placed.edges or _NoTransport(),
            observer=self._note,
            most_held=placed.placement.held,
        )

    def _weights(self, placed: Placed) -> Weights:
        parameters = dict(parameters_of(placed.part))
        if self._rule is not None:
            return VersionedWeights(parameters, self._rule, self._in_flight, client=None)
        return FlushedWeights(parameters, self._optimizer, self._in_flight, self._complete)

    def _complete(self, parameters: Any) -> None:
        """Make gradients what those of the whole model would be."""
        assert self._placed is not None
        self._placed.ties.add_up()
        if self._max_grad_norm is not None:
            clip_gradients(parameters, self._names, self._max_grad_norm)

    def close(self, *, alone: bool) -> None:
        """The trial has ended here; `alone` if the other ranks may not have."""
        if self._placed is not None:
            self._placed.noise.close()
            if self._placed.edges is not None:
                self._placed.edges.close(alone=alone)


_SAMPLES = "number of samples"


def _mean_of(sums: dict[str, float]) -> Any:
    size = sums.pop(_SAMPLES, 0.0)
    means = {name: total / size for name, total in sums.items()}
    return means.get("", math.nan) if means.keys() <= {""} else means


class _Progress:
    """How far the training is, among what a trial has prepared."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def state_dict(self) -> dict[str, Any]:
        return {"minibatches": self._pipeline.num_minibatches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pipeline.begin_anew(state["minibatches"])


class _NoTransport:
    """Of a stage that is alone."""

    def send(self, *_: Any) -> None:
        raise AssertionError("a stage that is alone has nobody to send to")
