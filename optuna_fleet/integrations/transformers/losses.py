"""What the loss of a rank's samples counts among those of all ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


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
