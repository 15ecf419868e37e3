"""The join cluster: nodes whose agents somebody else starts: pods, ssh, mpirun, LSF."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from optuna_fleet.arguments import check_number, check_that, is_a, path
from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.executor.cluster.engine import Cluster, Engine
from optuna_fleet.executor.given import Options
from optuna_fleet.sampler_bridge.compat import fleet_logger
from optuna_fleet.wire.inbox import Inbox
from optuna_fleet.wire.invitation import Invitation


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinCluster(Cluster):
    """Whatever joins by ``optuna-fleet agent --join``, at any time, and for as long as it likes.

    Args:
        file: Where the invitation is written to, for the agents to read: in a folder that they
            see, or to be copied to them. It holds a secret, and only its owner may read it.
        host: Address to listen on; "" for all of this machine.
        port: Port to listen on; 0 for any that is free.

    Raises:
        FleetConfigError: An argument is out of range.
    """

    file: str | os.PathLike[str] = "optuna-fleet.join"
    host: str = ""
    port: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "file", path("file", self.file, "file"))
        check_that("host", self.host, is_a(str), "be an address of this machine, or ''")
        check_number("port", self.port, least=0, most=65535, whole=True)

    def engine(self, options: Options) -> Engine:
        """See `Cluster`."""
        if options.devices is not None or options.device_type is not None:
            raise FleetConfigError(
                "With JoinCluster each node says what it offers: give `--devices` and "
                "`--device-type` to `optuna-fleet agent`, not to the FleetExecutor."
            )
        engine = JoinEngine(Path(self.file))
        engine.host, engine.port = self.host, self.port
        return engine


class JoinEngine(Engine):
    """Places nothing: it only writes down how to join. Agents end as they hear nothing more."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._invitation: Invitation | None = None

    def open(self, invitation: Invitation, inbox: Inbox) -> None:
        """See `Engine`."""
        if self._file.exists():
            fleet_logger.warning(
                f"{self._file} was there already: if its driver lives, no more nodes join that. "
                "Give each driver a file of its own."
            )
        invitation.write(self._file)
        self._invitation = invitation
        fleet_logger.info(
            f"Nodes may join now: run `optuna-fleet agent --join {self._file.absolute()}` on each."
        )

    def close(self) -> None:
        """See `Engine`."""
        with contextlib.suppress(FleetConfigError, OSError):  # it is not there any more
            if Invitation.read(self._file) == self._invitation:  # and not another driver's
                self._file.unlink()
