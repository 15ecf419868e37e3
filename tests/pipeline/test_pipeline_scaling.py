"""The number of preprocessors, decided in simulated worlds: no process, no clock."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.pipeline.server.scaling import (
    CHUNKS_PER_WINDOW,
    CLOSE,
    GAIN,
    IDLE_WINDOW_S,
    LIGHT,
    MIN_WINDOW_S,
    PATIENCE_S,
    SATURATED,
    Scaling,
    Window,
)


@dataclass(kw_only=True)
class World:
    """A stationary load: what n preprocessors can make, and what readers would take."""

    demand: float
    peak: Callable[[int], float]
    num_readers: float = 2.0
    chunk_work: float = 0.1

    def window(self, number: int, noise: float = 1.0) -> Window:
        peak = self.peak(max(1, number)) * noise
        rate = min(self.demand, peak)
        elapsed_s = IDLE_WINDOW_S
        if rate:
            full_s = CHUNKS_PER_WINDOW * max(1, number) * self.chunk_work / rate
            longest_s = IDLE_WINDOW_S if rate / peak < LIGHT else full_s
            elapsed_s = max(MIN_WINDOW_S, min(longest_s, full_s))
        starved = max(0.0, 1.0 - rate / self.demand) if self.demand else 0.0
        return Window(
            elapsed_s=elapsed_s,
            num_chunks=math.floor(rate * elapsed_s / self.chunk_work + 1e-6),
            work_s=rate * elapsed_s,
            busy_s=max(1, number) * elapsed_s * (rate / peak),
            starved_s=elapsed_s * min(1.0, 5 * starved),
            num_readers=self.num_readers,
        )


def run(scaling: Scaling, world: World, num_windows: int = 400) -> list[int]:
    """The number after each window; the agent starts a preprocessor when there is work."""
    numbers = []
    for _ in range(num_windows):
        if world.demand:
            scaling.work_came()
        window = world.window(scaling.number)
        assert scaling.is_complete(window)
        numbers.append(scaling.judge(window).number)
        if not numbers[-1]:
            break
    return numbers


def mode(numbers: list[int]) -> int:
    return max(set(numbers), key=numbers.count)


def changes(numbers: list[int]) -> int:
    return sum(a != b for a, b in itertools.pairwise(numbers))


def up_to(most: float) -> Callable[[int], float]:
    """Throughput that grows in proportion up to so many preprocessors, then not at all."""
    return lambda number: min(number, most)


contended = st.builds(
    lambda most, loss: lambda n: min(n, most) / (1.0 + loss * max(0.0, n - most)),
    st.floats(1.0, 40.0),
    st.floats(0.0, 0.2),
)
worlds = st.builds(World, demand=st.floats(0.01, 60.0), peak=contended)
limits = st.integers(1, 48)


@given(worlds, limits)
def test_it_settles_within_the_limit_and_stays(world, limit):
    numbers = run(Scaling(limit=limit), world)
    assert all(1 <= number <= limit for number in numbers)
    # Where nothing is enough it tries again after 60 s, 180 s, 420 s, ...: ever more seldom.
    assert changes(numbers[200:]) <= 10
    assert numbers[200:].count(mode(numbers[200:])) >= 180


@given(worlds, limits)
def test_what_it_settles_on_is_enough(world, limit):
    number = mode(run(Scaling(limit=limit), world)[200:])
    possible = max(world.peak(n) for n in [1, *(2**k for k in range(6) if 2**k <= limit), limit])
    # Nearly all that is wanted, or nearly all that can be had (a doubling brought too little).
    assert world.peak(number) >= min(0.97 * world.demand, CLOSE * possible / GAIN)


@given(worlds, limits)
def test_what_it_settles_on_is_no_waste(world, limit):
    number = mode(run(Scaling(limit=limit), world)[200:])
    if number > 1 and world.peak(number) >= world.demand:
        busy = number * world.demand / world.peak(number)
        assert number - 1 < busy / 0.5  # at most twice what is needed


@settings(max_examples=40)
@given(st.lists(st.tuples(worlds, st.integers(1, 60)), min_size=1, max_size=4), worlds, limits)
def test_it_follows_changing_loads(phases, last, limit):
    scaling = Scaling(limit=limit)
    for world, num_windows in phases:
        run(scaling, world, num_windows)
    numbers = run(scaling, last, 3000)
    assert all(1 <= number <= limit for number in numbers)
    assert changes(numbers[1500:]) <= 6
    assert last.peak(mode(numbers[1500:])) >= min(0.97 * last.demand, last.peak(1) / GAIN)


@settings(max_examples=40)
@given(worlds, limits, st.integers(0, 1000))
def test_noise_of_a_stationary_load_moves_it_seldom(world, limit, seed):
    scaling, noise = Scaling(limit=limit), random.Random(seed)
    run(scaling, world, 100)
    numbers = [
        scaling.judge(world.window(scaling.number, noise=noise.uniform(0.9, 1.1))).number
        for _ in range(1000)
    ]
    assert changes(numbers) <= 40  # of 1,500 such worlds the worst had 23


def test_it_doubles_while_readers_wait_and_it_pays():
    numbers = run(Scaling(limit=16), World(demand=100.0, peak=up_to(100)))
    assert numbers[:5] == [2, 4, 8, 16, 16]


def test_it_returns_to_the_fewest_that_do_as_well():
    numbers = run(Scaling(limit=16), World(demand=100.0, peak=up_to(3.9)))
    assert numbers[:5] == [2, 4, 8, 4, 4]
    assert set(numbers[3:20]) == {4}
    alone = run(Scaling(limit=16), World(demand=100.0, peak=up_to(1.0)))
    assert alone[:4] == [2, 1, 1, 1]


def test_it_stays_alone_where_trainers_are_slow():
    assert set(run(Scaling(limit=16), World(demand=0.8, peak=up_to(100)))) == {1}


def test_it_keeps_no_more_than_the_demand_needs():
    numbers = run(Scaling(limit=16), World(demand=2.1, peak=up_to(100)))
    assert max(numbers) == 4
    assert numbers[-1] == 3


def test_it_grows_again_when_the_load_does():
    scaling = Scaling(limit=16)
    assert run(scaling, World(demand=6.0, peak=up_to(100)))[-1] == 8
    assert run(scaling, World(demand=0.5, peak=up_to(100)))[-1] == 1
    assert run(scaling, World(demand=6.0, peak=up_to(100)))[-1] == 8


def test_a_doubling_that_did_not_pay_is_tried_again_under_another_load():
    scaling = Scaling(limit=16)
    disk = World(demand=100.0, peak=up_to(1.0))
    assert run(scaling, disk)[-1] == 1
    from_memory = World(demand=100.0, peak=lambda n: 8.0 * n)
    assert run(scaling, from_memory)[-1] == 16


def test_none_is_kept_when_there_is_nothing_to_do_and_one_comes_back_with_the_work():
    scaling = Scaling(limit=4)
    idle = World(demand=0.0, peak=up_to(4))
    numbers = run(scaling, idle, math.ceil(PATIENCE_S / IDLE_WINDOW_S))
    assert numbers == [1] * (len(numbers) - 1) + [0]
    assert scaling.work_came().number == 1
    assert scaling.work_came() is None


def test_after_a_mistake_it_waits_longer():
    scaling = Scaling(limit=4)
    idle = World(demand=0.0, peak=up_to(4))
    waits = []
    for _ in range(9):
        waits.append(run(scaling, idle, 1000).index(0) + 1)
        scaling.work_came()
    first = math.ceil(PATIENCE_S / IDLE_WINDOW_S)
    assert waits == [first * 2**k for k in (0, 1, 2, 3, 4, 5, 6, 6, 6)]


def test_bursts_move_it_ever_more_seldom():
    scaling = Scaling(limit=8)
    burst, lull = World(demand=100.0, peak=up_to(8)), World(demand=0.5, peak=up_to(8))
    numbers = [n for _ in range(300) for load in (burst, lull) for n in run(scaling, load, 8)]
    assert changes(numbers[:600]) > changes(numbers[-600:])
    assert changes(numbers[-600:]) <= 4


@pytest.mark.parametrize(("busy", "starved"), [(SATURATED - 0.1, 1.0), (1.0, 0.05)])
def test_it_does_not_grow_where_more_would_be_no_help(busy, starved):
    scaling = Scaling(limit=4)
    for _ in range(50):  # the budget is used up; or readers seldom wait
        window = Window(
            elapsed_s=1.0,
            num_chunks=10,
            work_s=busy,
            busy_s=busy,
            starved_s=starved,
            num_readers=1.0,
        )
        assert scaling.judge(window).number == 1


def test_a_window_is_complete_with_enough_chunks_or_for_lack_of_work():
    scaling = Scaling(limit=4)

    def complete(elapsed_s: float, num_chunks: int, busy_s: float) -> bool:
        return scaling.is_complete(
            Window(
                elapsed_s=elapsed_s,
                num_chunks=num_chunks,
                work_s=busy_s,
                busy_s=busy_s,
                starved_s=0.0,
                num_readers=1.0,
            )
        )

    assert complete(1.0, CHUNKS_PER_WINDOW, 1.0)
    assert not complete(MIN_WINDOW_S / 2, 100, 0.1)
    assert not complete(1.0, CHUNKS_PER_WINDOW - 1, 1.0)
    assert complete(IDLE_WINDOW_S, 0, 0.0)
    assert not complete(100.0, 1, 100.0)  # a slow data set, not an idle one
