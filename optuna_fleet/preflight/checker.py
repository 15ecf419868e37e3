"""Checks outside of a sweep: in a process of their own, which is kept for the next one."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from optuna.study import StudyDirection

from optuna_fleet.exceptions import FleetConfigError, LaunchError
from optuna_fleet.executor.cluster.config import modules_to_preload
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.preprocessor.payload import Payload
from optuna_fleet.preflight.check import Check
from optuna_fleet.preflight.rehearsals import ENVIRONMENT, Order, prepare_process
from optuna_fleet.preflight.verdict import Verdict
from optuna_fleet.processes import ModuleProcess, end_session, preload
from optuna_fleet.resources import cpu_count
from optuna_fleet.settings import settings_here
from optuna_fleet.wire.node_messages import KeepObjective
from optuna_fleet.wire.packing import pack_objective
from optuna_fleet.wire.unpicklable import explained

_NO_STUDY = {"directions": (StudyDirection.MINIMIZE,), "direction": StudyDirection.MINIMIZE}


class Checker(contextlib.ExitStack):
    """Checks objectives in throw-away processes, which are forked from one that it keeps.

    Args:
        first_limit_s: See `Check`.
        least_s: Likewise.
    """

    def __init__(self, *, first_limit_s: float = 600.0, least_s: float = 60.0) -> None:
        super().__init__()
        self._limits_s = first_limit_s, least_s
        self._connection: Connection | None = None
        self._payloads = weakref.WeakKeyDictionary[SharedPipeline, Payload]()

    def check(
        self,
        objective: Callable[[Any], Any],
        pipeline: SharedPipeline | None = None,
        params: Mapping[str, Any] | None = None,
        *,
        study: Mapping[str, Any] = _NO_STUDY,
        setup: bytes = b"",
        seed: int = 0,
    ) -> Verdict:
        """Check an objective.

        Args:
            objective: As for `optimize`.
            pipeline: Its data, if any.
            params: What is suggested to it; None for what is drawn at random.
            study: See `facts_of`.
            setup: See `Settings`.
            seed: As of `FleetExecutor`.

        Raises:
            FleetConfigError: The objective, or its data, can't be sent to other processes.
            LaunchError: Processes can't be started.
        """
        if pipeline is not None and pipeline not in self._payloads:
            self._payloads[pipeline] = pipeline.payload()
        with _kept(objective, setup) as objective_at:
            order = Order(
                objective_at=objective_at,
                objective_id=0,
                spec=None if pipeline is None else pipeline.spec(),
                payload=None if pipeline is None else self._payloads[pipeline],
                params=params,
                study=study,
                seed=seed,
                num_threads=max(1, cpu_count() // 3),
            )
            try:
                connection = self._connection or self._connected()
                connection.send((order, self._limits_s))
                return connection.recv()  # type: ignore[no-any-return]
            except (EOFError, ConnectionError) as error:
                self.close()
                raise LaunchError("The process that makes pre-flight checks has died.") from error
            except BaseException:  # it may be in the midst of something
                self.close()
                raise

    def _connected(self) -> Connection:
        ours, theirs = socket.socketpair()
        # Each rehearsal would import Lightning, say, anew, which takes seconds.
        known = tuple(sys.modules)  # at once: another thread may import something
        others = [name for name in known if name.startswith("optuna_fleet.integrations.")]
        self._connection = self.enter_context(Connection(ours.detach()))
        self.callback(setattr, self, "_connection", None)
        with theirs:
            process = ModuleProcess(
                "optuna_fleet.preflight.checker",
                (theirs.fileno(), tuple(sys.path), (*modules_to_preload(), *others)),
                environment=ENVIRONMENT,  # at once: some modules look at it when they are imported
                pass_fds=[theirs.fileno()],
            )
        self.callback(process.kill)
        return self._connection


@contextmanager
def _kept(objective: Any, setup: bytes) -> Iterator[str]:
    """Yield where an objective is in memory, as long as the block lasts."""
    try:
        packed = pack_objective(objective, {})
    except Exception as error:
        reason = explained({"objective": objective}, "what `preflight` was given", error)
        raise FleetConfigError(
            f"The objective can't be sent to other processes: {reason}"
        ) from error
    kept = KeepObjective(objective_id=0, objective=packed, settings=settings_here(setup))
    with open(os.memfd_create("objective"), "wb") as file:
        pickle.dump(kept, file)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def main() -> None:
    """Body of the process that makes the checks."""
    descriptor, sys.path[:], modules = pickle.load(sys.stdin.buffer)
    preload((*modules, "optuna_fleet.preflight.rehearsal"))
    prepare_process()
    connection = Connection(descriptor)
    with contextlib.suppress(KeyboardInterrupt, OSError, EOFError):
        while True:
            order, limits_s = connection.recv()
            connection.send(Check(order, *limits_s).verdict())
    end_session()
