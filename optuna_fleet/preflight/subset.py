"""What rehearsals read: a few batches of a few samples, made in their own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from optuna_fleet.pipeline.preprocessor import payload
from optuna_fleet.pipeline.reader.client import Batch, InlineClient
from optuna_fleet.pipeline.reader.read_plan import Batches, ReadPlan, planned
from optuna_fleet.pipeline.spec import PipelineSpec
from optuna_fleet.preflight.conditions import QuietNoise, in_double
from optuna_fleet.preflight.notes import Order
from optuna_fleet.wire.packing import unpack


class Data(InlineClient):
    """A few batches of each pass, always of the same samples, the last batch of an odd size.

    Args:
        spec: Of the data sets.
        order: Says how much of them.
        noise: Is off while samples are made.

    Attributes:
        begin_pass: Called as each pass begins.
    """

    def __init__(self, spec: PipelineSpec, order: Order, noise: QuietNoise) -> None:
        assert order.payload is not None
        source = order.payload.load()
        source = replace(source, generators=payload.generators_in(source))
        collates = {each.name: unpack(each.collate) for each in spec.datasets if each.collate}
        super().__init__(spec, source, collates)
        self.begin_pass: Callable[[ReadPlan], object] = lambda plan: None
        self._order = order
        self._noise = noise
        self._made_samples: dict[tuple[str, int], Any] = {}

    def read(self, name: str, **arguments: Any) -> Batches[Batch]:
        """See `InlineClient`."""
        plan = planned(self.spec, name, **arguments)
        full = self._order.num_batches if self.spec.dataset(name).shuffled else 1
        return Batches(replace(plan, num_samples=_subset(plan, full)), self._made_of)

    def _made_of(self, plan: ReadPlan) -> Iterator[Batch]:
        self.begin_pass(plan)
        for batch in super()._made(plan):
            yield replace(batch, data=in_double(batch.data)) if self._order.is_double else batch

    def _batch(self, plan: ReadPlan, step: int) -> Batch:
        was, self._noise.is_on = self._noise.is_on, False
        try:
            return super()._batch(plan, step)
        finally:
            self._noise.is_on = was

    def _sample(self, plan: ReadPlan, position: int) -> Any:
        # In each mini-epoch in another place, or a rank would always have the same.
        position = (position + plan.epoch * (plan.num_samples // 3 | 1)) % plan.num_samples
        if (plan.name, position) not in self._made_samples:
            sample = super()._sample(replace(plan, epoch=0), position)
            self._made_samples[plan.name, position] = sample
        return self._made_samples[plan.name, position]


def _subset(plan: ReadPlan, num_full: int) -> int:
    """How many samples make so many batches, and one more of an odd size."""
    size = min(plan.batch_size, plan.num_samples)
    if plan.drop_last:
        return min(plan.num_samples // size, num_full) * size
    num = min(plan.num_samples, num_full * size + (size // 2 | 1))
    last = num % size or size
    return num if last % 2 or num == 1 else num - 1
