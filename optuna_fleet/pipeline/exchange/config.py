"""What the user says about the exchange between nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.pipeline.exchange.scheme import Plan, Scheme

BROADCASTS: tuple[Scheme, ...] = ("single-broadcast", "multi-broadcast")
SCHEMES: tuple[Scheme, ...] = ("self", "all-shared", *BROADCASTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """How this node shares preprocessed data with others.

    All nodes give the same values, but for ``node``.

    Attributes:
        node: This node's number, from 0.
        num_nodes: How many nodes share.
        host: Address of node 0 on the network to use; only node 0 listens there.
        port: Port of the meeting point on node 0.
        secret: The sweep's secret; nothing from a node that does not know it is used.
        scheme: Who preprocesses what; "auto" chooses once decode rate and bandwidth are measured.
        num_preprocessor_nodes: For the broadcasts: the first so many nodes preprocess.
        interface: Network interface to exchange over; by default ``GLOO_SOCKET_IFNAME``, else
            the one that leads to ``host``.
        fetch_timeout_s: A node that lets another wait longer is not asked until it answered.
        join_timeout_s: Nodes that have not come by then are done without. So long they may also
            take to answer when the network is measured; later they are asked again.
        num_lanes: Chunks that may be on their way between two nodes at a time, each direction.

    Raises:
        FleetConfigError: A value can't work.
    """

    node: int
    num_nodes: int
    host: str
    port: int
    secret: bytes = field(repr=False)
    scheme: Scheme | Literal["auto"] = "auto"
    num_preprocessor_nodes: int | None = None
    interface: str | None = None
    fetch_timeout_s: float = 60.0
    join_timeout_s: float = 60.0
    num_lanes: int = 4

    def __post_init__(self) -> None:
        n, p = self.num_nodes, self.num_preprocessor_nodes
        _check("num_nodes", n, n >= 1, ">= 1")
        _check("node", self.node, 0 <= self.node < n, f"from 0 to {n - 1}: num_nodes is {n}")
        _check("scheme", self.scheme, self.scheme in ("auto", *SCHEMES), f"auto or of {SCHEMES}")
        broadcast = self.scheme in BROADCASTS
        allowed = p is not None and 1 <= p <= n if broadcast else p is None
        wanted = f"from 1 to {n}" if broadcast else f"None for {self.scheme!r}"
        _check("num_preprocessor_nodes", p, allowed, wanted)
        _check("secret", "...", len(self.secret) >= 16, "at least 16 bytes: os.urandom(32)")
        for name in ("fetch_timeout_s", "join_timeout_s", "num_lanes"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "> 0")

    def first_plan(self) -> Plan:
        """Returns the plan to begin with: the forced one, or where to measure."""
        return Plan(
            scheme="all-shared" if self.scheme == "auto" else self.scheme,
            num_nodes=self.num_nodes,
            num_preprocessor_nodes=self.num_preprocessor_nodes or self.num_nodes,
        )


def _check(name: str, value: object, fine: bool, wanted: str) -> None:
    if not fine:
        raise FleetConfigError(
            f"The value of `{name}` of the exchange is {value!r}, but must be {wanted}."
        )
