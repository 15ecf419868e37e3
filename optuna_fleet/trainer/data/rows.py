"""Whether a batch has as many rows as this rank's part of it has samples.

A rank's gradients are weighed by its samples. A ``collate_fn`` that leaves some out, those that
are None for want of a readable file, say, makes the loss a mean over fewer.
"""

from __future__ import annotations

from typing import Any

from optuna_fleet.pipeline.spec import PipelineSpec
from optuna_fleet.trainer.nested import lengths_in
from optuna_fleet.trainer.parts import Parts
from optuna_fleet.trainer.widths import stay_alone

_DROPS = (
    "The collate_fn of data set '{name}' leaves samples out: devices would weigh their parts of a "
    "batch by more samples than are in them. So that its results do not depend on the number of "
    "devices, the trial trains on one. Leave such samples out of the data set instead, or of "
    "what a `sampler` gives."
)


class Rows:
    """Looks at what the user's ``collate_fn`` has made."""

    def __init__(self, parts: Parts, spec: PipelineSpec | None) -> None:
        self._parts = parts
        self._spec = spec
        self._is_known = False

    def check(self, name: str, data: Any, size: int) -> None:
        """Check a batch for training.

        Args:
            name: Its data set.
            data: This rank's part of it.
            size: How many samples that has; 0 for a padding sample.

        Raises:
            TrialError: Some were left out, and the trial is on several devices.
        """
        assert self._spec is not None
        if self._is_known or size == 0 or self._spec.dataset(name).collate is None:
            return
        lengths = lengths_in(data)
        if size in lengths or max(lengths, default=size) > size:
            return
        run, self._is_known = self._parts.run, True
        if run.world_size > 1:
            raise self._parts.weights.too_wide(_DROPS.format(name=name))
        if run.num_devices > 1:
            stay_alone(self._parts.session, _DROPS.format(name=name))
