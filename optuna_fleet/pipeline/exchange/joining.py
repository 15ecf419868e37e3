"""How a node meets the others: whatever fails or blocks, it is over in a bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, action: Callable[[], T]) -> T:
    """Returns what the action returns, and raises what it raises.

    Raises:
        TimeoutError: It takes longer; it is left to itself.
    """
    results: list[T] = []
    absent = meet(
        (0,), limit_s=limit_s, connect=lambda _: action(), welcome=lambda _, x: results.append(x)
    )
    if absent:
        raise absent[0]
    return results[0]


def meet(
    nodes: Collection[int],
    *,
    limit_s: float,
    connect: Callable[[int], T],
    welcome: Callable[[int, T], None],
) -> dict[int, Exception]:
    """Connects to all nodes at a time, and returns why some did not come.

    Looking up a name takes no limit, and a store's client waits without one for a server that says
    nothing; so what has no result in time goes on by itself, and the result is dropped.

    Args:
        nodes: Whom to meet.
        limit_s: Who comes later is done without.
        connect: Makes the link to a node.
        welcome: Given each node that has come and its link, at once.
    """
    outcomes: SimpleQueue[tuple[int, T | None, Exception | None]] = SimpleQueue()

    def call(node: int) -> None:
        try:
            outcomes.put((node, connect(node), None))
        except Exception as error:  # of the network, of gloo, of torch's bindings: all are one
            outcomes.put((node, None, error))

    for node in nodes:
        threading.Thread(target=call, args=(node,), daemon=True).start()
    end = time.monotonic() + limit_s
    absent: dict[int, Exception] = {}
    waiting = set(nodes)
    while waiting:
        try:
            node, link, error = outcomes.get(timeout=max(0.0, end - time.monotonic()))
        except Empty:
            late = TimeoutError(f"no answer within {limit_s:g} s")
            return absent | dict.fromkeys(waiting, late)
        waiting.discard(node)
        if error is None:
            welcome(node, link)  # type: ignore[arg-type]
        else:
            absent[node] = error
    return absent


def told(absent: Mapping[int, Exception]) -> str:
    """Returns who did not come and why, in one line."""
    nodes: dict[str, list[int]] = {}
    for node, error in sorted(absent.items()):
        nodes.setdefault(first_line(error), []).append(node)
    return "; ".join(
        f"node {', '.join(map(str, same))} did not come ({reason})"
        for reason, same in nodes.items()
    )


def first_line(reason: object) -> str:
    """Returns what fits into a log line; torch appends its stack."""
    return str(reason).partition("\n")[0][:200]
