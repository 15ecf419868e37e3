"""Messages between processes, here with both ends in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from optuna_fleet.virtual_workers.edges import Edges
from optuna_fleet.virtual_workers.parameter_server import Directory
from optuna_fleet.virtual_workers.stage_messages import (
    Activations,
    Gradients,
    StageAddress,
)


@pytest.fixture
def two_stages() -> Iterator[list[Edges]]:
    on = Directory.of(((0, 1),), ((1,),), {"0": 1.0, "1": 1.0}, [0, 0])
    store = dist.HashStore()

    def meet(rank: int) -> Edges:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(days=1))
        return Edges(group, on, torch.device("cpu"), room=10)

    with ThreadPoolExecutor(2) as pool:
        edges = list(pool.map(meet, range(2)))
        yield edges
        list(pool.map(lambda one: one.close(alone=False), edges))


FIRST, SECOND = StageAddress(0, 0), StageAddress(0, 1)


def activations(number: int, size: int = 3) -> Activations:
    complex_ones = torch.tensor([1 + 2j, 3 - 4j]).conj()  # a view, whose memory is not conjugated
    values = {
        "x": torch.full((size,), float(number)),
        "others": [torch.tensor([True]), complex_ones],
    }
    return Activations(number, number, 7, values)


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_what_stages_say_arrives_as_it_was_said(two_stages: list[Edges], default: str) -> None:
    """Through the host, whatever torch's default device is: gloo sends nothing from a GPU."""
    first, second = two_stages
    said = [activations(*one) for one in ((1, 3), (2, 3), (3, 5))]  # the third is described anew
    with torch.device(default):
        for one in said:
            first.send(SECOND, one)
    for one in said:
        found = second.receive()
        assert isinstance(found, Activations)
        assert (found.number, found.tag) == (one.number, one.tag)
        assert torch.equal(found.values["x"], one.values["x"])
        mask, complex_ones = found.values["others"]
        assert mask.dtype == torch.bool
        assert torch.equal(complex_ones, one.values["others"][1])
    second.send(FIRST, Gradients(1, (torch.tensor(0.5), (torch.ones(2), None))))
    back = first.receive()
    assert isinstance(back, Gradients)
    loss, gradients = back.loss_and_gradients
    assert loss == 0.5
    assert gradients[1] is None

    def gathered(edges: Edges) -> object:
        own = {"x": torch.ones(2, device="cpu")}
        with torch.device(default):
            return edges.gather(lambda: own)

    with ThreadPoolExecutor(2) as pool:
        (other,), nothing = pool.map(gathered, two_stages)  # type: ignore[misc]
    assert other["x"].tolist() == [1.0, 1.0]
    assert nothing == []


class Odd:
    """What nobody would load who does not know where it comes from."""


def fails() -> dict[str, Any]:
    raise ValueError("there is none")


@pytest.mark.parametrize(
    ("give", "told"),
    [
        (lambda: {"step": Odd()}, r"is .*Odd object.*but must be tensors, numbers and"),
        (fails, "there is none"),
    ],
)
def test_who_can_not_give_what_it_holds_is_not_waited_for(
    two_stages: list[Edges], give: Callable[[], dict[str, Any]], told: str
) -> None:
    first, second = two_stages
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(first.gather, dict)
        with pytest.raises(ValueError, match=told):
            second.gather(give)
        with pytest.raises(RuntimeError, match="rank 1 could not send what it holds"):
            gathered.result()
