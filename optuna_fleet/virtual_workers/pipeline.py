"""What `FleetTrial.pipeline` returns: a model that is trained in stages, one on each device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from optuna_fleet.exceptions import FleetConfigError, TrialError
from optuna_fleet.trainer.gradients import collectives
from optuna_fleet.trainer.groups import group_size
from optuna_fleet.trainer.nested import map_tensors, tensors_in, to_device
from optuna_fleet.trainer.run_parts import Parts
from optuna_fleet.virtual_workers.construction import Construction
from optuna_fleet.virtual_workers.layouts import Demand
from optuna_fleet.virtual_workers.measuring import (
    Need,
    blocks_of,
    copies_of,
    memory_of_device,
    place,
)
from optuna_fleet.virtual_workers.pipeline_options import checked_options
from optuna_fleet.virtual_workers.stage import Loss, PipelineStage
from optuna_fleet.virtual_workers.stage_messages import Activations, ToStage
from optuna_fleet.virtual_workers.versions import SgdRule, VersionedWeights
from optuna_fleet.virtual_workers.whole import HeldModel, WholeModel, WholeOptimizer
from optuna_fleet.virtual_workers.wsp import Pass, Turn

Metric = Callable[[Any, Any], Any]
_SAMPLES = "number of samples"
_EVALUATED = 0  # in place of a minibatch's number


class Pipeline:
    """A model in stages, one on each of the trial's devices; `FleetTrial.pipeline` makes one.

    All ranks call its methods alike. The first batch decides which layers are where: their times
    and memory are measured with it.

    Args:
        model: See `FleetTrial.pipeline`, as for `optimizer` and `loss`.
        given: Its options.
        parts: Of this rank's training.
        need: Has the trial begin anew on so many devices.

    Raises:
        FleetConfigError: The model can't be cut, or the optimizer can't train it so.
    """

    def __init__(
        self,
        model: nn.Sequential,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        given: Mapping[str, Any],
        parts: Parts,
        need: Need,
    ) -> None:
        options = checked_options(model, optimizer, given, parts)
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._options = options
        self._parts = parts
        self._need = need
        self.holding = HeldModel(model, optimizer)
        self.holding.settle = self.flush
        if not options.is_flushed:
            SgdRule(optimizer, ())  # refuses others
        self._own: Construction | None = None
        self._stage: PipelineStage | None = None
        self._num_before = 0  # batches, before this stage was made
        self._num_begun = 0  # of this virtual worker's minibatches, since then
        self._losses: list[Tensor] = []
        self._progress = _Progress(self, model)
        self.objects = (WholeModel(self.holding), WholeOptimizer(self.holding), self._progress)

    @property
    def num_stages(self) -> int:
        """Stages of each virtual worker; of the first, where these differ.

        Before the first batch the number of devices that the trial has.
        """
        return group_size() if self._own is None else len(self._own.placement.ranks[0])

    @property
    def num_virtual_workers(self) -> int:
        """Pipelines that share each batch; 1 before the first."""
        return 1 if self._own is None else self._own.num_workers

    @property
    def in_flight(self) -> int | None:
        """Parts of a batch; without flushes batches in flight, None while that is not decided."""
        return self._options.most_in_flight if self._own is None else self._own.in_flight

    @property
    def cuts(self) -> tuple[int, ...]:
        """Layers that the first virtual worker's stages begin with, but for its first stage.

        Empty before the first batch.
        """
        return () if self._own is None else self._own.placement.cuts[0]

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
            The batch's loss, on every rank. None with a clock distance, as no rank knows all
            virtual workers' part: `flush` returns the losses.

        Raises:
            FleetConfigError: The devices have too little memory.
        """
        self._parts.session.check()
        self._parts.weights.begin("pipeline.step")
        own = self._place(inputs, targets)
        self.holding.heed_groups()
        with own.naming_errors():
            own.begin_batch()
            parts = microbatches(inputs, targets, own.num_parts)
            for part in islice(parts, own.parts.start, own.parts.stop):
                self._give(own, part)
            if self._options.is_flushed:
                self._run(own, lambda stage: stage.completed >= self._num_begun)
                loss = functools.reduce(torch.add, self._losses) if own.loss is None else own.loss
                self._losses.clear()
                return loss.to(self._parts.device)
            self._run(own, lambda stage: stage.started >= self._num_begun)
            return None

    def flush(self) -> list[Tensor]:
        """Train to their end the batches that are in flight, and return their losses.

        Of all batches since the last time; with flushes there are none. Evaluation, and an epoch's
        end, do so too: losses that nobody has asked for are forgotten then.
        """
        own, stage = self._own, self._stage
        if own is None or stage is None:
            return []
        self._parts.session.count()
        with own.naming_errors(), torch.no_grad():
            if own.sums is not None:
                own.sums.meet()
            if not isinstance(weights := stage.weights, VersionedWeights):
                return []
            self._run(own, lambda stage: stage.completed >= self._num_begun)
            if own.num_workers > 1:
                self._settle(own, weights)
            own.agreement.take(weights.latest())
            losses = self._of_all_workers(own)
            self.begin_anew(self.num_batches)  # as a trial does that goes on elsewhere
            self._host(own)
        return losses

    @property
    def num_batches(self) -> int:
        """How many have been trained on."""
        return self._num_before + self._num_begun // (len(self._own.parts) if self._own else 1)

    def begin_anew(self, num_batches: int) -> None:
        """The weights are those after so many batches, and none is in flight."""
        self._stage = None
        self._num_before, self._num_begun = num_batches, 0
        self._losses.clear()

    def _give(self, own: Construction, part: Microbatch) -> None:
        if self._stage is None:
            self._stage = own.stage()
        self._num_begun += 1
        device = self._parts.device
        inputs = to_device(part.inputs, device) if own.is_first else None
        targets = to_device(part.targets, device) if own.is_last else None
        self._stage.give(self._num_begun, inputs, targets, part.weight / own.share)

    def _run(self, own: Construction, is_done: Callable[[PipelineStage], bool]) -> None:
        """Take messages and do passes as they can be done, until enough are."""
        stage, edges = self._stage, own.edges
        assert stage is not None
        with torch.enable_grad():
            while not is_done(stage):
                message = edges.poll()
                if message is None and (turn := stage.next_turn()) is not None:
                    self._do(own, stage, turn)
                    continue
                if message is None:
                    message = edges.receive()
                if is_evaluated(message):
                    raise own.parted(message, "evaluates", "trains")
                stage.receive(message)
        torch.clear_autocast_cache()  # of casts of weights that are old now

    def _do(self, own: Construction, stage: PipelineStage, turn: Turn) -> None:
        if turn.what is Pass.BACKWARD:
            loss = stage.run(turn).loss
            assert loss is not None
            self._losses.append(loss.to(self._parts.device))
            return
        batch, place = divmod(turn.number - 1, len(own.parts))
        part = (self._num_before + batch) * own.num_parts + own.parts[place]
        with own.noise.of(part + 1):
            stage.run(turn)

    # -- several virtual workers ------------------------------------------------------------------

    def _settle(self, own: Construction, weights: VersionedWeights) -> None:
        """Come to the weights that all virtual workers have come to."""
        wave_size, rest = own.in_flight, own.agreement.rest()
        least = own.schedule.least_clock((self._num_begun // wave_size + 1) * wave_size)
        self._run(own, lambda _: weights.settle(least, rest))

    def _of_all_workers(self, own: Construction) -> list[Tensor]:
        """Losses of whole batches. Nobody goes on before all have settled, as all must tell."""
        if own.num_workers == 1:
            return list(self._losses)
        told = [rank["losses"] for rank in collectives.gather({"losses": list(self._losses)})]
        firsts = [ranks[0] for ranks in own.placement.ranks]
        for rank in firsts:
            if len(told[rank]) != len(told[0]):
                raise TrialError(
                    f"Since the last flush rank {rank} has made {len(told[rank])} steps of the "
                    f"pipeline, but rank 0 {len(told[0])}: all ranks must train on the same "
                    "batches."
                )
        of_workers = zip(*(told[rank] for rank in firsts), strict=True)
        return [torch.stack([*of]).mean().to(self._parts.device) for of in of_workers]

    def _host(self, own: Construction) -> None:
        """Have parameter servers begin with the weights of now; all must call it."""
        if own.directory.hosts:
            own.edges.host(own.servers())
            collectives.gather({})  # nobody pushes before all servers are there

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
        evaluation = Evaluation(metric or self._loss, self._parts.device)
        try:
            with torch.no_grad():
                for inputs, targets in batches:
                    self._parts.session.check()
                    self._parts.weights.begin("pipeline.evaluate")
                    own = self._place(inputs, targets)  # measured as it trains
                    self._model.eval()
                    evaluation.add(own, inputs, targets)
        finally:
            for module, mode in modes:
                module.training = mode
        return evaluation.means()

    # -- what it is made of -----------------------------------------------------------------------

    def _place(self, inputs: Any, targets: Any) -> Construction:
        if self._own is None:
            options, batch = self._options, (inputs, targets)
            if options.is_flushed:
                first = next(microbatches(inputs, targets, options.num_parts))
                batch = first.inputs, first.targets
            limit = options.memory_bytes
            demand = Demand(
                blocks=blocks_of(self._model, may_part_ties=options.is_flushed),
                in_flight=options.most_in_flight,
                copies=copies_of(self._optimizer, is_flushed=options.is_flushed),
                memory_bytes=memory_of_device(self._parts.device) if limit is None else limit,
                clock_distance=options.clock_distance,
                most_workers=options.virtual_workers,
                layout=options.layout,
                most_devices=options.max_devices or 1,
            )
            given = self._model, self._loss, batch, demand, self._parts, self._need
            placement, directory = place(*given)
            self._own = Construction(
                self.holding, self._loss, options, placement, directory, self._parts
            )
            self._host(self._own)
        return self._own

    @property
    def is_broken(self) -> bool:
        """Whether something was raised here amid what all ranks do: others wait for this one."""
        return self._own is not None and self._own.edges.is_broken

    def close(self, *, alone: bool) -> None:
        """The trial has ended here; `alone` if the other ranks may not have."""
        if self._own is not None:
            self._own.close(alone=alone)


class _Progress:
    """How far the training is, and what is frozen, among what a trial has prepared."""

    def __init__(self, pipeline: Pipeline, model: nn.Module) -> None:
        self._pipeline = pipeline
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        frozen = [name for name, p in self._parameters() if not p.requires_grad]
        return {"batches": self._pipeline.num_batches, "frozen": frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pipeline.begin_anew(state["batches"])
        for name, parameter in self._parameters():
            if parameter.requires_grad is (name in state["frozen"]):
                parameter.requires_grad_(name not in state["frozen"])

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Also of other stages; those that layers share by each name, as they have parted."""
        return self._model.named_parameters(remove_duplicate=False)


# -- parts of batches, and batches that are not trained on ------------------------------------


def is_evaluated(message: ToStage) -> TypeGuard[Activations]:
    """Whether it comes from a stage that does not train."""
    return isinstance(message, Activations) and message.number == _EVALUATED


class Evaluation:
    """Sums over samples; virtual workers take batches in turn, which are added up in order."""

    def __init__(self, metric: Metric, device: torch.device) -> None:
        self._metric = metric
        self._device = device
        # Of layers that draw when they are evaluated; alike on all ranks, and another each time.
        self._seed = int(torch.randint(2**31, (), device="cpu"))
        self._measured: dict[int, dict[str, float]] = {}  # sums, of batches that ended here
        self._num_batches = 0

    def add(self, own: Construction, inputs: Any, targets: Any) -> None:
        """This stage's part in a batch."""
        number, self._num_batches = self._num_batches, self._num_batches + 1
        if number % own.num_workers != own.address.worker:
            return
        with own.naming_errors(), own.noise.of(self._seed, number):
            if own.is_first:
                values = to_device(inputs, self._device)
            else:
                received = own.edges.receive()
                if not is_evaluated(received):
                    raise own.parted(received, "trains", "evaluates")
                values = received.values
            output = own.part(values)
            if own.is_last:
                self._measured[number] = self._sums(output, targets, num_samples(inputs))
            else:
                own.edges.send(own.next_stage(), Activations(_EVALUATED, 0, 0, output))

    def _sums(self, output: Any, targets: Any, size: int) -> dict[str, float]:
        found = self._metric(output, to_device(targets, self._device))
        named = found if isinstance(found, dict) else {"": found}
        return {name: float(value) * size for name, value in {**named, _SAMPLES: 1.0}.items()}

    def means(self) -> Any:
        """Of all batches, on every rank; all must call it."""
        sums: dict[str, float] = {}
        told = collectives.gather({"measured": self._measured})
        measured = {number: own for rank in told for number, own in rank["measured"].items()}
        for number in sorted(measured):
            for name, total in measured[number].items():
                sums[name] = sums.get(name, 0.0) + total
        size = sums.pop(_SAMPLES, 0.0)
        means = {name: total / size for name, total in sums.items()}
        return means.get("", math.nan) if means.keys() <= {""} else means


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Some samples of a batch, and their share in the mean over it."""

    inputs: Any
    targets: Any
    weight: float


def num_samples(values: Any) -> int:
    """Length of the first tensor's first dimension.

    Raises:
        FleetConfigError: There is none.
    """
    sizes = [size for tensor in tensors_in(values) for size in tensor.shape[:1]]
    if not sizes or not sizes[0]:
        raise FleetConfigError(
            f"The inputs are {values!r:.80}, but must be a batch: tensors, also in dicts, lists "
            "and tuples, whose first dimension counts its samples."
        )
    return sizes[0]


def microbatches(inputs: Any, targets: Any, number: int) -> Iterator[Microbatch]:
    """So many of them, whose sizes differ by 1 at most.

    A batch of fewer samples has stand-ins of weight 0. Tensors of another length go along whole.
    """
    size = num_samples(inputs)
    for part in range(number):
        if size >= number:
            first, end = part * size // number, (part + 1) * size // number
            weight = (end - first) / size
        else:
            first = min(part, size - 1)
            end, weight = first + 1, float(part < size) / size
        yield Microbatch(_cut(inputs, first, end, size), _cut(targets, first, end, size), weight)


def _cut(values: Any, first: int, end: int, size: int) -> Any:
    def some(tensor: Tensor) -> Tensor:
        return tensor[first:end] if tensor.shape[:1] == (size,) else tensor

    return map_tensors(values, some)
