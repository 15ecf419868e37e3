"""How the number of preprocessors and the measures follow what happens."""

from __future__ import annotations

import pytest
from pipeline_datasets import Counted
from yard import epochs, small, yard

from optuna_fleet.pipeline.limits import most_preprocessors
from optuna_fleet.pipeline.server.load import CHUNKS_PER_WINDOW, Levels, Load
from optuna_fleet.pipeline.server.workers import IDLE_S
from optuna_fleet.pipeline.stats import PipelineUse

# Sums


def load_at(now_s, limit=1, *, is_adaptive=True):
    return Load(now_s, limit, is_adaptive=is_adaptive)


def test_levels_are_summed_over_time_while_somebody_reads():
    load = load_at(100.0)
    load.advance(200.0)  # nobody reads
    load.levels = Levels(running=3, busy=2, reading=2, stalled=1, ready=3, window=8)
    load.advance(210.0)
    load.levels = Levels(running=3, busy=1, is_blocked=True, reading=1, ready=1, window=2)
    load.advance(211.0)
    assert load.use == PipelineUse(
        active_s=11.0,
        running_s=33.0,
        busy_s=21.0,
        blocked_s=2.0,
        reading_s=21.0,
        stalled_s=10.0,
        starved_s=10.0,
        ready_s=31.0,
        window_s=82.0,
    )


def test_use_is_a_difference_of_sums():
    early = PipelineUse(active_s=1.0, running_s=1.0, reading_s=2.0, stalled_s=2.0)
    late = PipelineUse(
        active_s=11.0,
        running_s=21.0,
        busy_s=5.0,
        blocked_s=10.0,
        reading_s=12.0,
        stalled_s=3.0,
        ready_s=30.0,
        window_s=40.0,
    )
    use = late.since(early)
    assert use.num_preprocessors == 2.0
    assert (use.busy_share, use.full_share, use.blocked_share) == (0.25, 0.25, 0.5)
    assert use.stalled_share == 0.1
    assert (use.queue_chunks, use.queue_share) == (3.0, 0.75)
    assert PipelineUse().queue_share == PipelineUse().busy_share == 0.0


def test_a_clock_set_back_takes_nothing_away():
    load = load_at(10.0)
    load.levels = Levels(reading=1)
    load.advance(5.0)
    load.advance(6.0)
    assert load.use.active_s == 1.0


# How many there are


def staffed(limit, rounds, *, busy=1.0, starved=1.0):
    """The numbers after so many rounds, in each of which all preprocessors make some chunks."""
    load = load_at(0.0, limit)
    use, numbers = load.use, []
    for _ in range(rounds):
        number = load.num_wanted
        use.active_s += 1.0
        use.busy_s += number * busy
        use.starved_s += starved
        for _ in range(CHUNKS_PER_WINDOW * number):
            load.chunk_made(running=number, has_fresh=False)
            if load.num_wanted > number:
                break
        numbers.append(load.num_wanted)
    return numbers


def test_preprocessors_are_doubled_while_readers_starve_and_all_are_busy():
    assert sorted(set(staffed(6, 9))) == [1, 2, 4, 6]
    assert staffed(6, 6, starved=0.05) == [1] * 6
    assert staffed(6, 6, busy=0.5) == [1] * 6


def test_nothing_is_decided_while_one_still_loads_the_data_sets():
    load = load_at(0.0, 8)
    for number in range(20):
        load.use = PipelineUse(active_s=number + 1.0, busy_s=number + 1.0, starved_s=number + 1.0)
        load.chunk_made(running=1, has_fresh=True)
    assert load.num_wanted == 1


def test_a_number_that_the_user_gave_is_kept():
    with yard(small(Counted(150), num_preprocessors=3), limit=8, is_adaptive=True) as here:
        here.read(epochs(*range(4)))
        here.starve(lambda number: 1.0)
        assert here.numbers[-1] == 3
        here.now_s += 2 * IDLE_S
        here.server.resume()
        assert len(here.server.preprocessor_pids) == 3


def test_idle_preprocessors_are_ended_and_come_back_with_the_work():
    with yard(small(Counted(150)), is_adaptive=True) as here:
        here.read(epochs(*range(5)))
        here.starve(lambda number: 1.0 / number)
        assert here.numbers[-1] == 4
        here.now_s += IDLE_S
        here.server.resume()
        assert here.server.preprocessor_pids == ()
        here.read(epochs(10))
        here.feed(0.01)
        assert len(here.server.preprocessor_pids) == 1
        assert here.exits == [0] * 4
        assert here.server.stats().num_lost == 0


@pytest.mark.parametrize(
    ("cpus", "num_slots", "cpu_slots", "most"),
    [(2, 2, True, 1), (8, 4, True, 4), (1, 1, True, 1), (2, 4, False, 1), (64, 8, False, 56)],
)
def test_limits_of_machines(cpus, num_slots, cpu_slots, most):
    assert most_preprocessors(cpus, num_slots=num_slots, cpu_slots=cpu_slots) == most
