"""How the number of preprocessors follows what happens."""

from __future__ import annotations

import os
import time
from itertools import count
from typing import Any

from pipeline_datasets import Counted
from pipeline_harness import Agent, serving

from optuna_fleet import SharedPipeline
from tests.waiting import until


class Slow(Counted):
    """Sample i is (niceness of who made it, i), and takes a while."""

    def __getitem__(self, index: int) -> tuple[int, int]:  # type: ignore[override]
        time.sleep(0.01)
        return os.nice(0), index


def agent_of(dataset: Any, *, at_most: int = 4, idle_s: float = 1e6, **options: Any) -> Any:
    pipeline = SharedPipeline(train=dataset, **options)
    how = {"is_adaptive": True, "chunk_bytes": 700, "niceness": 7, "idle_s": idle_s}
    return serving(pipeline, num_preprocessors=at_most, **how)


def starve(agent: Agent, number: int) -> list[int]:
    """Read, always waiting for data, until there are so many; return how many there were."""
    client, seen = agent.client(), list[int]()
    for epoch in count():
        for batch in client.read("train", epoch=epoch, batch_size=7):
            assert batch.data[0].tolist() == [os.nice(0) + 7] * batch.local_size
            seen.append(len(agent.pids()))
        if seen[-1] >= number:
            return seen
    raise AssertionError


def test_preprocessors_grow_in_number_while_readers_wait() -> None:
    with agent_of(Slow(150)) as agent:
        numbers = starve(agent, 4)
        use = agent.stats().use
    assert numbers == sorted(numbers)
    assert numbers[0] < 4
    assert max(numbers) == 4
    assert use.stalled_share > 0
    assert 0 < use.busy_share <= 1
    assert 1.0 < use.num_preprocessors < 4.0


def test_a_number_that_the_user_gave_is_kept() -> None:
    with agent_of(Slow(150), at_most=8, num_preprocessors=3, idle_s=0.0) as agent:
        assert max(starve(agent, 3)) == 3
        assert len(agent.pids()) == 3


def test_idle_preprocessors_are_ended_and_come_back_with_the_work() -> None:
    with agent_of(Slow(20), idle_s=0.0) as agent:
        for epoch in range(2):
            read = agent.client().read("train", epoch=epoch, batch_size=7)
            assert sum(batch.local_size for batch in read) == 20
            until(lambda: agent.pids() == ())  # each question wakes the agent up
        assert agent.stats().num_lost == 0
