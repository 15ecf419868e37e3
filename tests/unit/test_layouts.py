"""Virtual workers: who gets which devices, where weights are, and how fast that is."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.simulator import StageTimes, VirtualWorkers
from optuna_fleet.virtual_workers.layouts import (
    Servers,
    distributions,
    equal_distribution,
    flushed_s,
    hybrid_distribution,
    node_partition,
    pipeline_rate,
    sync_seconds,
)
from optuna_fleet.virtual_workers.partition import (
    Layers,
    Link,
    Links,
    PartitionProblem,
    StageDevice,
    best_partition,
)
from optuna_fleet.virtual_workers.wsp import Flush, WaveSynchronous

SPEEDS = {"V": 112, "R": 123, "G": 48, "Q": 40}
MEMORY = {"V": 12, "R": 24, "G": 6, "Q": 8}


def nodes(kinds, per_node=4):
    """A node for each letter."""
    return tuple(
        StageDevice(index=per_node * node + slot, node=node, kind=kind, memory_bytes=MEMORY[kind])
        for node, kind in enumerate(kinds)
        for slot in range(per_node)
    )


def layers_of(num, *, forward=1.0, cut=0.0, parameters=0.0, kept=0.0, kinds="VRGQ"):
    seconds = {kind: (forward * 100 / SPEEDS[kind],) * num for kind in kinds}
    return Layers(
        forward_s=seconds,
        backward_s={kind: tuple(2 * s for s in times) for kind, times in seconds.items()},
        cut_bytes=(cut,) * num,
        parameter_bytes=(parameters,) * num,
        kept_bytes=(kept,) * num,
    )


def letters(workers):
    return ["".join(device.kind for device in worker) for worker in workers]


def test_the_papers_table_3():
    devices = nodes("VRGQ")
    assert letters(node_partition(devices)) == ["VVVV", "RRRR", "GGGG", "QQQQ"]
    assert letters(equal_distribution(devices)) == ["VRGQ"] * 4
    assert sorted(letters(hybrid_distribution(devices, SPEEDS))) == ["RRGG"] * 2 + ["VVQQ"] * 2


def shapes(*kinds, per_node=2, **options):
    ways = distributions(nodes("".join(kinds), per_node), SPEEDS, **options)
    return [(name, letters(workers)) for name, workers in ways]


def test_a_layout_can_be_chosen():
    assert shapes("VR", layout="NP") == [("NP", ["VV", "RR"])]
    assert shapes("VRGQ", layout="HD") == [("HD", ["VQ", "VQ", "RG", "RG"])]
    ed = [["VR", "VR"], ["VVRR"]]
    for name in ("ED", "ED-local"):  # as many as a node has devices, or fewer for want of memory
        assert shapes("VR", layout=name) == [(name, workers) for workers in ed]
        assert shapes("VR", layout=name, most_workers=1) == [(name, ed[1])]
    assert shapes("VR", layout="ED", most_workers=3)[0] == ("ED", ["VR", "V", "R"])


def test_by_itself_the_number_is_tried_too():
    assert [name for name, _ in shapes("VR")] == ["ED"] * 4 + ["NP", "HD"]
    assert shapes("VR", most_workers=2) == shapes("VR", layout="ED")


@given(
    st.lists(st.sampled_from("VRGQ"), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 5),
)
def test_every_device_is_in_one_virtual_worker(kinds, per_node, num_workers):
    devices = nodes(kinds, per_node)
    dealt = equal_distribution(devices, min(num_workers, len(devices)))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    for workers in (node_partition(devices), dealt, hybrid_distribution(devices, SPEEDS)):
        assert Counter(d for worker in workers for d in worker) == Counter(devices)
        assert all(workers)


def test_local_servers_keep_updates_within_nodes():
    layers = layers_of(4, parameters=8.0)
    links = Links(within=Link(bytes_per_s=4.0), between=Link(bytes_per_s=1.0))
    workers = [
        best_partition(PartitionProblem(layers=layers, devices=devices, copies=0.0))
        for devices in equal_distribution(nodes("VR"), 4)
    ]
    local = sync_seconds(workers, layers, links, Servers.LOCAL)
    assert local == ((4.0, 4.0),) * 4  # 2 layers of 8 bytes at 4 bytes/s
    spread = sync_seconds(workers, layers, links, Servers.ROUND_ROBIN)
    # A layer of each stage is on the other node: 4 workers send 8 bytes each through one port.
    assert spread == ((32.0, 32.0),) * 4


stage_seconds = st.lists(st.floats(0.5, 2), min_size=1, max_size=5)


@settings(max_examples=40)
@given(stage_seconds, st.integers(1, 9), st.booleans())
def test_predictions_are_about_what_the_simulator_finds(stage_s, in_flight, flush):
    times = [StageTimes(forward_s=s / 3, backward_s=2 * s / 3) for s in stage_s]
    schedule = Flush(in_flight) if flush else WaveSynchronous(in_flight)
    found = VirtualWorkers([times], schedule).run(60).minibatches_per_s
    predicted = pipeline_rate(stage_s, in_flight)
    if flush:
        predicted = in_flight / flushed_s(stage_s, in_flight, held=in_flight)
    assert 0.5 * predicted <= found <= 1.4 * predicted
