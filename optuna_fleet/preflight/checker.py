"""Checks outside of a sweep: in a process of their own, which is kept for the next one."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from optuna.study import StudyDirection

from optuna_fleet.exceptions import FleetConfigError, LaunchError
from optuna_fleet.executor.cluster.config import modules_to_preload
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.preprocessor.payload import Payload
from optuna_fleet.preflight.check import Check
from optuna_fleet.preflight.notes import Order
from optuna_fleet.preflight.rehearsals import Rehearsals
from optuna_fleet.preflight.verdict import Verdict
from optuna_fleet.processes import ModuleProcess, end_session, preload
from optuna_fleet.resources import cpu_count
from optuna_fleet.settings import Settings, settings_here
from optuna_fleet.wire.node_messages import KeepObjective
from optuna_fleet.wire.packing import pack_objective
from optuna_fleet.wire.unpicklable import explained


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Of the process that makes the checks.

    Attributes:
        descriptor: Of the connection on which it gets its orders.
        path: Where modules are found.
        preload: Those to import.
    """

    descriptor: int
    path: tuple[str, ...]
    preload: tuple[str, ...]


class Checker(AbstractContextManager["Checker"]):
    """Checks objectives in throw-away processes, which are forked from one that it keeps.

    Args:
        first_limit_s: See `Check`.
        least_s: Likewise.
    """

    def __init__(self, *, first_limit_s: float = 600.0, least_s: float = 60.0) -> None:
        self._limits_s = first_limit_s, least_s
        self._process: ModuleProcess | None = None
        self._connection: Connection | None = None
        self._payloads = weakref.WeakKeyDictionary[SharedPipeline, Payload]()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End its processes."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
        self._process = self._connection = None

    def check(
        self,
        objective: Callable[[Any], Any],
        pipeline: SharedPipeline | None = None,
        params: Mapping[str, Any] | None = None,
        *,
        facts: Mapping[str, Any] | None = None,
        directions: Sequence[StudyDirection] = (StudyDirection.MINIMIZE,),
        setup: bytes = b"",
        seed: int = 0,
    ) -> Verdict:
        """Check an objective.

        Args:
            objective: As for `optimize`.
            pipeline: Its data, if any.
            params: What is suggested to it; None for what is drawn at random.
            facts: What it may ask its study for, by name.
            directions: Of the study.
            setup: See `Settings`.
            seed: As of `FleetExecutor`.

        Raises:
            FleetConfigError: The objective, or its data, can't be sent to other processes.
            LaunchError: Processes can't be started.
        """
        with _kept(objective, settings_here(setup)) as objective_at:
            order = Order(
                objective_at=objective_at,
                objective_id=0,
                spec=None if pipeline is None else pipeline.spec(),
                payload=None if pipeline is None else self._payload(pipeline),
                params=params,
                study={**(facts or {}), "directions": directions, "direction": directions[0]},
                maximize=maximize(directions),
                seed=seed,
                num_threads=max(1, cpu_count() // 3),
            )
            try:
                return self._answer(order)
            except BaseException:  # it may be in the midst of something
                self.close()
                raise

    def _payload(self, pipeline: SharedPipeline) -> Payload:
        if pipeline not in self._payloads:
            self._payloads[pipeline] = pipeline.payload()
        return self._payloads[pipeline]

    def _answer(self, order: Order) -> Verdict:
        connection = self._connection or self._connected()
        try:
            connection.send((order, self._limits_s))
            verdict: Verdict = connection.recv()
        except (EOFError, OSError) as error:
            raise LaunchError("The process that makes pre-flight checks has died.") from error
        return verdict

    def _connected(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            modules = (*modules_to_preload(), "optuna_fleet.preflight.rehearsal")
            self._process = ModuleProcess(
                "optuna_fleet.preflight.checker",
                Config(descriptor=theirs.fileno(), path=tuple(sys.path), preload=modules),
                environment={},
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        return self._connection


def maximize(directions: Sequence[StudyDirection]) -> bool | None:
    """Whether larger values are better; None where there are several."""
    return directions[0] is StudyDirection.MAXIMIZE if len(directions) == 1 else None


@contextmanager
def _kept(objective: Any, settings: Settings) -> Iterator[str]:
    """Yield where an objective is in memory, as long as the block lasts."""
    try:
        packed = pack_objective(objective, {})
    except Exception as error:
        reason = explained({"objective": objective}, "what `preflight` was given", error)
        raise FleetConfigError(
            f"The objective can't be sent to other processes: {reason}"
        ) from error
    kept = KeepObjective(objective_id=0, objective=packed, settings=settings)
    descriptor = os.memfd_create("objective")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            pickle.dump(kept, file)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def main() -> None:
    """Body of the process that makes the checks."""
    config: Config = pickle.load(sys.stdin.buffer)
    sys.path[:] = config.path
    preload(config.preload)
    rehearsals, connection = Rehearsals(), Connection(config.descriptor)
    with contextlib.suppress(KeyboardInterrupt, OSError, EOFError):
        while True:
            order, limits_s = connection.recv()
            connection.send(Check(order, rehearsals.run, *limits_s).verdict())
    end_session()
