"""Simulated virtual workers: what can be worked out by hand, and bounds that always hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.simulator import StageTimes, VirtualWorkers
from optuna_fleet.virtual_workers.wsp import Flush, WaveSynchronous


def stages(*seconds, **syncs):
    """A third of each stage's time is its forward pass."""
    return [StageTimes(forward_s=s / 3, backward_s=2 * s / 3, **syncs) for s in seconds]


def rate(workers, schedule, num_waves=40, **options):
    return VirtualWorkers(workers, schedule, **options).run(num_waves).minibatches_per_s


def test_one_minibatch_at_a_time_is_naive_model_parallelism():
    assert rate([stages(1, 2, 3)], WaveSynchronous(1)) == pytest.approx(1 / 6)


def test_a_full_pipeline_ends_a_minibatch_in_the_time_of_its_slowest_stage():
    assert rate([stages(1, 3, 2)], WaveSynchronous(5)) == pytest.approx(1 / 3)


def test_a_flush_costs_k_minus_1_turns():
    # k = 3 stages, m = 4 microbatches: m of every m + k - 1 turns are of use (GPipe's bubble).
    assert rate([stages(3, 3, 3)], Flush(4)) == pytest.approx(1 / 3 * 4 / (4 + 3 - 1))


def test_virtual_workers_share_the_pace_of_the_slowest_one():
    alone = rate([stages(3, 3)], WaveSynchronous(3))
    for distance in (0, 4):
        together = rate([stages(3, 3), stages(1, 1)], WaveSynchronous(3, distance), num_waves=200)
        assert together == pytest.approx(2 * alone, rel=0.05)


def test_a_clock_distance_hides_pushes_and_pulls():
    workers = [stages(1, 1, push_s=2, pull_s=2)] * 2
    strict, loose = (
        VirtualWorkers(workers, WaveSynchronous(4, d), hidden=1.0).run(60) for d in (0, 4)
    )
    assert loose.minibatches_per_s == pytest.approx(2.0, rel=0.02)  # nothing waits
    assert strict.minibatches_per_s < 1.8
    assert max(loose.waited_s) < min(strict.waited_s)


seconds = st.lists(st.floats(0.1, 3), min_size=1, max_size=4)


@given(
    st.lists(seconds, min_size=1, max_size=3),
    st.integers(1, 7),
    st.integers(0, 3),
    st.booleans(),
)
def test_no_pipeline_is_faster_than_its_slowest_stage(workers, wave_size, distance, flush):
    is_flushed = flush and len(workers) == 1
    schedule = Flush(wave_size) if is_flushed else WaveSynchronous(wave_size, distance)
    outcome = VirtualWorkers([stages(*w) for w in workers], schedule).run(20)
    slack = len(workers) * wave_size * (distance + 2) / (10 * wave_size)  # the window's edges
    assert outcome.minibatches_per_s <= sum(1 / max(w) for w in workers) * (1 + slack)
