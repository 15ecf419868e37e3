"""A pipeline without an executor: its processes, and readers in whatever process wants to read.

The server listens on a Unix socket of a random, abstract name, which ends with it. Such a name is
open to all users of the machine, so either side looks who is at the other end: a reader unpickles
what comes from there, and samples are for nobody else.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import operator
import os
import pickle
import secrets
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from optuna_fleet.exceptions import FleetConfigError, PipelineLostError, ProtocolError
from optuna_fleet.pipeline import limits, wire
from optuna_fleet.pipeline.pipeline_messages import AskForStats, PipelineStats
from optuna_fleet.pipeline.preprocessor.payload import PipelineSetup
from optuna_fleet.pipeline.reader.read_plan import Batches, ReadPlan, planned
from optuna_fleet.pipeline.server.server import PipelineServer
from optuna_fleet.pipeline.spec import PipelineSpec
from optuna_fleet.processes import (
    Forks,
    ModuleProcess,
    end_session,
    fill_standard_streams,
    preload,
    run_loop,
)
from optuna_fleet.resources import cpu_count, num_gpus

if TYPE_CHECKING:
    from optuna_fleet.pipeline.shared_pipeline import SharedPipeline

_SERVER = "optuna_fleet.pipeline.standalone"
_CONNECT_LIMIT_S = 120
_BACKLOG = 128
_LOOK_EVERY_S = 2.0
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineHandle:
    """Lets any process of this machine and user read a running `SharedPipeline`.

    Small, and picklable: pass it to the processes you start.

    Example:
        ``with handle.connect() as reader: reader.batches("train", batch_size=32, epoch=0)``
    """

    address: str
    spec: PipelineSpec

    def connect(self) -> PipelineReader:
        """Returns a reader for one thread of this process.

        Raises:
            FleetError: The pipeline runs no more.
            OSError: This process can't have one more connection.
        """
        return PipelineReader(self)

    def stats(self) -> PipelineStats:
        """Returns what the pipeline has done so far.

        Raises:
            FleetError: The pipeline runs no more.
        """
        with _connected(self.address) as sock, _explained():
            wire.receive(sock)  # where the samples are, which is for readers
            wire.send(sock, AskForStats())
            stats = wire.receive(sock)
        assert isinstance(stats, PipelineStats)
        return stats


class PipelineReader:
    """A connection to a running pipeline, for one thread; give it back by ``with`` or `close`."""

    def __init__(self, handle: PipelineHandle) -> None:
        # Imported here: a process that only passes handles on needs no torch.
        from optuna_fleet.pipeline.reader.client import PipelineClient

        self._sock = _connected(handle.address)
        self._client = PipelineClient(self._sock, handle.spec)
        self._pid = os.getpid()

    def batches(
        self,
        name: str,
        *,
        batch_size: int,
        epoch: int,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        first_step: int = 0,
        continues: bool = True,
    ) -> Batches[Any]:
        """Returns the batches of one epoch; iterable any number of times, with a ``len()``.

        Args:
            name: The data set.
            epoch: From 0. A data set that is not shuffled is the same in all of them.
            batch_size: Samples per batch, over all ranks.
            rank: Whose share of each batch to read, for data-parallel training.
            world_size: Number of ranks that share each batch.
            drop_last: Leave out the last batch if it is smaller than the others.
            first_step: Batches to skip, to go on in the middle of an epoch.
            continues: The next epoch will be read too: its beginning is preprocessed in good time.

        Raises:
            FleetConfigError: An argument can't work, a rank would get no sample of a batch, or
                this process may not read.
            PreprocessingError: While iterating: a sample could not be made.
            FleetError: While iterating: the pipeline is gone, or the reader was closed.
        """
        self._check()
        plan = planned(
            self._client.spec,
            name,
            epoch=epoch,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            first_step=first_step,
            continues=continues,
        )
        _check_shares(plan)
        return Batches(plan, self._iterate)

    def _iterate(self, plan: ReadPlan) -> Iterator[Any]:
        from optuna_fleet.pipeline.reader.client import read_batches

        self._check()
        try:
            # Nothing here keeps the data of a batch while the next one is made.
            yield from map(operator.attrgetter("data"), read_batches(self._client, plan))
        except PipelineLostError as error:
            self._check()
            raise _gone() from error

    def close(self) -> None:
        """Give everything back. Batches that were read stay valid."""
        if self._pid == os.getpid():
            self._client.close()
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # forks of this process may have copies
        self._sock.close()

    def __enter__(self) -> PipelineReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise FleetConfigError(
                "This reader belongs to the process that this one was forked from. "
                "Call handle.connect() in each process that reads."
            )


class Session:
    """A running pipeline: the server process."""

    def __init__(self, pipeline: SharedPipeline) -> None:
        fill_standard_streams()
        setup = self._setup = _setup(pipeline)  # kept: the server opens its file when it starts
        self._owner_pid = os.getpid()
        self.handle = PipelineHandle(
            address=f"\0optuna-fleet-{secrets.token_hex(16)}", spec=setup.spec
        )
        loaded = {"torchvision", "torchvision.transforms.v2"}.intersection(sys.modules)
        modules = ["torch", "optuna_fleet.pipeline.preprocessor.preprocessor", *sorted(loaded)]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.handle.address)
            listener.listen(_BACKLOG)
            self._server = ModuleProcess(
                _SERVER,
                (setup, listener.fileno(), limits.STUCK_S, sys.path, modules),
                # Data sets may compute with more than torch: one core per preprocessor.
                environment={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
                pass_fds=(listener.fileno(),),
            )

    @property
    def server_pid(self) -> int:
        """Pid of the server process."""
        return self._server.pid

    def close(self) -> None:
        """End the processes; in a fork of the owner, only let go of them."""
        if os.getpid() == self._owner_pid:
            if self._server.is_alive():
                os.kill(self._server.pid, signal.SIGTERM)
            self._server.close()


def _setup(pipeline: SharedPipeline) -> PipelineSetup:
    """As in a fleet of all visible GPUs, or of CPU slots: those who read are trainers too."""
    gpus = num_gpus(os.environ)
    return pipeline.packed().setup(
        limits.most_preprocessors(cpu_count(), num_slots=gpus, cpu_slots=not gpus),
        is_adaptive=True,
        niceness=0 if gpus else limits.NICENESS,
    )


def _check_shares(plan: ReadPlan) -> None:
    """Refuses what would leave a rank without a sample in a step: it would break its loop."""
    rest = plan.num_samples % plan.batch_size
    if plan.batch_size < plan.world_size:
        raise FleetConfigError(
            f"The value of `batch_size` is {plan.batch_size}, but `world_size` is "
            f"{plan.world_size}: each rank needs at least one sample of each batch."
        )
    if 0 < rest < plan.world_size and not plan.drop_last:
        raise FleetConfigError(
            f"The last batch of the epoch has {rest} of {plan.num_samples} samples, but "
            f"`world_size` is {plan.world_size}: some ranks would get none. Use drop_last=True, "
            "another `batch_size`, or read the whole data set on every rank."
        )


# -- connections ----------------------------------------------------------------------------------


def _connected(address: str) -> socket.socket:
    """Returns a connection to the server there.

    Raises:
        ProtocolError: It is another user's.
        FleetError: It has ended, or lets nobody in.
        OSError: This process can't have one more connection.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # By the kernel: with Python's limits nobody waits behind many others.
        _limit(sock, _CONNECT_LIMIT_S)
        with _explained():
            sock.connect(address)
        _limit(sock, 0)
        if not _is_ours(sock):
            raise ProtocolError("The pipeline's socket is held by another user's process.")
    except BaseException:
        sock.close()
        raise
    return sock


def _limit(sock: socket.socket, seconds: int) -> None:
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def _is_ours(sock: socket.socket) -> bool:
    """Whether the process at the other end is of the same user."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.geteuid())


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (ConnectionError, BlockingIOError, EOFError) as error:
        raise _gone() from error


def _gone() -> PipelineLostError:
    return PipelineLostError(
        "The SharedPipeline is gone and runs no more: the `with` block that started it was left, "
        "or its processes have ended, and what they printed says why. Or this reader was closed. "
        "It can be read on the machine where it runs."
    )


# -- the server's process -------------------------------------------------------------------------


class _Server:
    """Like an agent: it forks preprocessors from what it has imported, and never uses torch.

    One of them that works on one sample for ``stuck_s`` seconds is killed.
    """

    def __init__(self, setup: PipelineSetup, listener: int, stuck_s: float) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(fileno=listener)
        self._listener.setblocking(False)
        self._listens_at_s = 0.0  # inf while it does
        self._numbers = count()
        self._stuck_s = stuck_s
        self._forks = Forks(
            self._selector,
            on_exit=lambda pid, code: self._pipeline.child_died(pid),
            in_child=self._in_child,
        )
        self._pipeline = PipelineServer(
            setup,
            spawn=self._forks.spawn,
            selector=self._selector,
            notify=logging.getLogger(__name__).warning,
        )

    def serve(self) -> None:
        """Serve until this process is terminated."""
        try:
            self._look_after()
            # Nothing tells of a preprocessor that is stuck but the time that has passed.
            every_s = min(_LOOK_EVERY_S, self._stuck_s / 4)
            run_loop(self._selector, every_s=lambda: every_s, tick=self._look_after)
        except SystemExit:
            pass
        finally:
            self._forks.kill_all()

    def _look_after(self) -> None:
        self._pipeline.kill_stuck(self._stuck_s)
        self._pipeline.resume()
        if time.monotonic() >= self._listens_at_s:
            self._listens_at_s = float("inf")
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self, mask: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # It went away again; or it stays, and so would this event.
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._selector.unregister(self._listener)
                self._listens_at_s = time.monotonic() + _LOOK_EVERY_S
            return
        if _is_ours(sock):
            self._pipeline.add_reader(next(self._numbers), sock)
        else:
            sock.close()

    def _in_child(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._listener.close()


def main() -> None:
    """Run a server as configured on standard input; it is killed with its parent, the owner."""
    setup, listener, stuck_s, sys_path, modules = pickle.loads(sys.stdin.buffer.read())
    sys.path[:] = sys_path
    server = _Server(setup, listener, stuck_s)
    preload(modules)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    server.serve()
    end_session()
