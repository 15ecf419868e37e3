"""A rank without any weight adds nothing to the gradients, whatever its loss is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optuna_fleet.trainer.gradients.weights import drop_nans

LABELS = torch.tensor([0, 1, 1, 0])


def masked(outputs: Tensor, mask: Tensor) -> Tensor:
    return (F.cross_entropy(outputs, LABELS, reduction="none") * mask).sum() / mask.sum()


LOSSES: list[Callable[[Tensor, Tensor], Tensor]] = [
    masked,
    lambda outputs, mask: 0.5 * masked(outputs, mask) + masked(outputs, mask) ** 2,
    lambda outputs, mask: F.cross_entropy(outputs, LABELS, weight=mask[:2]),
]


def gradients(loss_of: Callable[[Tensor, Tensor], Tensor], mask: Tensor, *, drops: bool) -> Tensor:
    outputs = torch.linspace(0, 1, 8).view(4, 2).requires_grad_()
    loss = loss_of(outputs, mask)
    if drops:
        drop_nans(loss, mask.sum() == 0)
    loss.backward()
    assert outputs.grad is not None
    return outputs.grad


@pytest.mark.parametrize("loss_of", LOSSES)
def test_nothing_is_left_of_a_quotient_of_nothing(
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> None:
    assert gradients(loss_of, torch.zeros(4), drops=False).isnan().any()
    assert not gradients(loss_of, torch.zeros(4), drops=True).any()
    weights = torch.tensor([1.0, 2.0, 0.0, 1.0])
    kept = gradients(loss_of, weights, drops=True)
    assert kept.equal(gradients(loss_of, weights, drops=False))
