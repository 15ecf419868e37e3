"""What an objective got from `trial.state` before its loop is the state's own in the loop too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

# Each returns, for a trial and its prepared model, what the trial does in each epoch with what it
# keeps, whose result is reported.


def a_table(trial: Any, model: nn.Linear) -> Callable[[int], torch.Tensor]:
    table = trial.state.setdefault("table", torch.zeros(3))
    return lambda epoch: table.mul_(0.5).add_(epoch + 1)


def a_table_made_anew(trial: Any, model: nn.Linear) -> Callable[[int], torch.Tensor]:
    """It is assigned each time that the objective begins."""
    table = trial.state["table"] = torch.zeros(3)
    return lambda epoch: table.mul_(0.5).add_(epoch + 1)


def a_ring_in_a_list(trial: Any, model: nn.Linear) -> Callable[[int], torch.Tensor]:
    ring = trial.state.setdefault("ring", [torch.zeros(2), torch.zeros(2, 3), torch.zeros(())])
    first, _, number = ring[:3]

    def turn(epoch: int) -> torch.Tensor:
        first.add_(number.add_(1))
        ring.append(torch.full((1,), float(epoch)))  # it has grown when it is restored
        return torch.stack([first.sum(), ring[0].sum(), ring[-1].sum()])

    return turn


def a_view(trial: Any, model: nn.Linear) -> Callable[[int], torch.Tensor]:
    """A part of what the state has, which other dtypes and shapes come before."""
    trial.state.setdefault("few", torch.ones(2, dtype=torch.int8))
    row = trial.state.setdefault("rows", torch.zeros(2, 3, dtype=torch.float64))[1]
    return lambda epoch: row.add_(epoch + 1)


def the_weights_at_first(trial: Any, model: nn.Linear) -> Callable[[int], torch.Tensor]:
    """The state has the model's own memory until the loop gives it a copy."""
    trial.state["old"] = model.weight.detach()

    def compare(epoch: int) -> torch.Tensor:
        distance = model.weight.detach() - trial.state["old"]
        trial.state["old"] = model.weight.detach().clone()
        return torch.cat([distance, model.weight.detach()])

    return compare


KEEPS = [
    a_table,
    a_table_made_anew,
    a_ring_in_a_list,
    a_view,
    the_weights_at_first,
]


def trains(trial: Any, *, keeps: Any) -> float:
    model = nn.Linear(2, 2)
    trial.prepare(model)
    step = keeps(trial, model)
    for epoch in trial.epochs(5):
        with torch.no_grad():
            model.weight.add_(epoch + 0.5)
        numbers = step(epoch).flatten().double()
        trial.report(float((numbers * torch.arange(1.0, len(numbers) + 1)).sum()), epoch)
        trial.set_user_attr(f"seen in {epoch}", numbers.tolist())
    return float(numbers.sum())


@pytest.mark.parametrize("keeps", KEEPS, ids=lambda keeps: keeps.__name__)
def test_a_moved_trial_has_the_values_of_one_that_stayed(lab: Any, keeps: Any) -> None:
    widths = [(0,), (1,), (1,), (0,), (1,)]
    lab.same(functools.partial(trains, keeps=keeps), widths, rel=0.0, absolute=0.0)
