"""Another node as the exchanger sees it: threads that ask it, and threads that answer it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from optuna_fleet.exceptions import ProtocolError
from optuna_fleet.pipeline.exchange.frames import Frame
from optuna_fleet.pipeline.exchange.link import Answer, Link
from optuna_fleet.pipeline.exchange.messages import AskSize, FetchChunk


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """An order of the agent; compared by identity."""

    order: FetchChunk | AskSize
    deadline: float


class Peer:
    """The lanes of one link, each with a thread that asks and one that answers.

    Chunks travel on the first ``num_lanes`` lanes. Questions that may take long to answer have
    one each, so that none waits for another.

    Args:
        node: Its number.
        link: The connection.
        num_lanes: Lanes for chunks.
        lost: Told why the link can't be used any more; by each thread that uses it.

    Attributes:
        planning: Held by who asks on ``plan_lane``, where one thread may at a time.
        overdue: What the node owes an answer; while there is anything, it is not asked more.
    """

    def __init__(
        self, node: int, link: Link, *, num_lanes: int, lost: Callable[[Peer, str], None]
    ) -> None:
        self.node = node
        self.link = link
        self.plan_lane = num_lanes + 1
        self.planning = threading.Lock()
        self.overdue: set[object] = set()
        self._num_lanes = num_lanes
        self._lost = lost
        self._chunks: SimpleQueue[Job] = SimpleQueue()
        self._sizes: SimpleQueue[Job] = SimpleQueue()

    def open(
        self, *, do: Callable[[Peer, int, Job], None], handle: Callable[[Frame], Answer]
    ) -> None:
        """Starts the threads.

        Args:
            do: Carries out one job on a lane.
            handle: Answers one request of the other side.
        """
        for lane in range(self._num_lanes + 2):
            self.start(partial(self.link.serve, lane, handle))
        for lane in range(self._num_lanes):
            self.start(partial(self._work, lane, self._chunks, do))
        self.start(partial(self._work, self._num_lanes, self._sizes, do))

    def put(self, job: Job) -> None:
        """Has a job done as soon as a lane is free."""
        jobs = self._chunks if isinstance(job.order, FetchChunk) else self._sizes
        jobs.put(job)

    def start(self, action: Callable[[], object]) -> None:
        """Runs something that uses the link on a thread; if it fails, so has the link."""

        def run() -> None:
            try:
                action()
            except (BrokenPipeError, ConnectionResetError):
                return  # the agent is gone, which ends this process
            except (RuntimeError, ProtocolError, OSError, MemoryError) as error:
                self._lost(self, str(error))

        threading.Thread(target=run, daemon=True).start()

    def _work(
        self, lane: int, jobs: SimpleQueue[Job], do: Callable[[Peer, int, Job], None]
    ) -> None:
        while True:
            do(self, lane, jobs.get())
