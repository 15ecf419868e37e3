"""What threads of an allocation and the driver do at one time. Without Slurm."""

from __future__ import annotations

import queue
import select
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.slurm import allocation as module
from optuna_fleet.executor.cluster.slurm.allocation import Allocation

PATIENCE_S = 20.0
LATER_S = 0.2  # for what should be kept waiting: a slow machine lets a fault pass, no more
ENDED = "srun: error: {}: task 0: Exited with exit code 1\n"


class Srun:
    """In the place of a `Step`: says what the test tells it to, then ends."""

    started: queue.SimpleQueue[Srun]
    when_asked: Any = None  # done when somebody looks at how long it has lasted

    def __init__(self, agent: Any, nodes: Sequence[str], gpus: Mapping[str, int], _: Any) -> None:
        self.nodes, self.said = list(nodes), ""
        self.to_say: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.started.put(self)

    @property
    def has_lasted(self) -> bool:
        if Srun.when_asked is not None:
            Srun.when_asked()
        return False

    def lines(self) -> Iterator[str]:
        return iter(self.to_say.get, "")

    def say(self, line: str) -> None:
        pass

    def wait(self, *_: Any) -> int:
        return 1

    def end(self, patience_s: float) -> None:
        self.to_say.put("")


@pytest.fixture(autouse=True)
def sruns(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[Srun]:
    def can_not_be_asked(job: str) -> None:
        raise LaunchError

    for name, fake in {"Step": Srun, "ask_job": can_not_be_asked, "_RESTART_AFTER_S": 0.0}.items():
        monkeypatch.setattr(module, name, fake)
    Srun.started, Srun.when_asked = queue.SimpleQueue(), None
    return Srun.started


def allocation_of(*nodes: str) -> Allocation:
    return Allocation("1", ["agent"], {}, nodes)


def news_of(allocation: Allocation) -> list[Any]:
    told: list[Any] = []
    while not told and select.select([allocation.news], [], [], PATIENCE_S)[0]:
        told = allocation.news.fetch()
    assert told, "nothing was told"
    return told


def test_no_agent_is_started_where_a_node_is_left_out_as_its_agent_ends(
    sruns: queue.SimpleQueue[Srun],
) -> None:
    allocation = allocation_of("a", "b")
    step = sruns.get()
    leaving_out = threading.Thread(target=allocation.leave_out, args=["b"])

    def leave_out() -> None:
        leaving_out.start()
        leaving_out.join(LATER_S)

    Srun.when_asked = leave_out
    step.to_say.put(ENDED.format("b"))
    assert [departure.node for departure in news_of(allocation)] == ["b"]
    leaving_out.join()
    assert allocation.nodes == ("a",)
    allocation.close()
    assert sruns.empty() or sruns.get().nodes == ["b"]  # begun before


def test_nodes_that_are_left_out_before_their_srun_begins_are_not_in_it(
    sruns: queue.SimpleQueue[Srun], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, left_out = threading.Event(), threading.Event()

    def all_at_once(nodes: Sequence[str], gpus: Any) -> list[Sequence[str]]:
        chosen.set()
        left_out.wait()
        return [nodes]

    monkeypatch.setattr(module, "in_steps", all_at_once)
    allocation = allocation_of("a", "b")
    chosen.wait()
    allocation.leave_out("b")
    left_out.set()
    assert sruns.get().nodes == ["a"]
    assert allocation.nodes == ("a",)
    allocation.close()


def test_an_agent_that_ends_is_started_again_alone(sruns: queue.SimpleQueue[Srun]) -> None:
    allocation = allocation_of("a", "b")
    sruns.get().to_say.put(ENDED.format("b"))
    (departure,) = news_of(allocation)
    assert (departure.node, departure.is_replaced) == ("b", True)
    assert sruns.get().nodes == ["b"]
    assert allocation.nodes == ("a", "b")
    allocation.close()


def test_none_is_started_again_once_slurm_ends_the_job(sruns: queue.SimpleQueue[Srun]) -> None:
    allocation = allocation_of("a")
    step = sruns.get()
    allocation.end("so", by=0.0)
    assert [departure.cause for departure in news_of(allocation)] == ["so"]
    step.to_say.put(ENDED.format("a"))
    (departure,) = news_of(allocation)
    assert (departure.cause, departure.is_replaced) == ("Slurm ends its job: so", False)
    step.to_say.put("")
    with pytest.raises(LaunchError, match="Slurm has ended the agents of job 1: so"):
        news_of(allocation)
    assert sruns.empty()
    allocation.close()
