"""Nodes of Ray clusters come and go; what an agent takes of them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from optuna_fleet import FleetConfigError, FleetExecutor, LaunchError, RayCluster
from optuna_fleet.executor.cluster import ray as ray_adapter
from optuna_fleet.executor.cluster.ray import RayEngine, ray_module
from tests.clusters import recorded
from tests.clusters.forks import agents_are_forked, forking
from tests.clusters.hub import AGENT, Hub
from tests.clusters.ray_nodes import RayNodes, ray_cluster
from tests.clusters.test_engines import Case, live
from tests.fleets import small_pipeline
from tests.nursery import Nursery


@pytest.fixture(scope="module")
def ray_nodes(nursery: Nursery) -> Iterator[RayNodes]:
    with forking(nursery), ray_cluster(cpus=(2, 1, 1)) as nodes:
        yield nodes


def test_agents_are_placed_and_watched_and_ended(ray_nodes: RayNodes) -> None:
    ray_module().init(address=ray_nodes.address, logging_level="WARNING")  # once for all
    live(Case(engine=ray_nodes.engine, hopeless=None))
    with pytest.raises(LaunchError, match=r"No node .* has 3 CPUs"):
        Hub(ray_nodes.engine(cpus_per_node=3)).__enter__()
    ray_module().shutdown()


def test_missing_nodes_are_awaited(ray_nodes: RayNodes) -> None:
    with Hub(ray_nodes.engine(num_nodes=4, cpus_per_node=1)) as hub:
        hub.wait_for(lambda: len(hub.nodes()) == 3)
        added = ray_nodes.add(cpus=2)
        hub.wait_for(lambda: len(hub.nodes()) == 4)
        assert len(set(hub.nodes())) == 4
    ray_nodes.cluster.remove_node(added)


def test_an_agent_dies_with_its_actor(ray_nodes: RayNodes) -> None:
    with Hub(ray_nodes.engine(num_nodes=1)) as hub:
        hub.wait_for(lambda: len(hub.nodes()) == 1)
        node, pid = hub.agents[0].node, hub.agents[0].told["pid"]
        agent = os.pidfd_open(pid)
        os.kill(_parent(pid), signal.SIGKILL)
        select.select([agent], [], [])
        os.close(agent)
        hub.wait_for(lambda: node in hub.gone())
    (gone,) = hub.departures  # what was killed may work when it is tried again
    assert (gone.exit_code, gone.is_replaced) == (-signal.SIGKILL, True)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


_DRIVER = """
import queue, sys
from optuna_fleet.executor.cluster.ray import RayCluster, RayEngine
from optuna_fleet.wire.invitation import Invitation
engine = RayEngine(RayCluster(address=sys.argv[1], num_nodes=1), (sys.argv[2],), "cpu")
engine.open(Invitation.of(sys.argv[3], sys.stdin.readline()), queue.SimpleQueue())
sys.stdin.read()
"""


class _ElsewhereEngine(RayEngine):
    """Whose driver is another process."""

    def open(self, invitation: Any, inbox: Any) -> None:
        host, port = invitation.addresses[0]
        self.driver = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, self._cluster.address, AGENT[1], f"{host}:{port}"],
            stdin=subprocess.PIPE,
            text=True,
        )
        assert self.driver.stdin is not None
        self.driver.stdin.write(f"{invitation.token}\n")
        self.driver.stdin.flush()

    def close(self) -> None:
        self.driver.kill()
        self.driver.communicate()


def test_agents_end_with_the_driver(ray_nodes: RayNodes) -> None:
    engine = _ElsewhereEngine(RayCluster(address=ray_nodes.address), AGENT[1:])
    with Hub(engine) as hub:
        hub.wait_for(hub.nodes)
        engine.driver.kill()
        hub.wait_for(lambda: not hub.agents)  # their connections are to this process, which lives


def test_a_ray_that_was_there_stays_and_is_missed(ray_nodes: RayNodes) -> None:
    import ray

    ray.init(address=ray_nodes.address, logging_level="WARNING")
    elsewhere = RayEngine(RayCluster(address="10.0.0.9:1"), AGENT[1:], "cpu")
    with pytest.raises(LaunchError, match=rf"connected to {ray_nodes.address}, not to 10"):
        Hub(elsewhere).__enter__()
    for is_shut_down in (False, True):
        with Hub(RayEngine(RayCluster(num_nodes=1), AGENT[1:], "cpu")) as hub:
            hub.wait_for(hub.nodes)
            if is_shut_down:
                ray.shutdown()
                with pytest.raises(LaunchError, match=r"more: ray\.shutdown"):
                    hub.wait_for(lambda: False)
        assert ray.is_initialized() is not is_shut_down


def test_a_sweep_has_the_same_records(ray_nodes: RayNodes) -> None:
    cluster = RayCluster(address=ray_nodes.address, cpus_per_node=1)
    with (
        agents_are_forked(),
        FleetExecutor(small_pipeline(), device_type="cpu", cluster=cluster) as fleet,
    ):
        numbers = recorded.run(fleet)
    assert numbers == pytest.approx(recorded.undisturbed(), rel=1e-10)


def test_an_address_where_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip(
        "ray", reason="Ray is not installed: pip install 'optuna-fleet[ray]'"
    )

    def init(address: str, **options: Any) -> None:  # the real one tries for a minute
        raise ray.exceptions.RpcError("Timed out while waiting for GCS to become available.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(LaunchError, match=r"address='10\.0\.0\.9:1'.*ray start --head"):
        Hub(RayEngine(RayCluster(address="10.0.0.9:1"), AGENT[1:])).__enter__()


# -- without Ray ---------------------------------------------------------------------------------


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FleetConfigError, match=r"pip install 'optuna-fleet\[ray\]'"):
        RayCluster()


def test_numbers_are_checked() -> None:
    with pytest.raises(FleetConfigError, match="num_nodes"):
        RayCluster(num_nodes=0)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RayEngine]:
    monkeypatch.setattr(ray_adapter, "ray_module", lambda: None)

    def engine_of(*, on_gpus: bool, **options: int) -> RayEngine:
        engine = RayEngine(RayCluster(**options), AGENT[1:])
        engine._on_gpus = on_gpus
        return engine

    return engine_of


def test_an_actor_reserves_what_there_is_or_was_asked_for(engine: Any) -> None:
    full, asked = {"CPU": 16.0, "GPU": 4.0}, {"cpus_per_node": 2, "gpus_per_node": 3}
    for options, on_gpus, node, share in (
        ({}, True, full, (0, 4)),
        ({}, False, full, (16, 0)),
        ({}, True, {}, (0, 1)),
        ({}, False, {}, (1, 0)),
        (asked, True, full, (2, 3)),
        (asked, False, {}, (2, 0)),
    ):
        assert engine(on_gpus=on_gpus, **options)._share(node) == share


def test_a_node_with_less_than_was_asked_for_is_not_used(engine: Any) -> None:
    asked = engine(on_gpus=True, cpus_per_node=2, gpus_per_node=2)
    nodes = [{"CPU": 16.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 2.0}, {"CPU": 2.0}, {}]
    assert not any(asked._fits({"Resources": node}) for node in nodes)
    assert asked._fits({"Resources": {"CPU": 2.0, "GPU": 2.0}})
