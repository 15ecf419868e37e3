"""How many pilots are submitted and cancelled, and which departures are told. Nothing runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optuna_fleet.executor.cluster.engine import Departure
from optuna_fleet.executor.cluster.slurm.commands import Job
from optuna_fleet.executor.cluster.slurm.harvest import HarvestCluster, Pilots


def pilots_of(most: int = 4, shares_nodes: bool = False) -> Pilots:
    return Pilots(HarvestCluster(max_nodes=most, exclusive=not shares_nodes))


def running(number: str, node: str = "", end: float | None = None) -> Job:
    return Job(number=number, state="RUNNING", nodes=(node or f"node{number}",), end=end)


def waiting(number: str, reason: str = "Resources") -> Job:
    return Job(number=number, state="PENDING", reason=reason)


def ended(number: str, state: str) -> Job:
    return Job(number=number, state=state, nodes=(f"node{number}",))


def test_submissions_are_few_at_a_time() -> None:
    pilots = pilots_of(most=32)
    assert pilots.missing(0.0) == 8
    pilots.see([waiting(str(number)) for number in range(30)], 1.0)
    assert pilots.missing(1.0) == 2


def test_as_many_as_are_wanted() -> None:
    pilots = pilots_of()
    pilots.see([running("1"), waiting("2"), waiting("3")], 0.0)
    assert (pilots.missing(0.0), pilots.to_cancel(0.0)) == (1, [])
    pilots.wanted = 2
    assert (pilots.missing(0.0), pilots.to_cancel(0.0)) == (0, ["3"])
    pilots.dropped.update(["3"])
    assert pilots.to_cancel(0.0) == []  # though it is still there
    pilots.wanted = 0
    assert (pilots.missing(0.0), pilots.to_cancel(0.0)) == (0, ["2"])
    pilots.dropped.update(["2"])
    pilots.wanted = 100
    assert pilots.missing(0.0) == 3


def test_who_runs_is_cancelled_if_there_have_long_been_too_many() -> None:
    pilots = pilots_of()
    jobs = [running("1", end=9000.0), running("2"), running("3", end=8000.0), waiting("4")]
    pilots.see(jobs, 0.0)
    pilots.wanted = 1
    assert pilots.to_cancel(0.0) == ["4"]
    pilots.dropped.update(["4"])
    pilots.wanted = 3
    assert pilots.to_cancel(50.0) == []
    pilots.wanted = 1
    assert pilots.to_cancel(70.0) == []  # for 20 s
    assert pilots.to_cancel(130.0) == ["1", "3"]
    pilots.see([running("2"), ended("1", "COMPLETING"), ended("3", "COMPLETING")], 200.0)
    assert (pilots.missing(200.0), pilots.to_cancel(200.0)) == (0, [])


def test_a_time_limit_is_told_once_and_again_when_it_changes() -> None:
    pilots = pilots_of()
    (told,) = pilots.see([running("1", end=1000.0)], 0.0)
    assert (told.node, told.by) == ("node1", 1000.0)
    assert pilots.see([running("1", end=1000.0)], 1.0) == []
    (told,) = pilots.see([running("1", end=2000.0)], 2.0)
    assert told.by == 2000.0


def test_departures_say_why() -> None:
    for state, cause in {"PREEMPTED": "was preempted", "PENDING": "was requeued"}.items():
        pilots = pilots_of()
        pilots.see([running("1")], 0.0)
        assert pilots.see([ended("1", state)], 1.0) == [
            Departure(node="node1", cause=f"its pilot, job 1, {cause}")
        ]
    pilots.see([running("1")], 2.0)
    (told,) = pilots.see([], 3.0)  # it is forgotten, even
    assert told.cause == "its pilot, job 1, has ended"


def test_while_a_pilot_ends_it_is_not_known_what_becomes_of_it() -> None:
    pilots = pilots_of(most=1)
    pilots.see([running("1")], 0.0)
    assert pilots.see([ended("1", "COMPLETING")], 1.0) == []
    assert pilots.missing(1.0) == 0
    (told,) = pilots.see([ended("1", "PENDING")], 2.0)
    assert told.node == "node1"
    assert pilots.missing(2.0) == 0  # it comes back by itself


def test_a_node_that_another_pilot_has_by_now_is_not_gone() -> None:
    pilots = pilots_of()
    pilots.see([running("1", "a")], 0.0)
    assert pilots.see([ended("1", "PREEMPTED"), running("2", "a")], 1.0) == []


def test_a_lost_node_is_given_back_unless_its_pilot_begins_anew() -> None:
    pilots = pilots_of()
    pilots.see([running("1"), running("2")], 0.0)
    pilots.lose(["node1", "node2"])
    pilots.see([running("1"), waiting("2")], 1.0)
    pilots.see([running("1"), running("2")], 2.0)
    assert pilots.to_cancel(2.0) == ["1"]


def test_submissions_that_fail_are_tried_later_and_later() -> None:
    pilots = pilots_of()
    pilots.refused(100.0)
    assert (pilots.missing(114.0), pilots.missing(115.0)) == (0, 4)
    pilots.refused(115.0)
    assert (pilots.missing(144.0), pilots.missing(145.0)) == (0, 4)


def test_pilots_that_end_at_once_time_and_again_are_hopeless() -> None:
    pilots = pilots_of(most=1)
    for number in range(5):
        assert not pilots.are_hopeless
        pilots.see([ended(str(number), "FAILED")], 1000.0 * number)
    assert pilots.are_hopeless


states = st.sampled_from(["PENDING", "RUNNING", "COMPLETING", "PREEMPTED", "FAILED", "TIMEOUT"])
looks = st.lists(st.lists(states, max_size=6), max_size=8)


@given(looks, st.none() | st.integers(0, 6))
def test_never_more_than_wanted(looks: list[list[str]], wanted: int | None) -> None:
    pilots = pilots_of(most=5)
    pilots.wanted = wanted
    for now, seen in enumerate(looks):
        jobs = [Job(number=str(n), state=s, nodes=(f"n{n}",)) for n, s in enumerate(seen)]
        told = pilots.see(jobs, float(now))
        assert len({(d.node, d.by) for d in told}) == len(told)
        cancelled = pilots.to_cancel(float(now))
        there = len(pilots.running) + len(pilots.ending)
        missing = pilots.missing(float(now))
        assert not (missing and cancelled)
        assert missing + there <= max(5 if wanted is None else min(5, wanted), there)
