"""What a trial reads of the shared data sets: epochs, or the periods that it cuts them into."""

from __future__ import annotations

from functools import partial
from typing import Any

from optuna_fleet.pipeline.reader.client import PipelineClient
from optuna_fleet.pipeline.reader.inline import InlineClient
from optuna_fleet.trainer.data.periods import EpochPosition, Start
from optuna_fleet.trainer.groups import of_first_rank


class Reading:
    """Finds the batches of a pass.

    Args:
        pipeline: Where samples come from.
        position: Of the objective in its loops.
    """

    def __init__(self, pipeline: PipelineClient | InlineClient, position: EpochPosition) -> None:
        self._pipeline = pipeline
        self._position = position
        self.begin_run()

    def begin_run(self) -> None:
        """Other ranks read from now on, which do not know of what was read."""
        self._rounds: dict[str, tuple[int, Start]] = {}  # under way, and of which loop

    def start(self, name: str, batch_size: int, drop_last: bool, rank: int) -> Start | None:
        """Where a pass begins over a data set that rolls, the same on all ranks.

        A round begins where other trials are, and has each sample once, over as many periods as
        that takes. If each period began where others are, these would pass each other by, and
        samples would never be read.
        """
        if not self._pipeline.rolls(name):
            return None
        assert isinstance(self._pipeline, PipelineClient)
        position, periods = self._position, self._position.periods
        step = 0 if periods is None else position.epoch * periods.every
        loop, start = self._rounds.get(name, (None, None))
        if periods is not None and start is not None and loop == position.loop:
            each = self._pipeline.read(name, epoch=0, batch_size=batch_size, drop_last=drop_last)
            if step - start.step < len(each):
                return start
        head = self._pipeline.head(name) if rank == 0 else (0, 0)
        epoch, origin = of_first_rank(head)
        start = Start(epoch, origin, step)
        self._rounds[name] = position.loop, start
        return start

    def batches(
        self,
        name: str,
        batch_size: int,
        drop_last: bool,
        place: tuple[int, int],
        start: Start | None = None,
        first_step: int = 0,
    ) -> Any:
        """The batches of a pass.

        Args:
            name: The data set.
            batch_size: Of all ranks together.
            drop_last: Leave out an epoch's last batch if it is smaller than the others.
            place: This rank among those that share a batch, and their number.
            start: What `start` has found.
            first_step: Batches to skip.
        """
        rank, world_size = place
        read = partial(
            self._pipeline.read,
            name,
            origin=start.origin if start else 0,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            dummy=True,
        )
        position, periods = self._position, self._position.periods
        if periods is not None and self._pipeline.spec.dataset(name).shuffled:
            return periods.batches(read, position.epoch, first_step, start or Start())
        epoch = start.epoch if start else position.epoch
        goes_on = position.epoch + 1 < position.num_epochs
        return read(epoch=epoch, first_step=first_step, continues=goes_on)
