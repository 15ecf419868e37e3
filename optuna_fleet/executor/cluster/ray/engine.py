"""Ray: an actor on each node has the agent as its child; autoscalers see actors that wait."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.engine import Departure, Readable
from optuna_fleet.executor.cluster.news import News
from optuna_fleet.executor.cluster.ray.actor import Placed, ray_module
from optuna_fleet.executor.cluster.ray.nodes import Share, by_name, claim_of, resources_of
from optuna_fleet.processes import cause_of_death
from optuna_fleet.wire.invitation import Invitation

_LOOK_EVERY_S = 2.0
_END_LIMIT_S = 5.0
_SHORT_LIFE_S = 30.0
_MAX_FAILED = 3


class RayEngine:
    """Starts agents on the nodes of a Ray cluster. All but `open` calls Ray on a thread.

    Args:
        agent: Arguments of Python that start an agent, but for its name and devices.
        address: Of the cluster, as for `ray.init`.
        num_nodes: How many nodes; None for those that are there.
        cpus_per_node: See `Claim`.
        gpus_per_node: See `Claim`.
        device_type: "cuda", "cpu", or None for "cuda" where a node has GPUs.
    """

    def __init__(
        self,
        agent: Sequence[str],
        *,
        address: str | None = None,
        num_nodes: int | None = None,
        cpus_per_node: int | None = None,
        gpus_per_node: int | None = None,
        device_type: str | None = None,
    ) -> None:
        self._agent = agent
        self._address = address
        self._num_nodes = self._wanted = num_nodes
        self._claimed = (cpus_per_node, gpus_per_node, device_type)
        self._thread: threading.Thread | None = None

    def open(self, invitation: Invitation) -> None:
        """See `Engine`."""
        self._ray = ray_module()
        self._environment = invitation.environment()
        self._actors: dict[str, Any] = {}
        self._waiting: list[Any] = []
        self._born: dict[str, float] = {}
        self._failed: Counter[str] = Counter()
        self._orders: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._news = News()
        self._is_ours = not self._ray.is_initialized()
        try:
            self._connect()
            self._place()
        except BaseException:
            self._leave()
            self._news.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="optuna-fleet-ray", daemon=True)
        self._thread.start()

    def _connect(self) -> None:
        try:
            if self._is_ours:
                self._ray.init(address=self._address, logging_level=logging.WARNING)
        except (OSError, RuntimeError, ValueError, self._ray.exceptions.RayError) as error:
            raise LaunchError(
                f"Ray can't be used at address={self._address!r}: {error} Start it there with "
                "`ray start --head`, or leave out the address: it starts here then."
            ) from error
        nodes = self._nodes().values()
        self._claim = claim_of(*self._claimed, nodes)
        if self._wanted is None and not any(map(self._claim.share, nodes)):
            have = ", ".join(str(resources_of(node)) for node in nodes)
            raise LaunchError(
                f"No node of the Ray cluster has {self._claim.least()} for an agent, they have "
                f"{have}: ask for less, or say RayCluster(num_nodes=...) for an autoscaler."
            )

    def want(self, nodes: int | None) -> None:
        """See `Engine`: agents that are there stay."""
        numbers = [number for number in (nodes, self._num_nodes) if number is not None]
        self._wanted = min(numbers, default=None)
        self._orders.put(lambda: None)

    def expected(self) -> Iterable[str]:
        """See `Engine`."""
        return tuple(self._actors)

    def gone(self) -> Sequence[Departure]:
        """See `Engine`."""
        return self._news.fetch()

    def readables(self) -> Iterable[Readable]:
        """See `Engine`."""
        return [self._news]

    def end(self, node: str) -> None:
        """See `Engine`."""
        self._orders.put(lambda: node in self._actors and self._ray.kill(self._actors[node]))

    def close(self) -> None:
        """See `Engine`."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join(_END_LIMIT_S)
            self._thread = None
            self._news.close()

    # -- on the thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    order = self._orders.get(timeout=_LOOK_EVERY_S)
                    if order is None:
                        break
                    order()
                self._place()
        except Exception as error:
            self._news.tell(LaunchError(f"Ray can't place agents any more: {error}"))
        finally:
            self._leave()

    def _nodes(self) -> dict[str, Mapping[str, Any]]:
        if not self._ray.is_initialized():  # then it would start another cluster to look at
            raise LaunchError("ray.shutdown() was called while an executor was in use.")
        return by_name(self._ray.nodes())

    def _place(self) -> None:
        nodes = self._nodes()
        shares = {
            name: share for name, node in nodes.items() if (share := self._claim.share(node))
        }
        wanted = len(shares) if self._wanted is None else self._wanted
        fit = [name for name in shares if self._failed[name] < _MAX_FAILED]
        if shares and not fit and not self._actors:
            raise LaunchError("the agents of all nodes failed; what they printed says why.")
        free = [name for name in fit if name not in self._actors]
        for name in free[: max(0, wanted - len(self._actors))]:
            self._start(name, nodes[name]["NodeID"], shares[name])
        self._wait_for(max(0, wanted - len(shares)), [node["NodeID"] for node in nodes.values()])

    def _start(self, name: str, node: str, share: Share) -> None:
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        actor = self._actor(share, scheduling_strategy=affinity(node, soft=False))
        self._actors[name] = actor
        self._born[name] = time.monotonic()
        arguments = [*self._agent, "--name", name, *share.arguments()]
        end = actor.run.remote(arguments, self._environment).future()
        end.add_done_callback(lambda end: self._orders.put(lambda: self._ended(name, end)))

    def _ended(self, name: str, end: Future[int]) -> None:
        del self._actors[name]
        is_short = time.monotonic() - self._born[name] < _SHORT_LIFE_S
        self._failed[name] = self._failed[name] + 1 if is_short else 0
        error = end.exception()
        code = None if error else end.result()
        if code is None:
            cause = f"its Ray actor died: {str(error).splitlines()[-1].strip()}"
        else:
            cause = f"its agent ended with {cause_of_death(code)}"
        if self._failed[name] >= _MAX_FAILED:
            cause += f". That was {_MAX_FAILED} times in a row, so it is left out"
        self._news.tell(Departure(node=name, cause=cause, exit_code=code))

    def _wait_for(self, number: int, nodes: Sequence[str]) -> None:
        """Have so many actors wait for nodes that are not there yet."""
        while len(self._waiting) > number:
            self._ray.kill(self._waiting.pop())
        elsewhere = {"ray.io/node-id": f"!in({','.join(nodes)})"}
        while len(self._waiting) < number:
            self._waiting.append(self._actor(self._claim.least(), label_selector=elsewhere))
            self._have_it_tell(self._waiting[-1])

    def _have_it_tell(self, actor: Any) -> None:
        there = actor.is_there.remote().future()
        there.add_done_callback(lambda there: self._orders.put(lambda: self._dismiss(actor)))

    def _dismiss(self, actor: Any) -> None:
        """Its node is there: the room is the agent's."""
        if actor in self._waiting:
            self._waiting.remove(actor)
            self._ray.kill(actor)

    def _actor(self, share: Share, **options: Any) -> Any:
        made = self._ray.remote(Placed)
        return made.options(num_cpus=share.cpus, num_gpus=share.gpus, **options).remote()

    def _leave(self) -> None:
        if self._ray.is_initialized():
            for actor in (*self._actors.values(), *self._waiting):
                self._ray.kill(actor)
            if self._is_ours:
                self._ray.shutdown()
