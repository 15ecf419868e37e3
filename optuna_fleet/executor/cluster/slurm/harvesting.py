"""The engine that submits pilots and looks after them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.asking import AsksScheduler
from optuna_fleet.executor.cluster.slurm.commands import (
    ask,
    ask_jobs,
    in_a_step,
    may_pass,
)
from optuna_fleet.executor.cluster.slurm.pilots import PilotLimits, Pilots
from optuna_fleet.sampler_bridge.compat import fleet_logger

_SHORTEST_GAP_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotJob:
    """What is submitted.

    Attributes:
        agent: Command line of an agent, but for its name.
        options: Of sbatch.
        logs: Folder for what the pilots print.
    """

    agent: Sequence[str]
    options: Sequence[str]
    logs: Path


class HarvestEngine(AsksScheduler):
    """Submits pilots, and looks after them.

    Args:
        check_s: Seconds between two looks at Slurm's queue.
    """

    def __init__(self, limits: PilotLimits, job: PilotJob, check_s: float = 15.0) -> None:
        super().__init__("Slurm", every_s=check_s, gap_s=min(_SHORTEST_GAP_S, check_s))
        self._limits, self._job = limits, job
        self._pilots = Pilots(limits=limits)

    def expected(self) -> Sequence[str]:
        """See `Engine`."""
        return [self._pilots.name_of(job) for job in list(self._pilots.running)]

    def _prepare(self) -> None:
        self._pilots = Pilots(limits=self._limits)
        self._job_name = f"optuna-fleet-{secrets.token_hex(4)}"
        self._mine = (f"--name={self._job_name}", f"--user={os.getuid()}")  # whatever $USER says
        self._has_pilots = self._is_troubled = False

    def _look(self) -> None:
        self._pilots.wanted = self._wanted
        try:
            self._see_and_submit()
            self._is_troubled = False
        except LaunchError as error:
            self._struggle(error)

    def _see_and_submit(self) -> None:
        pilots = self._pilots
        if self._has_pilots:
            for departure in pilots.see(ask_jobs(*self._mine), time.time()):
                self._inbox.put(departure)
        if pilots.are_hopeless:
            self._inbox.put(
                LaunchError(
                    f"All pilot jobs end as soon as they start: see {self._job.logs} for what "
                    "they printed."
                )
            )
        if numbers := pilots.to_cancel(time.time()):
            with contextlib.suppress(LaunchError):  # they have just ended, or it is tried again
                ask("scancel", *numbers)
                pilots.cancelled(numbers)
        pilots.lose(self._ends())
        for _ in range(pilots.missing(time.time())):
            if not self._closed.is_set():
                self._submit()

    def _submit(self) -> None:
        suffix = ".$SLURM_JOB_ID" if self._limits.shares_nodes else ""
        step = in_a_step(self._job.agent, suffix=suffix)
        self._job.logs.mkdir(parents=True, exist_ok=True)
        ask(
            *("sbatch", "--parsable", "--export=ALL", f"--job-name={self._job_name}"),
            *("--nodes=1", "--ntasks-per-node=1", "--requeue", "--open-mode=append"),
            *(f"--output={self._job.logs}/%j.out", *self._job.options),
            text=f"#!/bin/sh\nexec {shlex.join(step)}\n",
            environment=self._environment,
        )
        self._has_pilots = True

    def _struggle(self, error: LaunchError) -> None:
        """Slurm did not do what it was asked to."""
        self._pilots.refused(time.time())
        if not (self._has_pilots or may_pass(error)):
            self._inbox.put(LaunchError(f"No pilot job can be submitted. {error}"))
        elif not self._is_troubled:
            fleet_logger.warning(f"{error} The harvest goes on as soon as Slurm lets it.")
        self._is_troubled = True

    def _leave(self) -> None:
        try:
            ask("scancel", "--quiet", *self._mine)
        except LaunchError as error:
            self._tell_of_left(str(error))

    def _is_stuck(self) -> None:
        self._tell_of_left("Slurm does not answer.")

    def _tell_of_left(self, why: str) -> None:
        if self._has_pilots:
            fleet_logger.warning(
                f"{why} Pilot jobs may be left in Slurm's queue. They end by themselves as "
                f"they start; `scancel --name={self._job_name}` removes them."
            )
