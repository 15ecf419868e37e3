"""Messages between processes, here with both ends in one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from optuna_fleet.virtual_workers.directory import Directory
from optuna_fleet.virtual_workers.edges import Edges
from optuna_fleet.virtual_workers.parameter_server import ParameterServer
from optuna_fleet.virtual_workers.stage_messages import (
    Activations,
    Gradients,
    Pull,
    Push,
    ServerAddress,
    Snapshot,
    StageAddress,
)
from optuna_fleet.virtual_workers.wsp import Tag


def connected(directory: Directory, room: int = 10) -> list[Edges]:
    """Of each rank."""
    store = dist.HashStore()
    size = len(directory.stages)

    def meet(rank: int) -> Edges:
        group = dist.ProcessGroupGloo(store, rank, size, timedelta(days=1))
        return Edges(group, directory, torch.device("cpu"), room)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(meet, range(size)))


@pytest.fixture
def two_stages() -> Iterator[list[Edges]]:
    on = Directory.of(((0, 1),), ((1,),), [1.0] * 2, [0, 0], has_servers=False)
    edges = connected(on)
    yield edges
    close(edges)


def close(edges: list[Edges]) -> None:
    threads = [threading.Thread(target=one.close, kwargs={"alone": False}) for one in edges]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


FIRST, SECOND = StageAddress(0, 0), StageAddress(0, 1)


def activations(number: int, size: int = 3) -> Activations:
    complex_ones = torch.tensor([1 + 2j, 3 - 4j]).conj()  # a view, whose memory is not conjugated
    values = {
        "x": torch.full((size,), float(number)),
        "others": [torch.tensor([True]), complex_ones],
    }
    return Activations(number=number, tag=Tag(number, 7), values=values)


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_what_stages_say_arrives_as_it_was_said(two_stages: list[Edges], default: str) -> None:
    """Through the host, whatever torch's default device is: gloo sends nothing from a GPU."""
    first, second = two_stages
    said = [activations(*one) for one in ((1, 3), (2, 3), (3, 5))]  # the third is described anew
    with torch.device(default):
        for one in said:
            first.send(FIRST, SECOND, one)
    for one in said:
        found = second.receive()
        assert isinstance(found, Activations)
        assert (found.number, found.tag) == (one.number, one.tag)
        assert torch.equal(found.values["x"], one.values["x"])
        mask, complex_ones = found.values["others"]
        assert mask.dtype == torch.bool
        assert torch.equal(complex_ones, one.values["others"][1])
    second.send(
        SECOND, FIRST, Gradients(number=1, values=(torch.ones(2), None), loss=torch.tensor(0.5))
    )
    back = first.receive()
    assert isinstance(back, Gradients)
    assert back.loss == 0.5
    assert back.values[1] is None

    def gathered(edges: Edges) -> object:
        own = {"x": torch.ones(2, device="cpu")}
        with torch.device(default):
            return edges.gather(lambda: own)

    with ThreadPoolExecutor(2) as pool:
        (other,), nothing = pool.map(gathered, two_stages)  # type: ignore[misc]
    assert other["x"].tolist() == [1.0, 1.0]
    assert nothing == []


def test_who_leaves_may_have_said_all_there_is_to_say(two_stages: list[Edges]) -> None:
    """A stage that has ended its last pass goes while its neighbour still reads."""
    first, second = two_stages
    for number in (1, 2):
        first.send(FIRST, SECOND, activations(number))
    ends = threading.Thread(target=first.close, kwargs={"alone": True})
    ends.start()
    ends.join()
    for thread in [t for threads in second._threads.values() for t in threads]:
        thread.join()  # now its farewell is there
    assert [second.receive().number for _ in range(2)] == [1, 2]  # type: ignore[union-attr]
    assert second.poll() is None
    told = "stage 0 has left the pipeline, while stage 1 waited for it"
    with pytest.raises(RuntimeError, match=told):
        second.receive()


def test_who_fails_at_the_very_end_does_not_keep_those_who_wait_for_all() -> None:
    on = Directory.of(((0, 1, 2),), ((1, 2),), [1.0] * 3, [0, 0, 0], has_servers=False)
    edges = connected(on)
    edges[2].close(alone=True)
    close(edges[:2])  # the second has heard of it, the first has not


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


def test_servers_answer_while_the_stage_beside_them_does_something_else() -> None:
    on = Directory.of(((0,), (1,)), ((), ()), [1.0] * 2, [0, 0], has_servers=True)
    assert on.hosts == (0,)
    edges = connected(on)
    server = ParameterServer(
        address=ServerAddress(0),
        weights={"w": torch.tensor(1.0)},
        num_workers=2,
        clock_distance=0,
        transport=edges[0],
    )
    edges[0].host({0: server})
    for worker, update in ((0, 10.0), (1, 100.0)):
        stage = StageAddress(worker, 0)
        push = Push(worker=worker, wave=0, updates={"w": torch.tensor(update)})
        edges[worker].send(stage, ServerAddress(0), push)
        pull = Pull(asker=stage, clock=1, exactly=True)
        edges[worker].send(stage, ServerAddress(0), pull)
    for one in edges[1], edges[0]:  # nobody has looked at what rank 0 got
        found = one.receive()
        assert isinstance(found, Snapshot)
        assert (found.clock, found.weights["w"].item()) == (1, 111.0)
    close(edges)


def test_who_is_done_early_leaves_others_to_what_servers_say() -> None:
    on = Directory.of(((0,), (1,)), ((), ()), [1.0] * 2, [0, 0], has_servers=True)
    edges = connected(on)
    ends = threading.Thread(target=edges[1].close, kwargs={"alone": False})
    ends.start()
    for thread in [t for threads in edges[0]._threads.values() for t in threads]:
        thread.join()  # its farewell is there
    assert edges[0].poll() is None
    assert not edges[0]._gone
    edges[0].close(alone=False)
    ends.join()


def test_a_servers_error_is_told_by_the_stage_beside_it() -> None:
    on = Directory.of(((0,), (1,)), ((), ()), [1.0] * 2, [0, 0], has_servers=True)
    edges = connected(on)
    edges[0].host(
        {
            0: ParameterServer(
                address=ServerAddress(0),
                weights={},
                num_workers=2,
                clock_distance=0,
                transport=edges[0],
            )
        }
    )
    for wave in (0, 0):
        edges[1].send(StageAddress(1, 0), ServerAddress(0), Push(worker=1, wave=wave, updates={}))
    with pytest.raises(AssertionError, match="pushed wave 0, but 1 is next"):
        edges[0].receive()
    close(edges)
