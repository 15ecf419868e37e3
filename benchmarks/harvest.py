"""A recorded piece of nodes that come and go, lived through by the executor and by its replay.

python benchmarks/harvest.py TRACE.npz                           # 24 nodes, 2 h: 2 x 4 minutes
python benchmarks/harvest.py TRACE.npz --compression 60 --nodes 8 --hours 0.33

Agents are real, one CPU slot each: they start as nodes of the trace fall idle, are told when these
are taken, and killed a moment later. Only training is emulated: a step on m nodes sleeps as long
as it takes by BFTrainer's rates. The replay has the same piece, jobs and policy; its moves, joins
and decisions take what the executor took on average.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import torch

sys.path.insert(0, str(Path(__file__).parent))
from emulated import Pace

from optuna_fleet import Checkpoints, FleetExecutor, SharedPipeline
from optuna_fleet.alloc import ElasticAllocator, EqualSplitAllocator
from optuna_fleet.executor.cluster.agent.entry import run_agent
from optuna_fleet.executor.cluster.config import AgentOptions, modules_to_preload
from optuna_fleet.executor.cluster.engine import Departure, Engine
from optuna_fleet.policies import Own
from optuna_fleet.replay.progress import Progress
from optuna_fleet.replay.scenarios import utilisation
from optuna_fleet.replay.simulation import Simulation
from optuna_fleet.replay.trace import NodeTrace, load_trace
from optuna_fleet.replay.workload import FleetChange, Rules, SimulatedTrial, bftrainer_trials
from optuna_fleet.sampler_bridge.records import device_spans_of, flights_of
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.invitation import Invitation

BATCH = 16
STEP_S = 0.5  # on one node; long, or 24 processes do not share two cores
FORWARD_LOOKING_S = 120.0  # of the trace
CHECKPOINT_S = 60.0  # of the trace
GRACE_S = 2.0  # from a node's notice to its kill
PROFILED_STEPS = 12  # 6 to 24, by their length
RESCALE_S = 0.2  # until it is measured
POLICIES = ("elastic", "equal-split")
AGENTS = multiprocessing.get_context("forkserver")


def piece_of(
    trace: NodeTrace, *, begin_s: float, length_s: float, num_nodes: int, compression: float
) -> NodeTrace:
    """The nodes that come and go most often for that long, in compressed time."""
    first, *later = trace.changes
    inside = [c for c in later if begin_s <= c.time_s < begin_s + length_s]
    moves = Counter(node for c in inside for node in (*c.joined, *c.left))
    chosen = sorted(sorted(range(len(trace.names)), key=lambda n: -moves[n])[:num_nodes])
    place = {node: k for k, node in enumerate(chosen)}
    earlier = (first, *(c for c in later if c.time_s < begin_s))

    def of_chosen(time_s: float, joined: Iterable[int], left: Iterable[int]) -> FleetChange:
        joined, left = (tuple(place[n] for n in few if n in place) for few in (joined, left))
        return FleetChange(time_s=time_s / compression, joined=joined, left=left)

    changes = [
        of_chosen(0.0, sorted(replace(trace, changes=earlier).idle_at_end()), ()),
        *(of_chosen(c.time_s - begin_s, c.joined, c.left) for c in inside),
        of_chosen(length_s, (), ()),
    ]
    return NodeTrace(
        names=tuple(trace.names[node] for node in chosen),
        changes=tuple(c for c in changes if c in (changes[0], changes[-1]) or c.joined or c.left),
    )


# -- live -------------------------------------------------------------------------------------


class HarvestEngine(Engine):
    """Starts agents and kills them as the trace says, from `began` on."""

    host = "127.0.0.1"
    has_leases = False

    def __init__(self, changes: Sequence[FleetChange]) -> None:
        self._first, *self._later = changes
        self._agents: dict[int, Any] = {}
        self._begins, self._closes = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.began = 0.0

    def open(self, invitation: Invitation, inbox: Inbox) -> None:
        """See `Engine`."""
        self._thread = threading.Thread(target=self._live, args=(invitation, inbox), daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """The trace begins now."""
        self.began = time.time()
        self._begins.set()

    def close(self) -> None:
        """See `Engine`."""
        self._closes.set()
        self._begins.set()
        if self._thread is not None:
            self._thread.join()
        for agent in self._agents.values():
            agent.kill()

    def _live(self, invitation: Invitation, inbox: Inbox) -> None:
        for node in self._first.joined:
            self._start(node, invitation)
        self._begins.wait()
        leaving = dict[int, float]()
        for time_s, what, node in sorted(_orders(self._later)):
            if self._closes.wait(max(0.0, self.began + time_s - time.time())):
                return
            if what == "notice":
                leaving[node] = time_s + GRACE_S
                by = self.began + leaving[node]
                inbox.put(Departure(node=str(node), cause="it is taken", by=by))
            elif what == "join" or leaving.get(node) == time_s:
                self._end(node, inbox)  # or it is taken again before it had come back
            if what == "join":
                self._start(node, invitation)
        if not self._agents:  # or trials that are under way could never end
            self._start(0, invitation)

    def _end(self, node: int, inbox: Inbox) -> None:
        if agent := self._agents.pop(node, None):
            agent.kill()
            agent.join()
            inbox.put(Departure(node=str(node), cause="it was taken"))

    def _start(self, node: int, invitation: Invitation) -> None:
        options = AgentOptions(
            invitation=invitation, node=str(node), devices=1, device_type="cpu", cores=1
        )
        self._agents[node] = AGENTS.Process(target=_agent, args=(options,))
        self._agents[node].start()


def _orders(changes: Sequence[FleetChange]) -> Iterator[tuple[float, str, int]]:
    """When which node does what; what comes at one moment is in alphabetical order."""
    gone = dict[int, float]()
    for change in changes:
        for node in change.left:
            gone[node] = change.time_s + GRACE_S
            yield change.time_s, "notice", node
            yield gone[node], "end", node
        for node in change.joined:  # one that was taken for a moment has its time all the same
            yield max(change.time_s, gone.get(node, 0.0)), "join", node


def _agent(options: AgentOptions) -> None:
    os.setsid()
    try:
        run_agent(options)
    except (EOFError, OSError):
        pass  # the driver has ended
    finally:
        os._exit(0)


def objective(trial: Any, spec: SimulatedTrial, log: Path) -> float:
    """Trains next to nothing, and sleeps; logs each step."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = trial.prepare(model, optimizer, max_devices=len(spec.rates))
    pace = Pace(late_s=STEP_S)
    for _ in trial.epochs(1):
        for (x,) in trial.batches("train", batch_size=BATCH, movable=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            pace.keep(BATCH / spec.rates[trial.world_size - 1])
            trial.state["steps"] = step = trial.state.get("steps", 0) + 1
            if trial.rank == 0:
                with log.open("a") as file:
                    print(trial.number, step, time.time(), file=file)
    return 0.0


@dataclass(frozen=True, kw_only=True)
class Lived:
    """What a live run came to: `join_s` and `decision_s` are means, `repeated` counts steps."""

    utilisation: float
    decisions: int
    move_s: float
    join_s: float
    decision_s: float
    repeated: int


@dataclass(frozen=True, kw_only=True)
class Harvest:
    """A piece of trace in compressed time, and what to do on it."""

    piece: NodeTrace
    spec: SimulatedTrial
    max_trials: int
    compression: float

    def policy(self, name: str) -> Own:
        """Decides at each event, also within epochs."""
        allocator: Any = EqualSplitAllocator()
        if name == "elastic":
            allocator = ElasticAllocator(
                objective="throughput", forward_looking_s=FORWARD_LOOKING_S / self.compression
            )
        return Own(
            allocator=allocator,
            paradigm="elastic",
            moves_within_epochs=True,
            rescale_s=RESCALE_S,
        )

    def live(self, policy: str) -> Lived:
        """Run the executor through it."""
        data = torch.utils.data.TensorDataset(torch.ones(int(self.spec.samples_per_epoch), 1))
        engine = HarvestEngine(self.piece.changes)
        with (
            tempfile.TemporaryDirectory() as folder,
            FleetExecutor(
                SharedPipeline(train=data, num_preprocessors=1),
                policy=self.policy(policy),
                cluster=engine,
                checkpoints=Checkpoints(interval_s=CHECKPOINT_S / self.compression),
                max_trials=self.max_trials,
            ) as fleet,
        ):
            first = len(self.piece.changes[0].joined)
            warm_up = optuna.create_study()
            warm_up.optimize(lambda trial: time.sleep(0.5) or 0.0, 2 * first, executor=fleet)
            log = Path(folder) / "steps"
            log.touch()
            engine.begin()
            study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
            train = partial(objective, spec=self.spec, log=log)
            study.optimize(train, timeout=self.piece.end_s, executor=fleet)
            assert fleet.summary is not None
            steps = list(self._counted(log.read_text(), study, engine.began))
            samples = [
                Progress(trial=self.spec, samples=BATCH * len({s for t, s in steps if t == trial}))
                for trial in {trial for trial, _ in steps}
            ]
            decisions = fleet.summary.decisions
            return Lived(
                utilisation=self.utilisation(samples),
                decisions=sum(d.time <= engine.began + self.piece.end_s for d in decisions),
                move_s=fleet.summary.move_s,
                join_s=statistics.fmean(self._joins_s(study, engine.began) or [0.0]),
                decision_s=statistics.fmean([d.solve_time_s for d in decisions] or [0.0]),
                repeated=len(steps) - len(set(steps)),
            )

    def _counted(self, log: str, study: optuna.Study, began: float) -> Iterator[tuple[int, int]]:
        """Steps (of a trial) whose nodes were idle up to their ends: not those in a notice."""
        node_of = {span.device: span.node for span in device_spans_of(study)}
        taken = [(began + ended_s, str(node)) for node, _, ended_s in self._stays()]
        flights = flights_of(study)
        for number, step, done in (line.split() for line in log.splitlines()):
            if (done_at := float(done)) > began + self.piece.end_s + STEP_S / 100:
                continue
            own = flights[int(number)]
            flight = next(f for f in own if f["start"] <= done_at <= f["end"])
            nodes = {node_of[device] for device in flight["devices"]}
            if not any(flight["start"] < at < done_at and node in nodes for at, node in taken):
                yield int(number), int(step)

    def _joins_s(self, study: optuna.Study, began: float) -> list[float]:
        """How long after their moments in the trace nodes were there."""
        stays = [(str(node), began + begun_s) for node, begun_s, _ in self._stays() if begun_s]
        return [
            span.start - max(before)
            for span in device_spans_of(study)
            if (before := [at for node, at in stays if node == span.node and at <= span.start])
        ]

    def utilisation(self, trials: Sequence[Progress]) -> float:
        """U, as BFTrainer defines it."""
        end_s = self.piece.end_s
        return utilisation(trials, self.piece.mean_nodes(end_s), self.max_trials, end_s)

    def replayed(self, policy: str, lived: Lived) -> tuple[float, int]:
        """U and decisions of the replay, with what was measured live."""
        named = self.policy(policy)
        spec = replace(self.spec, rescale_up_s=lived.move_s, rescale_down_s=lived.move_s)
        rules = Rules(profile_samples=PROFILED_STEPS * BATCH, decision_s=lived.decision_s)
        simulation = Simulation(
            self.piece.fleet(),
            [spec] * 10_000,
            named.rules(max_trials=self.max_trials),
            named.allocator,
            {},
            rules,
        )
        outcome = simulation.run(iter(self._late(lived.join_s)), self.piece.end_s)
        rounds = max((span.round for span in outcome.spans), default=0)
        return self.utilisation(list(outcome.trials.values())), rounds

    def _late(self, join_s: float) -> list[FleetChange]:
        """The trace as it is when nodes take their time to join; some are gone before."""
        joined, left = defaultdict[float, list[int]](list), defaultdict[float, list[int]](list)
        for node, begun_s, ended_s in self._stays():
            there_s = begun_s + join_s if begun_s else 0.0
            if there_s < ended_s:
                joined[there_s].append(node)
                left[ended_s].append(node)
        return [
            FleetChange(time_s=time_s, joined=tuple(joined[time_s]), left=tuple(left[time_s]))
            for time_s in sorted({*joined, *left} - {math.inf})
        ]

    def _stays(self) -> Iterator[tuple[int, float, float]]:
        """Which node is idle in the trace, from when, until when."""
        since: dict[int, float] = {}
        for change in self.piece.changes:
            for node in change.left:
                yield node, since.pop(node), change.time_s
            since |= dict.fromkeys(change.joined, change.time_s)
        yield from ((node, begun_s, math.inf) for node, begun_s in since.items())


# -- command line -----------------------------------------------------------------------------


def harvest_of(options: argparse.Namespace) -> Harvest:
    """What the options ask for."""
    piece = piece_of(
        load_trace(options.trace),
        begin_s=3600 * options.begin,
        length_s=3600 * options.hours,
        num_nodes=options.nodes,
        compression=options.compression,
    )
    rates = bftrainer_trials(("ShuffleNet",), 1)[0].rates[: options.widest]
    steps = max(1, round(60 * options.job_minutes / options.compression / STEP_S))
    spec = SimulatedTrial(
        name="job",
        rates=tuple(BATCH / STEP_S * rate / rates[0] for rate in rates),
        epochs=1,
        samples_per_epoch=float(steps * BATCH),
        max_epochs=1,
    )
    return Harvest(
        piece=piece, spec=spec, max_trials=options.max_trials, compression=options.compression
    )


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--begin", type=float, default=88.0, help="hours into the trace")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--compression", type=float, default=30.0)
    parser.add_argument("--max-trials", type=int, default=4)
    parser.add_argument("--widest", type=int, default=8, help="most nodes of a trial")
    parser.add_argument("--job-minutes", type=float, default=40.0, help="of a trial on one node")
    parser.add_argument("--policies", choices=POLICIES, nargs="+", default=list(POLICIES))
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    agent = "optuna_fleet.executor.cluster.agent.entry"
    AGENTS.set_forkserver_preload(["__main__", agent, *modules_to_preload()])
    harvest = harvest_of(options)
    piece = harvest.piece
    joins = sum(len(change.joined) for change in piece.changes[1:])
    losses = sum(len(change.left) for change in piece.changes)
    print(
        f"{len(piece.names)} nodes, {piece.mean_nodes(piece.end_s):.1f} there on average, "
        f"{joins} joins, {losses} losses; {piece.end_s:.0f} s; load {os.getloadavg()[0]:.1f}\n\n"
        "| policy | U live | U replay | ratio | decisions | of replay | move | join | repeated |\n"
        f"{'|---' * 9}|",
        flush=True,
    )
    for policy in options.policies:
        lived = harvest.live(policy)
        u, decisions = harvest.replayed(policy, lived)
        print(
            f"| `{policy}` | {lived.utilisation:.1%} | {u:.1%} | {lived.utilisation / u:.3f} "
            f"| {lived.decisions} | {decisions} | {1e3 * lived.move_s:.0f} ms "
            f"| {1e3 * lived.join_s:.0f} ms | {lived.repeated} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
