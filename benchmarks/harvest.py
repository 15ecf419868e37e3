"""A recorded piece of nodes that come and go, lived through by the executor and by its replay.

python benchmarks/harvest.py TRACE.npz JOBS.json                 # 24 nodes, 2 h: 2 x 4 minutes
python benchmarks/harvest.py TRACE.npz JOBS.json --compression 60 --nodes 8 --hours 0.33

Agents are real, one CPU slot each: they start as nodes of the trace fall idle, are told when these
are taken, and killed a moment later. Only training is emulated: a step on m nodes sleeps as long
as it takes by the recorded rates. The replay has the same piece, jobs and policy; its moves, joins
and decisions take what the executor was measured to take.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch

from optuna_fleet import Checkpoints, FleetExecutor, SharedPipeline
from optuna_fleet.alloc import ElasticAllocator, EqualSplitAllocator
from optuna_fleet.executor.call.summary import FleetSummary
from optuna_fleet.executor.call.waits import GATHER_S
from optuna_fleet.executor.cluster.agent.main import run_agent
from optuna_fleet.executor.cluster.config import AgentOptions, modules_to_preload
from optuna_fleet.executor.cluster.engine import Departure, Engine, Inbox
from optuna_fleet.policies import Own
from optuna_fleet.processes import die_with, preload
from optuna_fleet.replay.jobs import load_jobs
from optuna_fleet.replay.progress import Progress
from optuna_fleet.replay.report import utilisation
from optuna_fleet.replay.simulation import Simulation
from optuna_fleet.replay.trace import NodeTrace, load_trace
from optuna_fleet.replay.workload import FleetChange, Rules, SimulatedTrial
from optuna_fleet.sampler_bridge.records import device_spans_of, flights_of
from optuna_fleet.wire.invitation import Invitation

BATCH = 16
STEP_S = 0.5  # on one node; long, or 24 processes do not share two cores
FORWARD_LOOKING_S = 120.0  # of the trace
CHECKPOINT_S = 60.0  # of the trace
GRACE_S = 2.0  # from a node's notice to its kill
PROFILED_STEPS = 12  # 6 to 24, by their length
RESCALE_S = 0.2  # until it is measured
PROBLEMS = {"elastic": ElasticAllocator, "equal-split": EqualSplitAllocator}


def piece_of(
    trace: NodeTrace, *, begin_s: float, length_s: float, num_nodes: int, compression: float
) -> NodeTrace:
    """The nodes that come and go most often for that long, in compressed time."""
    inside = (trace.time_s >= begin_s) & (trace.time_s < begin_s + length_s)
    rows = np.flatnonzero(inside[trace.event])
    changes = np.bincount(trace.node[rows], minlength=len(trace.names))
    chosen = np.sort(np.argsort(-changes, kind="stable")[:num_nodes])
    rows = rows[np.isin(trace.node[rows], chosen)]
    idle = trace.initial_idle.astype(np.int64)
    earlier = trace.time_s[trace.event] < begin_s
    np.add.at(idle, trace.node[earlier], trace.delta[earlier])
    events, event = np.unique(trace.event[rows], return_inverse=True)
    moments = (trace.time_s[events] - begin_s) / compression
    return NodeTrace(
        time_s=np.concatenate([[0.0], moments, [length_s / compression]]),
        initial_idle=idle[chosen] > 0,
        event=event + 1,
        node=np.searchsorted(chosen, trace.node[rows]),
        delta=trace.delta[rows],
        names=tuple(trace.names[node] for node in chosen),
    )


# -- nodes ------------------------------------------------------------------------------------


class Mould:
    """A process that has imported everything; forks agents and kills them, as the trace says."""

    def __init__(self, changes: Sequence[FleetChange]) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self._agents: dict[int, int] = {}
        self._process = fork.Process(target=self._main, args=(theirs, changes), daemon=True)
        self._process.start()
        theirs.close()

    def close(self) -> None:
        """Kill the agents, and end."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self._process.join()

    def _main(self, pipe: Any, changes: Sequence[FleetChange]) -> None:
        self.pipe.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        preload(("torch", *modules_to_preload()))
        with contextlib.suppress(EOFError, OSError):
            self._live(pipe, changes)
        for pid in self._agents.values():
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def _live(self, pipe: Any, changes: Sequence[FleetChange]) -> None:
        invitation = pipe.recv()
        first, *later = changes
        for node in first.joined:
            self._start(node, invitation, pipe)
        began, leaving = pipe.recv(), dict[int, float]()
        last = (later[-1].time_s + GRACE_S, "last", 0)
        for time_s, what, node in sorted([*_orders(later), last]):
            while (wait_s := began + time_s - time.time()) > 0:
                if pipe.poll(wait_s):
                    return
            if what == "last":
                if not self._agents:  # or trials that are under way could never end
                    self._start(node, invitation, pipe)
            elif what == "join":
                self._end(node, pipe)  # taken again before it had come back
                self._start(node, invitation, pipe)
            elif what == "notice":
                leaving[node] = by = time_s + GRACE_S
                pipe.send(Departure(node=str(node), cause="it is taken", by=began + by))
            elif leaving.get(node) == time_s:
                self._end(node, pipe)
        pipe.recv()  # the end

    def _end(self, node: int, pipe: Any) -> None:
        if pid := self._agents.pop(node, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pipe.send(Departure(node=str(node), cause="it was taken"))

    def _start(self, node: int, invitation: Invitation, pipe: Any) -> None:
        parent, pid = os.getpid(), os.fork()
        if pid:
            self._agents[node] = pid
            return
        try:
            pipe.close()
            die_with(parent)
            os.setsid()
            options = AgentOptions(
                invitation=invitation, node=str(node), devices=1, device_type="cpu", cores=1
            )
            run_agent(options)
        except (EOFError, OSError):
            pass  # the driver has ended
        finally:
            os._exit(0)


def _orders(changes: Iterable[FleetChange]) -> Iterator[tuple[float, str, int]]:
    """When which node does what; what comes at one moment is in alphabetical order."""
    gone = dict[int, float]()
    for change in changes:
        for node in change.left:
            gone[node] = change.time_s + GRACE_S
            yield change.time_s, "notice", node
            yield gone[node], "end", node
        for node in change.joined:  # one that was taken for a moment has its time all the same
            yield max(change.time_s, gone.get(node, 0.0)), "join", node


class HarvestEngine(Engine):
    """Hands on what the mould says: the trace gives what it gives, and nobody knows who comes."""

    host = "127.0.0.1"
    has_leases = False

    def __init__(self, mould: Mould) -> None:
        self._mould = mould
        self._thread: threading.Thread | None = None

    def open(self, invitation: Invitation, inbox: Inbox) -> None:
        """See `Engine`."""

        def hand_on() -> None:
            with contextlib.suppress(EOFError, OSError):  # it has ended
                while True:
                    inbox.put(self._mould.pipe.recv())

        self._mould.pipe.send(invitation)
        self._thread = threading.Thread(target=hand_on, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """See `Engine`."""
        if self._thread is not None:
            self._mould.close()
            self._thread.join()
            self._thread = None


# -- live -------------------------------------------------------------------------------------


class Pace:
    """Has each step last as long as it would, what the last one of the run was late taken off."""

    def __init__(self, ends: float) -> None:
        self._due = 0.0
        self._ends = ends
        self._run_id: int | None = None

    def keep(self, step_s: float, run_id: int) -> None:
        """Sleep for what is left of a step; what a move took is not made good."""
        if run_id != self._run_id:
            self._run_id, self._due = run_id, time.time()
        late_s = min(STEP_S, time.time() - self._due)
        self._due = min(self._ends, time.time() - late_s + step_s)
        time.sleep(max(0.0, self._due - time.time()))


def objective(trial: Any, spec: SimulatedTrial, log: Path, ends: float) -> float:
    """Trains next to nothing, and sleeps, up to the end of the trace; logs each step."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = trial.prepare(model, optimizer, max_devices=len(spec.rates))
    pace = Pace(ends)
    for _ in trial.epochs(1):
        for (x,) in trial.batches("train", batch_size=BATCH, movable=True):
            begun = time.time()
            model(x).square().mean().backward()
            optimizer.step()
            pace.keep(BATCH / spec.rates[trial.world_size - 1], trial._session.run.run_id)
            trial.state["steps"] = step = trial.state.get("steps", 0) + 1
            if trial.rank == 0:
                with log.open("a") as file:
                    print(trial.number, step, begun, time.time(), file=file)
    return 0.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a trial, as logged."""

    trial: int
    number: int
    begun: float
    done: float

    @classmethod
    def of(cls, line: str) -> Step:
        """A line of the log."""
        trial, number, begun, done = line.split()
        return cls(trial=int(trial), number=int(number), begun=float(begun), done=float(done))


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Of a trial that moved.

    Attributes:
        seconds: For how long its nodes did nothing that counts before they train, on average.
        num_before: How many it had.
        num_after: How many it has now.
    """

    seconds: float
    num_before: int
    num_after: int


def _pauses(
    steps: Sequence[Step],
    flights: dict[int, list[dict[str, Any]]],
    decided: Sequence[float],
    spec: SimulatedTrial,
) -> Iterator[Pause]:
    """The pauses of all moves.

    Args:
        steps: Those that count.
        flights: By trial.
        decided: When plans were made.
        spec: Of all trials.
    """
    left: dict[int, list[float]] = defaultdict(list)  # by device: when trials did
    for flight in itertools.chain(*flights.values()):
        for device in flight["devices"]:
            left[device].append(flight["end"])
    for number, flown in flights.items():
        own = [step for step in steps if step.trial == number]
        for before, after in itertools.pairwise(flown):
            ends = [step.done for step in own if before["start"] <= step.done <= before["end"]]
            later = [step.done for step in own if after["start"] <= step.begun <= after["end"]]
            if before["ending"] != "yielded" or not ends or not later:
                continue
            devices, start = after["devices"], after["start"]
            begins = min(later) - BATCH / spec.rates[len(devices) - 1]
            planned = max((time_s for time_s in decided if time_s <= start), default=start)
            idle_s = 0.0
            for device in devices:
                # Until a node that has just come has a trial, it joins.
                since = max((time_s for time_s in left[device] if time_s <= start), default=start)
                is_own = device in before["devices"]
                idle_s += begins - (max(ends) if is_own else max(since, planned))
            yield Pause(
                seconds=idle_s / len(devices),
                num_before=len(before["devices"]),
                num_after=len(devices),
            )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _mean_pause(pauses: Iterable[Pause]) -> float:
    """The mean over the nodes that trials then had: as many stood still in the replay."""
    weights = [(pause.num_after, pause.seconds) for pause in pauses]
    return sum(n * s for n, s in weights) / max(1, sum(n for n, _ in weights))


@dataclass(frozen=True, kw_only=True)
class Lived:
    """What a live run came to.

    Attributes:
        utilisation: U, of the steps that were done within the trace.
        decisions: Plans that moved something, within the trace.
        summary: Of the executor.
        pauses: Of the moves.
        waits: By node, and the moment when it came: for how long no trial had it, if one ever had
            before it was taken.
        repeated: Steps that were done more than once.
    """

    utilisation: float
    decisions: int
    summary: FleetSummary
    pauses: Sequence[Pause]
    waits: Mapping[tuple[int, float], float]
    repeated: int


@dataclass(frozen=True, kw_only=True)
class Harvest:
    """A piece of trace, and what to do on it.

    Attributes:
        piece: The nodes, in compressed time.
        spec: What all trials are.
        max_trials: At once.
        compression: Of the time.
    """

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

    def live(self, policy: str, mould: Mould) -> Lived:
        """Run the executor through it."""
        data = torch.utils.data.TensorDataset(torch.ones(int(self.spec.samples_per_epoch), 1))
        pipeline = SharedPipeline(train=data, num_preprocessors=1)
        with (
            tempfile.TemporaryDirectory() as folder,
            FleetExecutor(
                pipeline,
                policy=self.policy(policy),
                cluster=HarvestEngine(mould),
                checkpoints=Checkpoints(interval_s=CHECKPOINT_S / self.compression),
                max_trials=self.max_trials,
            ) as fleet,
        ):
            first = int(self.piece.initial_idle.sum())
            warm_up = optuna.create_study()
            warm_up.optimize(lambda trial: time.sleep(0.5) or 0.0, 2 * first, executor=fleet)
            log, began = Path(folder) / "steps", time.time()
            log.touch()
            mould.pipe.send(began)
            ends = began + self.piece.end_s
            study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
            train = partial(objective, spec=self.spec, log=log, ends=ends)
            study.optimize(train, timeout=self.piece.end_s, executor=fleet)
            assert fleet.summary is not None
            return self._lived(log, (began, ends), fleet.summary, study)

    def _lived(
        self, log: Path, times: tuple[float, float], summary: FleetSummary, study: optuna.Study
    ) -> Lived:
        began, ends = times
        spans = device_spans_of(study)
        flights = flights_of(study)
        steps = [Step.of(line) for line in log.read_text().splitlines()]
        counted = self._counted(steps, flights, {span.device: span.node for span in spans}, began)
        decided = [decision.time for decision in summary.decisions]
        done: dict[int, set[int]] = defaultdict(set)
        for step in counted:
            done[step.trial].add(step.number)
        samples = [Progress(trial=self.spec, samples=BATCH * len(s)) for s in done.values()]
        return Lived(
            utilisation=self.utilisation(samples),
            decisions=sum(began <= time_s <= ends for time_s in decided),
            summary=summary,
            pauses=list(_pauses(counted, flights, decided, self.spec)),
            waits=dict(self._waits(flights, {span.device: span.node for span in spans}, began)),
            repeated=len(counted) - sum(map(len, done.values())),
        )

    def _counted(
        self,
        steps: Sequence[Step],
        flights: dict[int, list[dict[str, Any]]],
        node_of: dict[int, str],
        began: float,
    ) -> list[Step]:
        """Those steps whose nodes were idle up to their ends: what is done in a notice is not."""
        taken: dict[str, list[float]] = defaultdict(list)
        for change in self.piece.changes():
            for node in change.left:
                taken[str(node)].append(began + change.time_s)
        ends, counted = began + self.piece.end_s + STEP_S / 100, []
        for step in steps:
            flight = next(f for f in flights[step.trial] if f["start"] <= step.done <= f["end"])
            moments = (m for d in flight["devices"] for m in taken[node_of[d]])
            is_late = any(flight["start"] < moment < step.done for moment in moments)
            if step.done <= ends and not is_late:
                counted.append(step)
        return counted

    def _waits(
        self, flights: dict[int, list[dict[str, Any]]], node_of: dict[int, str], began: float
    ) -> Iterator[tuple[tuple[int, float], float]]:
        """How long after its moment in the trace each node had a trial, or those of its moment."""
        begins: dict[str, list[float]] = defaultdict(list)
        for flight in itertools.chain(*flights.values()):
            for device in flight["devices"]:
                begins[node_of[device]].append(flight["start"] - began)
        taken: dict[int, float] = {}
        for change in reversed(list(self.piece.changes())[1:]):
            firsts: dict[int, float] = {}
            for node in change.joined:
                stay = change.time_s, taken.get(node, self.piece.end_s)
                if inside := [s for s in begins[str(node)] if stay[0] <= s <= stay[1]]:
                    firsts[node] = min(inside)
            for node in firsts:  # what comes at one moment is planned for at one
                yield (node, change.time_s), _mean(list(firsts.values())) - change.time_s
            taken.update(dict.fromkeys(change.left, change.time_s))

    def utilisation(self, trials: Sequence[Progress]) -> float:
        """U, as BFTrainer defines it."""
        end_s = self.piece.end_s
        return utilisation(trials, self.piece.mean_nodes(end_s), self.max_trials, end_s)

    def replayed(self, policy: str, lived: Lived) -> tuple[float, int]:
        """U and decisions of the replay, with what was measured live."""
        named = self.policy(policy)
        costs = {
            "rescale_up_s": _mean_pause(p for p in lived.pauses if p.num_after >= p.num_before),
            "rescale_down_s": _mean_pause(p for p in lived.pauses if p.num_after < p.num_before),
        }
        rules = Rules(
            profile_samples=PROFILED_STEPS * BATCH,
            decision_s=_mean([d.solve_time_s for d in lived.summary.decisions]),
        )
        simulation = Simulation(
            self.piece.fleet(),
            [replace(self.spec, **costs)] * 10_000,
            named.rules(max_trials=self.max_trials),
            named.allocator,
            {},
            rules,
        )
        outcome = simulation.run(self._late(lived.waits), self.piece.end_s)
        rounds = max((span.round for span in outcome.totals.spans), default=0)
        return self.utilisation(list(outcome.trials.values())), rounds

    def _late(self, waits: Mapping[tuple[int, float], float]) -> Iterator[FleetChange]:
        """The trace as it is when nodes take their time to join."""
        first, *later = self.piece.changes()
        comes = {
            (node, change.time_s): change.time_s + waits.get((node, change.time_s), math.inf)
            for change in later
            for node in change.joined
        }
        together = -math.inf  # as the executor plans for them
        for key, there in sorted(comes.items(), key=itemgetter(1)):
            together = together if there < together + GATHER_S else there
            comes[key] = together
        changes, joined, due = [first], defaultdict[float, list[int]](list), dict[int, float]()
        for change in later:
            left = []
            for node in change.left:
                if (there := due.pop(node, 0.0)) <= change.time_s:
                    left.append(node)
                else:  # it was gone before it was there
                    joined[there].remove(node)
            for node in change.joined:
                due[node] = comes[node, change.time_s]
                joined[due[node]].append(node)
            changes.append(FleetChange(time_s=change.time_s, left=tuple(left)))
        changes += [FleetChange(time_s=t, joined=tuple(nodes)) for t, nodes in joined.items()]
        return iter(sorted(changes, key=lambda change: change.time_s))


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
    rates = load_jobs(options.jobs, "hpo")[0].rates[: options.widest]
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
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--begin", type=float, default=88.0, help="hours into the trace")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--compression", type=float, default=30.0)
    parser.add_argument("--max-trials", type=int, default=4)
    parser.add_argument("--widest", type=int, default=8, help="most nodes of a trial")
    parser.add_argument("--job-minutes", type=float, default=40.0, help="of a trial on one node")
    parser.add_argument("--policies", choices=PROBLEMS, nargs="+", default=list(PROBLEMS))
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    harvest = harvest_of(options)
    piece = harvest.piece
    changes = list(piece.changes())
    moulds = {policy: Mould(changes) for policy in options.policies}  # before there are threads
    joins, losses = ((piece.delta == sign).sum() for sign in (1, -1))
    print(
        f"{len(piece.names)} nodes, {piece.mean_nodes(piece.end_s):.1f} there on average, "
        f"{joins} joins, {losses} losses; {piece.end_s:.0f} s; load {os.getloadavg()[0]:.1f}\n",
        flush=True,
    )
    print(
        "| policy | U live | U replay | ratio | decisions | of replay | pause | join | repeated |"
    )
    print(f"{'|---' * 9}|", flush=True)
    for policy, mould in moulds.items():
        lived = harvest.live(policy, mould)
        u, decisions = harvest.replayed(policy, lived)
        print(
            f"| `{policy}` | {lived.utilisation:.1%} | {u:.1%} | {lived.utilisation / u:.3f} "
            f"| {lived.decisions} | {decisions} | {1e3 * _mean_pause(lived.pauses):.0f} ms "
            f"| {1e3 * _mean(list(lived.waits.values())):.0f} ms | {lived.repeated} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
