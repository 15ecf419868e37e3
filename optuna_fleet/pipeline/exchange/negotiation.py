"""How the nodes agree on a plan: all report to node 0 what they measured, and it tells them."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from mmap import mmap

from optuna_fleet.pipeline.exchange.bandwidth import Bandwidth
from optuna_fleet.pipeline.exchange.config import SCHEMES, ExchangeConfig
from optuna_fleet.pipeline.exchange.cost import Measured, choose
from optuna_fleet.pipeline.exchange.frames import Frame, Kind
from optuna_fleet.pipeline.exchange.link import NUM_ECHOED, Answer
from optuna_fleet.pipeline.exchange.messages import PlanChosen, RateMeasured
from optuna_fleet.pipeline.exchange.peer import Peer
from optuna_fleet.pipeline.exchange.scheme import Plan

_NUM_PINGS = 5
_PROBE_BYTES = 4 << 20
_NUM_PROBES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one node measured; ``bytes_per_s`` is 0 if it had nobody to measure with."""

    samples_per_s: float
    sample_bytes: float
    chunk_samples: int
    bytes_per_s: float
    latency_s: float


class PlanNegotiation:
    """One node's part in it; does nothing but keep the plan if the scheme is forced.

    Args:
        config: The exchange.
        bandwidth: Measures what this node receives.
        chosen: Told the plan that was chosen, once.

    Attributes:
        plan: What is agreed on so far.
    """

    def __init__(
        self, config: ExchangeConfig, bandwidth: Bandwidth, chosen: Callable[[PlanChosen], None]
    ) -> None:
        self.plan = config.first_plan()
        self._config = config
        self._bandwidth = bandwidth
        self._chosen = chosen
        self._lock = threading.Lock()
        self._decided = threading.Event()
        self._rate: RateMeasured | None = None
        self._latency_s = 0.0
        self._peers: Mapping[int, Peer] | None = None
        self._reports: dict[int, Report] = {}

    def probe(self, peer: Peer) -> None:
        """Measures latency and bandwidth with a node that nobody else measures with."""
        if self._config.scheme != "auto":
            return
        times_s = []
        with peer.planning:
            for nbytes in [0] * _NUM_PINGS + [_PROBE_BYTES] * _NUM_PROBES:
                begin = time.perf_counter()
                request = Frame(kind=Kind.PROBE, numbers=(nbytes,))
                peer.link.call(peer.plan_lane, request, _discard)
                times_s.append(time.perf_counter() - begin)
        self._latency_s = statistics.median(times_s[:_NUM_PINGS])

    def begin(self, peers: Mapping[int, Peer]) -> None:
        """All have come who come; ``peers`` remains true."""
        self._peers = peers
        self._report()

    def measured(self, rate: RateMeasured) -> None:
        """The agent measured the decode rate of this node."""
        self._rate = rate
        self._report()

    def lost(self) -> None:
        """A node is not waited for any more."""
        self._decide()

    def answer(self, request: Frame) -> Answer:
        """Takes another node's report; answers once the plan is chosen."""
        node, milli, sample_bytes, chunk_samples, bytes_per_s, nanos = request.numbers[:6]
        self._take(
            node,
            Report(
                samples_per_s=milli / 1e3,
                sample_bytes=sample_bytes,
                chunk_samples=chunk_samples,
                bytes_per_s=bytes_per_s,
                latency_s=nanos / 1e9,
            ),
        )
        self._decided.wait()
        return Answer(numbers=(SCHEMES.index(self.plan.scheme), self.plan.num_preprocessor_nodes))

    def _report(self) -> None:
        with self._lock:
            rate, peers = self._rate, self._peers
            if rate is None or peers is None or self._config.scheme != "auto":
                return
            self._rate = None  # once
        report = Report(
            samples_per_s=rate.samples_per_s,
            sample_bytes=rate.sample_bytes,
            chunk_samples=rate.chunk_samples,
            bytes_per_s=self._bandwidth.bytes_per_s() or 0.0,
            latency_s=self._latency_s,
        )
        if self._config.node == 0:
            self._take(0, report)
        elif leader := peers.get(0):
            leader.start(lambda: self._ask(leader, report))

    def _ask(self, leader: Peer, report: Report) -> None:
        numbers = (
            self._config.node,
            round(report.samples_per_s * 1e3),
            round(report.sample_bytes),
            report.chunk_samples,
            round(report.bytes_per_s),
            round(report.latency_s * 1e9),
        )
        request = Frame(kind=Kind.PLAN, numbers=numbers)
        with leader.planning:
            answer, _ = leader.link.call(leader.plan_lane, request)
        scheme, p = answer.numbers[NUM_ECHOED : NUM_ECHOED + 2]
        plan = Plan(
            scheme=SCHEMES[scheme],
            num_nodes=self._config.num_nodes,
            num_preprocessor_nodes=p,
            version=1,
        )
        self._agree(plan, "node 0 chose it")

    def _take(self, node: int, report: Report) -> None:
        with self._lock:
            self._reports[node] = report
        self._decide()

    def _decide(self) -> None:
        with self._lock:
            if self._peers is None or self._decided.is_set():
                return
            if not self._reports.keys() >= {0, *self._peers}:
                return
            measured = summary(self._reports.values(), self._config)
            if measured is None:
                return
            choice = choose(measured)
            self._agree(choice.plan, choice.reason)
            self._decided.set()

    def _agree(self, plan: Plan, reason: str) -> None:
        self.plan = plan
        self._chosen(PlanChosen(plan=plan, reason=reason))


def _discard(nbytes: int, fill: Callable[[mmap], None]) -> int:
    fill(mmap(-1, nbytes))
    return 0


def echo(request: Frame) -> Answer:
    """Answers a probe with as many bytes as it asks for."""
    nbytes = min(request.numbers[0], _PROBE_BYTES)
    return Answer(body=mmap(-1, nbytes) if nbytes else None)


def summary(reports: Collection[Report], config: ExchangeConfig) -> Measured | None:
    """Returns what to choose by; None if no node could measure the network."""
    speeds = [report.bytes_per_s for report in reports if report.bytes_per_s]
    if not speeds:
        return None
    rates = [report.samples_per_s for report in reports]
    # A node that is missing has no say; the others stand in for it.
    rates += [min(rates)] * (config.num_nodes - len(rates))
    return Measured(
        samples_per_s=tuple(rates),
        sample_bytes=max(report.sample_bytes for report in reports),
        chunk_samples=min(report.chunk_samples for report in reports),
        bytes_per_s=min(speeds),
        latency_s=max(report.latency_s for report in reports),
        num_lanes=config.num_lanes,
    )
