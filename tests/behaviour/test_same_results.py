"""Trials beside each other, or after each other in one process, do not change each other."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import optuna
import pytest
import torch

from tests.behaviour.harness import Leg, train


def losses_of(
    fleet: Any, script: dict[int, Sequence[Leg]], objective: Any = train
) -> dict[int, list[float]]:
    study = optuna.create_study()
    fleet.script = script
    study.optimize(objective, n_trials=len(script), executor=fleet)
    # The numbers that torch draws at the end tell whether its generator was restored too.
    return {t.number: t.user_attrs["losses"] + t.user_attrs["noise"] for t in study.trials}


def test_in_a_flotilla_of_four_gives_the_same_bits(fleet: Any) -> None:
    alone = losses_of(fleet, {0: [Leg((0,))]})[0]
    together = losses_of(fleet, {n: [Leg((n,))] for n in range(4)})
    assert together[0] == alone
    assert together[1] != alone  # another trial, another seed


def compiles(trial: Any) -> float:
    """Compiles a function for a size of its own; whether for any size goes into an attribute."""
    for_any: list[bool] = []

    def noting(graph: Any, inputs: list[Any]) -> Any:
        for_any.append(any(isinstance(value, torch.SymInt) for value in inputs))
        return graph.forward

    torch.compile(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Tanh()), backend=noting)(
        torch.ones(trial.number + 2)
    )
    trial.set_user_attr("for_any", for_any)
    return 0.0


def test_trials_compile_as_if_they_were_the_first_of_their_process(fleet: Any) -> None:
    """Else for any size after another one, and from torch's limit on not at all."""
    fleet.script = {number: [Leg((0,))] for number in range(3)}
    study = optuna.create_study()
    study.optimize(compiles, n_trials=3, executor=fleet)
    assert [trial.user_attrs["for_any"] for trial in study.trials] == [[False]] * 3


_compiled: list[Any] = []  # in this process


def counted(graph: Any, inputs: list[Any]) -> Any:
    _compiled.append(graph)
    return graph.forward


class Halved(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


def compiles_what_it_trains(trial: Any, *, kind: type[Halved] | None) -> float:
    """How much each beginning has compiled goes into an attribute."""

    class Own(Halved):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / 2

    model = (kind or Own)(36, 3).double()
    model, optimizer = trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    compiled, before = torch.compile(model, backend=counted), len(_compiled)
    for _ in trial.epochs(12):
        for images, _ in trial.batches("train", batch_size=41):
            compiled(images.flatten(1)).square().mean().backward()
            optimizer.step()
        numbers = trial.user_attrs.get("compiled", [])
        trial.set_user_attr("compiled", [*numbers, len(_compiled) - before])
    return 0.0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Halved, [1] + [0] * 11),
        pytest.param(None, [1] * 12, id="a class of each beginning"),
    ],
)
def test_a_trial_that_moves_compiles_what_it_has_not_compiled_there(
    fleet: Any, kind: Any, expected: list[int]
) -> None:
    """Nor does it come to torch's limit, beyond which nothing is compiled."""
    fleet.script = {0: [Leg((0,), until_epoch=i + 1) for i in range(11)] + [Leg((0,))]}
    study = optuna.create_study()
    objective = functools.partial(compiles_what_it_trains, kind=kind)
    study.optimize(objective, n_trials=1, executor=fleet)
    assert study.trials[0].user_attrs["compiled"] == expected
