"""Several trainers on one device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from optuna_fleet import FleetConfigError, LocalCluster
from optuna_fleet.executor.cluster import devices
from optuna_fleet.executor.cluster.config import environment
from optuna_fleet.executor.cluster.devices import find_fleet
from optuna_fleet.executor.fleet.agents import Nodes
from optuna_fleet.resources import Device, needs_gloo
from optuna_fleet.trainer import groups
from optuna_fleet.wire.node_messages import AgentJoining
from tests.fleets import Leg, fleet_of, train


def test_slots_in_a_row_are_on_unlike_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_gpu_names", lambda _: ["H200", "H100"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    slots = find_fleet(None, None, 2).devices
    assert [slot.index for slot in slots] == [0, 1, 2, 3]
    assert [slot.visible for slot in slots] == ["5", "7", "5", "7"]
    assert [slot.kind for slot in slots] == ["H200", "H100"] * 2
    assert [needs_gloo(slots[:2]), needs_gloo(slots[1:3]), needs_gloo(slots[::2])] == [0, 0, 1]
    assert needs_gloo([slots[0], *find_fleet(1, "cpu").devices])


def test_slices_of_a_gpu_do_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_gpu_names", lambda _: ["A100 MIG 3g.20gb"] * 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1f2e,MIG-3d4c")
    slices = find_fleet(None, None).devices
    assert needs_gloo(slices)
    assert not needs_gloo(slices[:1])  # alone it is a GPU like any other


def test_nodes_on_one_machine_share_its_gpus() -> None:
    """`LocalCluster(nodes=2)`: NCCL takes no two ranks on one GPU, whatever node they are of."""
    first, second = (Device(index=n, node=n, kind="H100", visible="0") for n in range(2))
    assert needs_gloo([first, second], here={0, 1})
    assert not needs_gloo([first, second], here={0})
    assert not needs_gloo([first, replace(second, visible="1")], here={0, 1})


def test_nodes_that_are_here() -> None:
    nodes = Nodes()
    for name, is_here in (("a", True), ("b", False), ("c", True)):
        joining = AgentJoining(
            agent=name, node=name, devices=(), cores=1, machine="", pid=1, versions={}
        )
        nodes.join(joining, nodes.numbered(joining), is_here=is_here)
    assert nodes.here() == {0, 2}


def test_no_trials_error_in_nccl_ends_other_trials() -> None:
    """Where a job script asks for a dump, torch tells all that have met at the same store."""
    given = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    told = environment(2, given)
    assert told["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert told["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_cpu_slots_are_as_many_as_are_wanted() -> None:
    slots = find_fleet(1, "cpu", 3).devices
    assert len(slots) == 3
    with pytest.raises(FleetConfigError, match="slots_per_device"):
        LocalCluster(slots_per_device=0)


@pytest.mark.parametrize(
    ("kind", "by_gloo", "backend"),
    [("cpu", False, "gloo"), ("cuda", False, "nccl"), ("cuda", True, "gloo")],
)
def test_ranks_on_one_gpu_do_without_nccl(
    monkeypatch: pytest.MonkeyPatch, kind: str, by_gloo: bool, backend: str
) -> None:
    joined: list[str] = []
    monkeypatch.setattr(groups, "join_group", lambda spec, backend, _: joined.append(backend))
    run: Any = SimpleNamespace(
        rank=0,
        world_size=2,
        group="g",
        store=None,
        by_gloo=by_gloo,
        collective_s=1.0,
    )
    groups.join_group_of(run, kind)
    assert joined == [backend]


def test_a_trial_on_the_slots_of_one_device() -> None:
    study = optuna.create_study()
    with fleet_of(devices=1, device_type="cpu", cluster=LocalCluster(slots_per_device=2)) as fleet:
        fleet.script = {0: [Leg((0, 1))]}
        study.optimize(train, n_trials=1, executor=fleet)
    assert study.trials[0].state.is_finished()
