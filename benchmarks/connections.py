"""What the control channels of a large fleet, in TLS, cost the driver.

python benchmarks/connections.py                     # 646 connections, about a minute
python benchmarks/connections.py --nodes 6 --seconds 5

One process plays the nodes: on each an agent (a sign of life every second, and one of the
driver's to it) and 16 trainers, each with a trial, that give signs of life as often as the driver
wants them. The driver is all of it, with a study of as many trials. It is CPU time that counts.
"""

from __future__ import annotations

import argparse
import heapq
import os
import resource
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import optuna

from optuna_fleet import FleetExecutor, JoinCluster
from optuna_fleet.executor.cluster.config import NodeSetup, versions
from optuna_fleet.resources import Device
from optuna_fleet.wire.channel import Channel, connect
from optuna_fleet.wire.invitation import Invitation
from optuna_fleet.wire.messages import Heartbeat, Progress, RunTrial, TrainerReady
from optuna_fleet.wire.node_messages import (
    SIGN_EVERY_S,
    AgentJoining,
    KeepObjective,
    ObjectiveKept,
    ProcessId,
    SignOfLife,
    TrainerStarted,
)

TRAINERS = 16  # of each node
AT_ONCE = 16
SETTLE_S = 5.0
WHERE = "in objective (/home/user/project/train.py:123), within backward"


# -- nodes ------------------------------------------------------------------------------------


@dataclass
class Peer:
    """An agent, or a trainer with its run."""

    channel: Channel
    agent: str
    run: RunTrial | None = None

    def heartbeat(self) -> Heartbeat:
        """Its sign of life."""
        run = self.run
        assert run is not None
        collectives = ((1000, "gradients"),) if run.world_size > 1 else ()
        return Heartbeat(
            run_id=run.run_id,
            rank=run.rank,
            progress=Progress(num_batches=1000, num_calls=100, collectives=collectives),
            is_waiting=False,
            where=WHERE,
            memory_bytes=1 << 30,
        )


@dataclass
class Nodes:
    """Plays them all, until it is killed; says so when each trainer has a trial."""

    invitation: Invitation
    number: int
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    due: list[tuple[float, int, float, Peer]] = field(default_factory=list)
    num_flying: int = 0

    def play(self) -> None:
        """Join, and do as the driver says."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for node, channel in enumerate(pool.map(connect, [self.invitation] * self.number)):
                self._join(node, channel)
        threading.Thread(target=self._give_signs, daemon=True).start()
        while True:
            wait_s = self.due[0][0] - time.time() if self.due else None
            for key, _ in self.selector.select(wait_s if wait_s is None else max(0.0, wait_s)):
                self._hear(key.data)
            while self.due and self.due[0][0] <= time.time():
                _, number, every_s, peer = heapq.heappop(self.due)
                peer.channel.post(peer.heartbeat())
                self._beat(number, every_s, peer)

    def _give_signs(self) -> None:
        """Those of the agents: the others have time until all have joined."""
        agents = [key.data for key in self.selector.get_map().values()]
        while True:
            time.sleep(SIGN_EVERY_S - time.time() % SIGN_EVERY_S)
            for agent in agents:
                agent.channel.post(SignOfLife())

    def _beat(self, number: int, every_s: float, peer: Peer) -> None:
        """All at full intervals of the clock, as they do it."""
        at = time.time() // every_s * every_s + every_s
        heapq.heappush(self.due, (at, number, every_s, peer))

    def _join(self, node: int, channel: Channel) -> None:
        devices = tuple(Device(index=index, node=0, kind="cpu") for index in range(TRAINERS))
        joining = AgentJoining(
            agent=f"agent-{node}",
            node=f"node-{node}",
            devices=devices,
            cores=64,
            machine="another",
            pid=1,
            versions=versions(),
        )
        channel.send(joining)
        self.selector.register(channel, selectors.EVENT_READ, Peer(channel, joining.agent))

    def _hear(self, peer: Peer) -> None:
        while peer.channel.has_message():
            match peer.channel.receive():
                case NodeSetup() as setup:
                    for device in setup.devices:
                        self._start_trainer(peer, device.index)
                case KeepObjective() as kept:
                    answer = ObjectiveKept(
                        agent=peer.agent, objective_id=kept.objective_id, path="nowhere"
                    )
                    peer.channel.send(answer)
                case RunTrial() as run:
                    peer.run = run
                    assert run.heartbeat_s is not None
                    self._beat(run.run_id, run.heartbeat_s, peer)
                    self.num_flying += 1
                    if self.num_flying == self.number * TRAINERS:
                        print("all", flush=True)

    def _start_trainer(self, agent: Peer, device: int) -> None:
        process = ProcessId(agent.agent, 1000 + device)
        agent.channel.send(TrainerStarted(device=device, process=process))
        channel = connect(self.invitation)
        channel.send(TrainerReady(device=device, process=process))
        self.selector.register(channel, selectors.EVENT_READ, Peer(channel, agent.agent))


# -- the driver -------------------------------------------------------------------------------


def measure(file: Path, nodes: int, seconds: float) -> None:
    """Have all trainers given a trial, measure this process, and end it."""
    while not file.exists():
        time.sleep(0.1)
    began, began_cpu = time.monotonic(), time.process_time()
    command = [sys.executable, __file__, "--nodes", str(nodes), "--play", str(file)]
    played = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert played.stdout is not None
    played.stdout.readline()
    there_s, there_cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    print(f"All have a trial after {there_s:.1f} s, of {there_cpu_s:.1f} s of CPU.", flush=True)
    time.sleep(SETTLE_S)
    began, began_cpu = time.monotonic(), time.process_time()
    time.sleep(seconds)
    share = (time.process_time() - began_cpu) / (time.monotonic() - began)
    print(f"The driver takes {100 * share:.2f} % of a core.", flush=True)
    played.kill()
    os._exit(0)


def main() -> None:
    """Drive a sweep whose trials never end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=38)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.play:
        Nodes(Invitation.read(options.play), options.nodes).play()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "join"
        watch = [file, options.nodes, options.seconds]
        with FleetExecutor(cluster=JoinCluster(file=file, host="127.0.0.1")) as fleet:
            threading.Thread(target=measure, args=watch, daemon=True).start()
            study = optuna.create_study(sampler=optuna.samplers.RandomSampler())
            study.optimize(lambda trial: 0.0, n_trials=options.nodes * TRAINERS, executor=fleet)


if __name__ == "__main__":
    main()
