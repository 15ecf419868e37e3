"""Which layers of a pipeline are where, and what goes through it at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from optuna_fleet.virtual_workers.layouts import Demand, Ranks
from optuna_fleet.virtual_workers.measuring import LayerCost, blocks_of, layer_costs, link_of
from optuna_fleet.virtual_workers.parameter_server import Directory
from optuna_fleet.virtual_workers.partition import DoesNotFit, Link
from optuna_fleet.virtual_workers.pipeline import microbatches

LAYER = LayerCost(
    forward_s=1.0, backward_s=2.0, output_bytes=1.0, parameter_bytes=1.0, kept_bytes=10.0
)
SLOW = LayerCost(
    forward_s=2.0, backward_s=4.0, output_bytes=1.0, parameter_bytes=1.0, kept_bytes=10.0
)


def demand(memory_bytes: float, blocks: tuple[int, ...] = (1, 2, 3, 4, 5, 6)) -> Demand:
    return Demand(blocks=blocks, in_flight=4, copies=2.0, memory_bytes=memory_bytes)


def test_layers_stay_together_that_share_parameters() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    assert blocks_of(model, may_part_ties=False) == (1, 2, 3, 4, 5)
    model[3].weight = model[1].weight
    assert blocks_of(model, may_part_ties=False) == (1, 4, 5)
    assert blocks_of(model, may_part_ties=True) == (1, 2, 3, 4, 5)
    model[4] = nn.Sequential(model[2])  # a module, of which there can't be a copy
    assert blocks_of(model, may_part_ties=True) == (1, 2, 5)
    assert demand(1e3, blocks=(1, 4, 5)).place([[LAYER] * 5] * 2).cuts in [((1,),), ((4,),)]


def test_no_more_devices_are_asked_for_than_hold_the_model() -> None:
    costs = [LAYER] * 6
    assert [demand(m).fewest_stages(costs, 6) for m in (72.0, 71.0, 24.0)] == [1, 2, 3]
    assert demand(24.0).fewest_stages(costs, 2) is None


def test_a_link_is_as_fast_as_messages_there_and_back() -> None:
    usual = Link(bytes_per_s=1e9, latency_s=1e-4)
    link = link_of(short_s=4e-4, long_s=4e-4 + 2 * 2**20 / 5e8, usual=usual)
    assert link.bytes_per_s == pytest.approx(5e8)
    assert link.latency_s == 2e-4
    assert link_of(short_s=1e-5, long_s=1e-3, usual=usual).latency_s == 1e-4


def several(most: int | None, *, memory_bytes: float = 1e9) -> Demand:
    return replace(demand(memory_bytes), clock_distance=0, most_workers=most)


def test_where_memory_is_short_it_is_weighed_how_many_parts_a_stage_holds() -> None:
    def held_and_cuts(memory_bytes: float) -> tuple[int, tuple[int, ...]]:
        placed = demand(memory_bytes).place([[LAYER] * 6] * 2)
        return placed.held, placed.cuts[0]

    assert held_and_cuts(100.0) == (3, (3,))
    assert held_and_cuts(80.0) == (2, (3,))  # fewer parts, but stages that take as long
    assert held_and_cuts(65.0) == (3, (2,))  # unlike stages, which is better than waiting
    assert held_and_cuts(45.0) == (1, (3,))
    with pytest.raises(DoesNotFit):
        held_and_cuts(35.0)


def test_unlike_devices_are_dealt_to_virtual_workers() -> None:
    costs = [[LAYER] * 6, [SLOW] * 6] * 2  # fast and slow in turn
    placed = several(2).place(costs)
    assert placed.cuts in [((4,), (4,)), ((2,), (2,))]
    assert sorted(map(sorted, placed.ranks)) == [[0, 1], [2, 3]]
    assert 0 in placed.ranks[0]


@pytest.mark.parametrize(
    ("parameter_bytes", "memory_bytes", "expected"),
    [
        (1.0, 1e9, 4),  # nothing has to be sent but parameters
        (1e9, 1e12, 1),  # servers would take longer than the passes
        (1.0, 60.0, 2),
    ],
)
def test_as_many_virtual_workers_as_are_fastest_and_have_the_memory(
    parameter_bytes: float, memory_bytes: float, expected: int
) -> None:
    kept = replace(LAYER, parameter_bytes=parameter_bytes)
    assert len(several(None, memory_bytes=memory_bytes).place([[kept] * 6] * 4).ranks) == expected


@pytest.mark.parametrize(
    ("parameter_bytes", "memory_bytes", "most_workers", "expected"),
    [
        (1.0, 1e9, None, [2, 2, 1, 1]),  # no more than a batch has parts
        (1.0, 1e9, 2, [3, 3]),
        (1.0, 50.0, None, [3, 3]),
        (1e10, 1e12, None, [6]),  # sums would take longer
    ],
)
def test_with_flushes_too_as_many_share_a_batch_as_are_fastest_and_have_the_memory(
    parameter_bytes: float, memory_bytes: float, most_workers: int | None, expected: list[int]
) -> None:
    kept = replace(LAYER, parameter_bytes=parameter_bytes)
    free = replace(demand(memory_bytes), most_workers=most_workers)
    assert [*map(len, free.place([[kept] * 6] * 6).ranks)] == expected


TWO_NODES = Ranks(nodes=(0, 0, 1, 1), memory_bytes=(1e9,) * 4)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("NP", [[0, 1], [2, 3]]), *((name, [[0, 2], [1, 3]]) for name in ("ED", "HD", "ED-local"))],
)
def test_the_layout_that_is_chosen_is_taken(layout: str, ranks: list[list[int]]) -> None:
    placed = replace(several(None), layout=layout).place([[LAYER] * 6] * 4, TWO_NODES)
    assert sorted(map(sorted, placed.ranks)) == ranks
    assert placed.reason == ""


def test_local_servers_have_stages_cut_alike_whoever_is_slow_at_the_moment() -> None:
    costs = [[LAYER] * 6, [SLOW] * 6, [LAYER] * 6, [LAYER] * 6]
    placed = replace(several(None), layout="ED-local").place(costs, TWO_NODES)
    assert len(placed.ranks) == 2
    assert len(set(placed.cuts)) == 1
    assert len({tuple(rank // 2 for rank in ranks) for ranks in placed.ranks}) == 1


@pytest.mark.parametrize(
    ("most_workers", "memory_bytes", "expected"),
    [
        (1, 1e9, 4),  # one for each stage
        (2, 1e9, 3),  # 2k - 1: more would be held by no stage
        (4, 1e9, 1),  # whole models
        (2, 60.0, 2),
        (2, 35.0, 1),
        (2, 20.0, None),
    ],
)
def test_as_many_minibatches_are_in_flight_as_help_and_fit(
    most_workers: int, memory_bytes: float, expected: int | None
) -> None:
    free = replace(several(most_workers, memory_bytes=memory_bytes), in_flight=None)
    if expected is None:
        with pytest.raises(DoesNotFit):
            free.place([[LAYER] * 6] * 4)
        return
    placed = free.place([[LAYER] * 6] * 4)
    assert placed.held == placed.in_flight == expected


def test_what_layers_cost_is_measured_without_a_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    batch = torch.ones(3, 4), torch.zeros(3, 2)
    costs = layer_costs(list(model), nn.functional.mse_loss, *batch, torch.device("cpu"))
    assert [cost.parameter_bytes for cost in costs] == [160, 64, 0, 72]
    assert [cost.output_bytes for cost in costs] == [96, 96, 96, 24]
    assert costs[0].kept_bytes >= 48
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("size", "sizes", "weights"),
    [
        (8, [2, 2, 2, 2], [0.25] * 4),
        (10, [2, 3, 2, 3], [0.2, 0.3, 0.2, 0.3]),
        (2, [1, 1, 1, 1], [0.5, 0.5, 0.0, 0.0]),
    ],
)
def test_a_batch_in_parts(size: int, sizes: list[int], weights: list[float]) -> None:
    inputs = {"x": torch.arange(size), "mask": torch.ones(3, 3)}
    parts = list(microbatches(inputs, torch.arange(size), 4))
    assert [len(part.inputs["x"]) for part in parts] == sizes
    assert [part.weight for part in parts] == weights
    assert all(torch.equal(part.inputs["x"], part.targets) for part in parts)
    assert all(part.inputs["mask"].shape == (3, 3) for part in parts)


def test_the_layout_that_comes_by_itself_is_told() -> None:
    placed = replace(several(None), in_flight=None).place([[LAYER] * 6] * 4)
    assert "here 2 x 2 (ED; virtual workers x stages), with 3 in flight." in placed.reason
    assert several(2).place([[LAYER] * 6] * 4).reason == ""


def directory(cuts: Any, ranks: Any, nodes: list[int]) -> Directory:
    return Directory.of(ranks, cuts, dict.fromkeys("abcdef", 1.0), nodes)


def test_servers_are_on_the_node_of_most_who_ask_them_and_shared_out() -> None:
    # ED: both virtual workers have the first stage on node 0, and the second on node 1.
    local = directory(((3,), (3,)), ((0, 2), (1, 3)), [0, 0, 1, 1])
    assert local.hosts == (0, 2)
    # One node, cut unlike.
    shared = directory(((2, 4), (3,)), ((0, 1, 2), (3, 4)), [0] * 5)
    assert shared.pieces == ((0, 2), (2, 3), (3, 4), (4, 6))
    assert shared.hosts == (0, 1, 4, 2)
    # A node that has two of three stages.
    most = directory(((), (), ()), ((0,), (1,), (2,)), [0, 1, 1])
    assert most.hosts == (1,)
