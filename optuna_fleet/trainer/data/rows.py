"""Whether a batch has a row for each sample of this rank's part of it.

A rank's gradients are weighed by its samples. A ``collate_fn`` that leaves some out, those that
are None for want of a readable file, say, makes the loss a mean over fewer.
"""

from __future__ import annotations

from typing import Any

from optuna_fleet.pipeline.spec import PipelineSpec
from optuna_fleet.trainer.nested import lengths_in
from optuna_fleet.trainer.parts import Parts

_OTHER_ROWS = (
    "The collate_fn of data set '{name}' makes other rows than one for each sample: devices would "
    "weigh their parts of a batch by samples that are not in them. So that its results do not "
    "depend on the number of devices, the trial trains on one. Leave samples out of the data set "
    "instead, or of what a `sampler` gives."
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
            TrialError: It has other rows, and the trial is on several devices.
        """
        assert self._spec is not None
        if self._is_known or size == 0 or self._spec.dataset(name).collate is None:
            return
        if size in (lengths_in(data) or {size}):
            return
        run, self._is_known = self._parts.run, True
        if run.world_size > 1:
            raise self._parts.weights.too_wide(_OTHER_ROWS.format(name=name))
        if run.num_devices > 1:
            self._parts.widths.stay_alone(_OTHER_ROWS.format(name=name))
