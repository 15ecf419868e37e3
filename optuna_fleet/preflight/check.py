"""The check itself: which rehearsals are made, and what follows from them.

A is undisturbed, on one device. Z is as A, but moved. W is on several devices.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from optuna.study import StudyDirection

from optuna_fleet.exceptions import FleetConfigError, LaunchError
from optuna_fleet.executor.cluster.config import modules_to_preload
from optuna_fleet.pipeline import SharedPipeline
from optuna_fleet.pipeline.preprocessor.payload import Payload
from optuna_fleet.preflight.comparison import (
    DOUBLE,
    ROUGH,
    SINGLE,
    apart,
    differences,
    unlike,
)
from optuna_fleet.preflight.records import Ending, Key, Order, Rehearsed
from optuna_fleet.preflight.verdict import (
    Free,
    NotChecked,
    NotMoved,
    NotRepeatable,
    OneDevice,
    Plain,
    Verdict,
)
from optuna_fleet.preflight.warm import Config, Ran
from optuna_fleet.processes import ModuleProcess
from optuna_fleet.resources import cpu_count
from optuna_fleet.settings import settings_here
from optuna_fleet.wire.node_messages import KeepObjective
from optuna_fleet.wire.packing import ObjectivePickler, pack_objective
from optuna_fleet.wire.unpicklable import explained, variable

_MORE_BATCHES = (2, 8, 32)  # where an optimizer takes its first step after some
_PATIENCE, _LEAST_S = 5.0, 60.0
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHDYNAMO_DISABLE": "1",
    # Trackers of experiments keep nothing of rehearsals.
    "WANDB_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "COMET_DISABLE_AUTO_LOGGING": "1",
    "COMET_MODE": "DISABLED",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}


@dataclass(slots=True)
class _Costs:
    """What a check has taken; `last_s`: its last rehearsals, side by side."""

    began: float = field(default_factory=time.monotonic)
    last_s: float = 0.0
    cpu_s: float = 0.0


class Checker:
    """Checks objectives in throw-away processes, which are forked from one that it keeps.

    Args:
        first_limit_s: What the first rehearsal of a check may take; the others may take five times
            what it took, and a minute.
    """

    def __init__(self, *, first_limit_s: float = 600.0) -> None:
        self._first_limit_s = first_limit_s
        self._process: ModuleProcess | None = None
        self._connection: Connection | None = None
        self._payloads = weakref.WeakKeyDictionary[SharedPipeline, Payload]()

    def __enter__(self) -> Checker:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End its processes."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._folder.cleanup()
        self._process = self._connection = None

    def check(
        self,
        objective: Callable[[Any], Any],
        pipeline: SharedPipeline | None = None,
        params: Mapping[str, Any] | None = None,
        *,
        facts: Mapping[str, Any] | None = None,
        directions: Sequence[StudyDirection] = (StudyDirection.MINIMIZE,),
        seed: int = 0,
    ) -> Verdict:
        """Check an objective.

        Args:
            objective: As for `optimize`.
            pipeline: Its data, if any.
            params: What is suggested to it; None for what is drawn at random.
            facts: What it may ask its study for, by name.
            directions: Of the study.
            seed: As of `FleetExecutor`.

        Raises:
            FleetConfigError: The objective, or its data, can't be sent to other processes.
            LaunchError: Processes can't be started.
        """
        with _kept(objective) as objective_at:
            order = Order(
                objective_at=objective_at,
                path=tuple(sys.path),
                folder=os.getcwd(),
                spec=None if pipeline is None else pipeline.spec(),
                payload=None if pipeline is None else self._payload(pipeline),
                params=params,
                is_double=True,
                moves=False,
                num_batches=_MORE_BATCHES[0],
                study={**(facts or {}), "directions": directions, "direction": directions[0]},
                maximize=_maximize(directions),
                seed=seed,
                num_threads=_num_threads(),
            )
            costs = _Costs()
            try:
                found, asked = self._found(order, costs)
            except BaseException:  # it may be in the midst of something
                self.close()
                raise
        wall_s = time.monotonic() - costs.began
        return replace(found, params=params or asked, wall_s=wall_s, cpu_s=costs.cpu_s)

    def _payload(self, pipeline: SharedPipeline) -> Payload:
        if pipeline not in self._payloads:
            self._payloads[pipeline] = pipeline.payload()
        return self._payloads[pipeline]

    def _found(self, order: Order, costs: _Costs) -> tuple[Verdict, Mapping[str, Any]]:
        order, alone = self._alone(order, costs)
        asked = alone.params
        if alone.ending is Ending.PLAIN:
            return Plain(), asked
        if not alone.is_whole:
            what = "" if alone.ending is Ending.UNFIT else "on one device "
            return NotChecked(why=f"{what}{alone.problem}", traceback=alone.traceback), asked
        if not alone.num_steps and not alone.num_epochs:
            return NotChecked(why="it does not train"), asked
        limit_s = _PATIENCE * costs.last_s + _LEAST_S
        width = 3 if all(size % 2 == 0 for size in alone.sizes) else 2
        several = [replace(order, rank=rank, world_size=width) for rank in range(width)]
        (moved,), ranks = self._ran([[replace(order, moves=True)], several], limit_s, costs)
        return self._judged(order, alone, moved, ranks, limit_s, costs), asked

    def _alone(self, order: Order, costs: _Costs) -> tuple[Order, Rehearsed]:
        """Rehearse A: in float64 if that can be, and with so many batches that it takes steps."""
        for is_double in (True, False):
            for num_batches in _MORE_BATCHES:
                order = replace(order, is_double=is_double, num_batches=num_batches)
                ((found,),) = self._ran([[order]], self._first_limit_s, costs)
                if not found.is_whole or found.num_steps or not found.num_epochs:
                    break
            if found.ending is not Ending.RAISED:
                break
        return order, found

    def _judged(
        self,
        order: Order,
        alone: Rehearsed,
        moved: Rehearsed,
        ranks: Sequence[Rehearsed],
        limit_s: float,
        costs: _Costs,
    ) -> Verdict:
        is_double = order.is_double
        tolerance = DOUBLE if is_double else ROUGH if alone.is_rough else SINGLE
        records = [rank.record for rank in ranks if rank.record]
        by_width, worst = apart(alone.record, records, tolerance, first_step=not is_double)
        failed = [rank for rank in ranks if not rank.is_whole]
        if failed:  # what it has not come to is no difference
            seen = set[Key]().union(*(rank.record for rank in ranks))
            by_width = {key: size for key, size in by_width.items() if key in seen}
        by_move = unlike(alone.record, moved.record) if moved.is_whole else {}
        if by_width or by_move:
            ((again,),) = self._ran([[order]], limit_s, costs)
            unsteady = unlike(alone.record, again.record)
            if any(key.kind != "variable" for key in unsteady) or not again.is_whole:
                return NotRepeatable(differences=differences(unsteady))
            names = {(key.kind, key.name) for key in unsteady}
            by_move = {k: size for k, size in by_move.items() if (k.kind, k.name) not in names}
        moves = _moves(by_move, moved)
        if by_width or failed:
            problem = _problem(failed)
            return OneDevice(differences=differences(by_width), problem=problem, moves=moves)
        return moves or Free(worst=worst)

    # -- processes --------------------------------------------------------------------------------

    def _ran(
        self, groups: Sequence[Sequence[Order]], limit_s: float, costs: _Costs
    ) -> list[list[Rehearsed]]:
        connection = self._connection or self._connected()
        try:
            connection.send((groups, limit_s))
            ran: list[list[Ran]] = connection.recv()
        except (EOFError, OSError) as error:
            raise LaunchError("The process that makes pre-flight checks has died.") from error
        costs.cpu_s += sum(one.cpu_s for group in ran for one in group)
        costs.last_s = max(one.wall_s for group in ran for one in group)
        return [[one.rehearsed for one in group] for group in ran]

    def _connected(self) -> Connection:
        self._folder = tempfile.TemporaryDirectory(prefix="optuna-fleet-")
        ours, theirs = socket.socketpair()
        with theirs:
            modules = (*modules_to_preload(), "optuna_fleet.preflight.rehearsal")
            config = Config(descriptor=theirs.fileno(), path=tuple(sys.path), preload=modules)
            self._process = ModuleProcess(
                "optuna_fleet.preflight.warm",
                config,
                environment={
                    **_ENVIRONMENT,
                    "MLFLOW_TRACKING_URI": f"file://{self._folder.name}",
                    "OMP_NUM_THREADS": str(_num_threads()),
                },
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        return self._connection


def _maximize(directions: Sequence[StudyDirection]) -> bool | None:
    return directions[0] is StudyDirection.MAXIMIZE if len(directions) == 1 else None


def _num_threads() -> int:
    return max(1, cpu_count() // 3)


def _moves(by_move: dict[Key, float], moved: Rehearsed) -> NotMoved | None:
    if moved.refused or not moved.is_whole:
        return NotMoved(problem=moved.refused or f"moved, {moved.problem}")
    if not by_move:
        return None
    # A variable, or a rate, is the cause of what differs in the same mini-epoch, if earlier in it.
    first = next(iter(by_move))
    causes = [k for k in by_move if k[:2] == first[:2] and k.kind in ("variable", "learning rate")]
    causes.sort(key=lambda key: key.kind != "variable")
    return NotMoved(differences=differences({**dict.fromkeys(causes, math.inf), **by_move}))


def _problem(failed: Sequence[Rehearsed]) -> str:
    if not failed:
        return ""
    causes = (Ending.RAISED, Ending.UNFIT, Ending.DIED, Ending.CUT_OFF, Ending.LATE)
    first = min(failed, key=lambda one: causes.index(one.ending))
    return f"it fails: {first.problem}"


class _kept:  # noqa: N801
    """An objective in memory that has a path as long as the block lasts."""

    def __init__(self, objective: Any) -> None:
        self._objective = objective

    def __enter__(self) -> str:
        try:
            packed = pack_objective(self._objective, {})
        except Exception as error:
            whole = variable("objective", self._objective, "what `preflight` was given")
            reason = explained([whole], error, ObjectivePickler(io.BytesIO(), {}))
            raise FleetConfigError(
                f"The objective can't be sent to other processes: {reason}"
            ) from error
        kept = KeepObjective(objective_id=0, objective=packed, settings=settings_here())
        self._descriptor = os.memfd_create("objective")
        with open(self._descriptor, "wb", closefd=False) as file:
            pickle.dump(kept, file)
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
