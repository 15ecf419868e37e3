"""Layers to stages: the optimum, memory, and what is refused."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.virtual_workers.partition import (
    DoesNotFit,
    Layers,
    Link,
    Links,
    PartitionProblem,
    StageDevice,
    best_partition,
    partition_of,
)


def fits(partition):
    return all(stage.memory_bytes <= stage.device.memory_bytes for stage in partition.stages)


def brute_force(problem):
    """The least time of the slowest stage; None if nothing fits. Tries everything."""
    ends = range(1, len(problem.layers))
    found = [
        partition.slowest_s
        for order in itertools.permutations(problem.devices)
        for cuts in itertools.combinations(ends, len(order) - 1)
        if fits(partition := partition_of(problem, order, cuts))
    ]
    return min(found, default=None)


def layers_of(forward, *, speeds=None, cut=0.0, parameters=0.0, kept=0.0):
    """Layers with these forward times on type "a"; backward passes take twice as long."""
    speeds = speeds or {"a": 1.0}
    num = len(forward)
    return Layers(
        forward_s={k: tuple(f / s for f in forward) for k, s in speeds.items()},
        backward_s={k: tuple(2 * f / s for f in forward) for k, s in speeds.items()},
        cut_bytes=(cut,) * num,
        parameter_bytes=(parameters,) * num,
        kept_bytes=(kept,) * num,
    )


def random_problem(seed, num_devices, num_layers, *, tight=1.5, in_flight=None):
    """Devices of up to 3 types on up to 3 nodes; memory for `tight` times what layers take."""
    rng = np.random.default_rng(seed)
    kinds = ("a", "b", "c")
    base = rng.uniform(1, 10, num_layers)
    speed = {"a": 1.0, "b": 0.6, "c": 0.3}
    layers = Layers(
        forward_s={
            k: tuple(base / s * rng.uniform(0.8, 1.2, num_layers)) for k, s in speed.items()
        },
        backward_s={k: tuple(2 * base / s) for k, s in speed.items()},
        cut_bytes=tuple(rng.uniform(1, 20, num_layers)),
        parameter_bytes=tuple(rng.uniform(1, 10, num_layers)),
        kept_bytes=tuple(rng.uniform(1, 10, num_layers)),
    )
    room = (3 * sum(layers.parameter_bytes) + sum(layers.kept_bytes)) / num_devices
    devices = tuple(
        StageDevice(
            index=index,
            node=(node := int(rng.integers(3))),
            kind=kinds[node if rng.random() < 0.7 else int(rng.integers(3))],
            memory_bytes=tight * room * float(rng.choice([0.8, 1.0, 1.6])),
        )
        for index in range(num_devices)
    )
    return PartitionProblem(
        layers=layers,
        devices=devices,
        in_flight=in_flight or int(rng.integers(1, 2 * num_devices)),
        links=Links(within=Link(bytes_per_s=10.0), between=Link(bytes_per_s=3.0, latency_s=0.5)),
    )


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 4), st.floats(0.8, 3))
def test_the_search_finds_the_optimum(seed, num_devices, more_layers, tight):
    problem = random_problem(seed, num_devices, num_devices + more_layers, tight=tight)
    best = brute_force(problem)
    if best is None:
        with pytest.raises(DoesNotFit):
            best_partition(problem)
        return
    found = best_partition(problem)
    assert found.slowest_s == pytest.approx(best, rel=1e-9)
    assert fits(found)
    assert sorted(s.device for s in found.stages) == sorted(problem.devices)
    assert [s.first for s in found.stages[1:]] == [s.end for s in found.stages[:-1]]


def test_alike_nodes_are_not_told_apart():
    problem = PartitionProblem(
        layers=layers_of([1.0] * 30, speeds={"a": 1.0}, cut=1.0),
        devices=tuple(StageDevice(index=i, node=i, kind="a") for i in range(30)),
        links=Links(between=Link(bytes_per_s=0.1)),
    )
    found = best_partition(problem)  # all sets of nodes would be a billion
    assert [stage.device.node for stage in found.stages] == [*range(30)]


def test_the_first_stage_holds_most_minibatches_so_it_gets_the_large_device():
    small, large = (
        StageDevice(index=i, node=0, kind="a", memory_bytes=m) for i, m in enumerate((2.0, 6.0))
    )
    layers = layers_of([1.0] * 4, kept=1.0)
    problem = PartitionProblem(
        layers=layers,
        devices=(small, large),
        in_flight=3,
        copies=0.0,
    )
    found = best_partition(problem)
    assert [stage.device for stage in found.stages] == [large, small]
    assert [stage.memory_bytes for stage in found.stages] == [6.0, 2.0]


def test_times_include_what_is_received():
    devices = tuple(StageDevice(index=i, node=i, kind="a") for i in range(2))
    problem = PartitionProblem(
        layers=layers_of([1.0, 1.0], cut=3.0),
        devices=devices,
        links=Links(between=Link(bytes_per_s=2.0, latency_s=0.25)),
    )
    first, last = best_partition(problem).stages
    assert (first.forward_s, first.backward_s) == (1.0, 2.0 + 1.75)
    assert (last.forward_s, last.backward_s) == (1.0 + 1.75, 2.0)
