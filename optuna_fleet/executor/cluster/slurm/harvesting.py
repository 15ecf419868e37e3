"""The thread that submits pilots and looks after them, as Slurm may keep it waiting."""

from __future__ import annotations

import contextlib
import getpass
import secrets
import shlex
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optuna_fleet.exceptions import LaunchError
from optuna_fleet.executor.cluster.news import News
from optuna_fleet.executor.cluster.slurm.commands import (
    ask,
    ask_jobs,
    in_a_step,
    may_pass,
)
from optuna_fleet.executor.cluster.slurm.pilots import PilotLimits, Pilots
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.wire.invitation import Invitation

_SHORTEST_GAP_S = 2.0
_END_LIMIT_S = 5.0


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


class Harvest(threading.Thread):
    """Submits pilots and looks after them; all that may wait for Slurm is on this thread."""

    def __init__(
        self, limits: PilotLimits, job: PilotJob, check_s: float, invitation: Invitation
    ) -> None:
        super().__init__(name="optuna-fleet-harvest", daemon=True)
        self.pilots = Pilots(limits=limits)
        self.news = News()
        self.woken = threading.Event()
        self.to_end: list[str] = []
        self._job = job
        self._check_s = check_s
        self._environment = invitation.environment()
        self._job_name = f"optuna-fleet-{secrets.token_hex(4)}"
        self._mine = (f"--name={self._job_name}", f"--user={getpass.getuser()}")
        self._closed = threading.Event()
        self._has_pilots = False
        self._is_troubled = False

    def run(self) -> None:
        """Look at Slurm's queue now and then, until closed."""
        while not self._closed.is_set():
            self.woken.clear()
            try:
                self._look()
                self._is_troubled = False
            except LaunchError as error:
                self._struggle(error)
            self._closed.wait(min(_SHORTEST_GAP_S, self._check_s))
            self.woken.wait(self._check_s)
        with contextlib.suppress(LaunchError):
            ask("scancel", "--quiet", *self._mine)

    def _look(self) -> None:
        pilots = self.pilots
        if self._has_pilots:
            for departure in pilots.see(ask_jobs(*self._mine), time.time()):
                self.news.tell(departure)
        if pilots.are_hopeless:
            self.news.tell(
                LaunchError(
                    f"All pilot jobs end as soon as they start: see {self._job.logs} for what "
                    "they printed."
                )
            )
        if numbers := pilots.to_cancel(time.time()):
            with contextlib.suppress(LaunchError):  # they have just ended
                ask("scancel", *numbers)
        lost, self.to_end = self.to_end, []
        pilots.lose(lost)
        for _ in range(pilots.missing(time.time())):
            if not self._closed.is_set():
                self._submit()

    def _submit(self) -> None:
        suffix = ".$SLURM_JOB_ID" if self.pilots.limits.shares_nodes else ""
        step = in_a_step(self._job.agent, "--nodes=1", suffix=suffix)
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
        self.pilots.refused(time.time())
        if not (self._has_pilots or may_pass(error)):
            self.news.tell(LaunchError(f"No pilot job can be submitted. {error}"))
        elif not self._is_troubled:
            fleet_logger.warning(f"{error} The harvest goes on as soon as Slurm lets it.")
        self._is_troubled = True

    def close(self) -> None:
        """End it, and all pilots."""
        self._closed.set()
        self.woken.set()
        self.join(_END_LIMIT_S)
        if self.is_alive():  # it waits for Slurm
            fleet_logger.warning(
                f"Slurm does not answer: pilot jobs may be left in its queue. They end by "
                f"themselves as they start; `scancel --name={self._job_name}` removes them."
            )
        self.news.close()
