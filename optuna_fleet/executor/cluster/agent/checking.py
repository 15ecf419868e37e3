"""The pre-flight check that a node makes: in a process of its own, which forks what it needs."""

from __future__ import annotations

import os
import pickle
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from optuna_fleet.executor.cluster.config import NodeSetup, modules_to_preload
from optuna_fleet.pipeline.preprocessor.payload import Payload
from optuna_fleet.processes import preload
from optuna_fleet.wire.node_messages import Checked, CheckObjective, EndCheck


class Checking:
    """At most one check.

    Args:
        setup: Of the node.
        spawn: Forks a child.
        close_inherited: To be called in it.
        say: Tells the driver.
    """

    def __init__(
        self,
        setup: NodeSetup,
        spawn: Callable[[Callable[[socket.socket], None]], tuple[int, socket.socket]],
        close_inherited: Callable[[], None],
        say: Callable[[Any], None],
    ) -> None:
        self._setup = setup
        self._spawn = spawn
        self._close_inherited = close_inherited
        self._say = say
        self._pid = self._file = self._id = -1

    def act(self, message: CheckObjective | EndCheck) -> None:
        """End the check under way, if there is any, and begin another one if that is asked."""
        if self._pid >= 0:
            os.kill(self._pid, signal.SIGKILL)
            os.close(self._file)
            self._pid = -1
        if isinstance(message, CheckObjective):
            self._begin(message)

    def _begin(self, message: CheckObjective) -> None:
        self._id, self._file = message.check_id, os.memfd_create("verdict")
        file = self._file

        def main(sock: socket.socket) -> None:
            setup = _with_own_data(self._setup)
            self._close_inherited()
            preload((*modules_to_preload(), "optuna_fleet.preflight.rehearsal"))
            verdict = _checked(message, setup)
            with open(file, "wb", closefd=False) as out:
                pickle.dump(verdict, out)

        try:
            self._pid, sock = self._spawn(main)
        except OSError:  # too many processes, or open files
            self._tell(is_whole=False)
        else:
            sock.close()

    def exited(self, pid: int, exit_code: int) -> bool:
        """A child has ended; return whether it was the check that is under way."""
        is_its = pid == self._pid
        if is_its:
            self._tell(is_whole=exit_code == 0)
        return is_its

    def _tell(self, *, is_whole: bool) -> None:
        self._pid = -1
        with open(self._file, "rb") as file:  # closes it
            file.seek(0)
            verdict = file.read() if is_whole else b""
        self._say(Checked(check_id=self._id, verdict=verdict))


def _with_own_data(setup: NodeSetup) -> NodeSetup:
    """The data sets stay open in this process when those that it has inherited are closed."""
    if setup.pipeline is None or setup.pipeline.payload is None:
        return setup
    payload = Payload(os.dup(setup.pipeline.payload.descriptor))
    return replace(setup, pipeline=replace(setup.pipeline, payload=payload))


def _checked(message: CheckObjective, setup: NodeSetup) -> Any:
    from optuna_fleet.preflight.check import Check
    from optuna_fleet.preflight.rehearsals import prepare_process

    order = pickle.loads(message.order)  # from our driver
    if setup.pipeline is not None:
        pipeline = setup.pipeline
        order = replace(order, spec=pipeline.spec, payload=pipeline.payload)
    order = replace(order, num_threads=setup.threads_per_slot)
    prepare_process()
    return Check(order, message.first_limit_s).verdict()
