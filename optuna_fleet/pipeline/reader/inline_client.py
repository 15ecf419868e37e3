"""The pipeline without processes: samples are preprocessed where they are used, for debugging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from optuna_fleet.pipeline.chunks.chunk_view import ChunkView, cut_batch
from optuna_fleet.pipeline.chunks.layout import chunk_in_memory
from optuna_fleet.pipeline.preprocessor.sampling import SampleError, Samples
from optuna_fleet.pipeline.preprocessor.source import Source
from optuna_fleet.pipeline.reader.batches import Batch
from optuna_fleet.pipeline.reader.read_plan import Batches, ReadPlan, planned
from optuna_fleet.pipeline.spec import ChunkKey, PipelineSpec


class InlineClient:
    """Stands in for `PipelineClient`: the same batches, made in the calling process.

    Breakpoints in a data set's code are hit, and its exceptions arrive as they were raised.
    """

    waited_s = 0.0

    def __init__(self, spec: PipelineSpec, source: Source, collates: Mapping[str, Any]) -> None:
        self.spec = spec
        self._collates = collates
        self._samples = Samples(lambda: source, spec)

    def finisher(self, name: str) -> None:
        """Samples are finished."""

    def read(self, name: str, **arguments: Any) -> Batches[Batch]:
        """Returns one epoch; the arguments are those of `ReadPlan`."""
        return Batches(planned(self.spec, name, **arguments), self._made)

    def _made(self, plan: ReadPlan) -> Iterator[Batch]:
        for step in range(plan.first_step, plan.num_steps):
            yield self._batch(plan, step)

    def _batch(self, plan: ReadPlan, step: int) -> Batch:
        start, stop = plan.positions(step)
        with self._samples.lent():
            made = [self._sample(plan, position) for position in range(start, stop)]
        collate = self._collates.get(plan.name)
        # By way of a chunk, so that batches look exactly as they do from processes.
        view = ChunkView(chunk_in_memory(made, collated_by_user=collate is not None))
        return Batch(
            data=cut_batch([(view, 0, len(made))], collate),
            local_size=plan.local_size(step),
            global_size=plan.size(step),
        )

    def _sample(self, plan: ReadPlan, position: int) -> Any:
        try:
            return self._samples.sample(ChunkKey(plan.name, plan.epoch, 0), position)
        except SampleError as failure:
            raise failure.__cause__ or failure from None
