"""Pre-flight checks in the simulation: a unit of work, as in a real sweep."""

import pytest
from replay_cases import all_join, simulate, spans_of, trial

from optuna_fleet.alloc import ElasticAllocator
from optuna_fleet.replay.workload import Rules


def widened(*, traits=frozenset({"net"}), check_s=7.0):
    """A trial on one of two devices, which would be given both from the start."""
    allocator = ElasticAllocator(objective="throughput")
    trials = [trial(epochs=20, traits=traits)]
    return simulate(trials, [all_join(2)], allocator, rules=Rules(check_s=check_s))


def test_what_is_not_checked_yet_flies_on_one_device_until_it_is():
    outcome = widened()
    assert outcome.checked == [{"net"}]
    (_, first, *_), *others = spans_of(outcome)
    assert len(first) == 1
    assert [len(devices) for _, devices, *_ in others] == [2]


def test_what_asks_for_its_devices_has_them_at_once():
    outcome = widened(traits=frozenset())
    assert outcome.checked == []
    assert spans_of(outcome)[0][1] == (0, 1)


@pytest.mark.parametrize("check_s", [1.0, 30.0])
def test_a_check_takes_its_time(check_s):
    _, (_, _, begun_s, _) = spans_of(widened(check_s=check_s))
    assert begun_s >= check_s
