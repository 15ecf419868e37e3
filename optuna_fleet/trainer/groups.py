"""Process groups of trials: a trainer joins one, leaves it, and joins the next.

The group of a trial is the *default* group of its processes, so plain ``torch.distributed`` code
in an objective means "this trial". The store outlives the trainers: the agent or driver serves it.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    _unregister_all_process_groups,
)

from optuna_fleet.accelerator import accelerator_of, of_group
from optuna_fleet.exceptions import TrainerLostError
from optuna_fleet.wire.messages import RunTrial

_logger = logging.getLogger(__name__)

_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

_leaving: list[threading.Thread] = []


def serve_store(host: str = "127.0.0.1") -> tuple[TCPStore, int]:
    """Start a store that processes can meet at; it is served as long as it is referenced.

    It listens on `host` only; a bare ``TCPStore`` does on every interface.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen(128)
        port = int(listener.getsockname()[1])
        return store_on(listener), port


def store_on(listener: socket.socket) -> TCPStore:
    """Serve a store on a socket, which it takes."""
    host, port, *_ = listener.getsockname()
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join_group(run: RunTrial, device_type: str) -> None:
    """Make the group of a run's ranks this process's default group of ``torch.distributed``.

    A group of one touches no network, and one that is there already is kept, with all that was
    made of it, as Optuna alone would keep it from trial to trial. The limit is one for the peers
    to arrive, and for each collective afterwards.

    Raises:
        TrainerLostError: If a peer or the store can't be reached in time; no group is left behind.
    """
    by_gloo = device_type == "cpu" or run.by_gloo
    backend = "gloo" if by_gloo else accelerator_of(device_type).backend
    if run.world_size == 1 == group_size() and has_group() and dist.get_backend() == backend:
        return
    leave_group()
    _choose_interface(run)
    # init_process_group wraps sys.excepthook, one layer per call: a long-lived trainer would pile
    # them up.
    excepthook = sys.excepthook
    timeout = timedelta(seconds=run.collective_s)
    began = time.monotonic()
    try:
        dist.init_process_group(
            backend,
            store=_open_store(run, timeout),
            rank=run.rank,
            world_size=run.world_size,
            timeout=timeout,
        )
        if run.world_size > 1:
            # A rank that is in and soon done must not leave others behind that still connect. And
            # an accelerator's backend has met nobody before.
            dist.all_reduce(torch.zeros(1, device=wire_device()))
            if accelerator := of_group(backend):
                accelerator.module.synchronize()
    except RuntimeError as error:  # torch's DistError and its kin
        leave_group()
        _forget_group()  # one half made counts too, and ranks that count unlike never meet again
        raise TrainerLostError(
            f"Rank {run.rank} of {run.world_size} could not join the group {run.group!r} (tried "
            f"for {time.monotonic() - began:.3g} s): {error}"
        ) from error
    finally:
        sys.excepthook = excepthook


def leave_group() -> None:
    """Leave the default group, if any; afterwards this process can join another one.

    Safe to call when there is none, and for gloo when peers of the group are dead.
    """
    if not dist.is_initialized():
        return
    if dist.get_backend() == "gloo":
        _leave_aside()
    else:
        try:
            dist.destroy_process_group()
        except Exception:
            _logger.debug("The process group could not be shut down: forget it.", exc_info=True)
            with suppress(Exception):
                dist.distributed_c10d._abort_process_group()
            _forget_group()
    if ignite := sys.modules.get("ignite.distributed"):  # or it would go by the old group's size
        ignite.sync()


def can_leave_alone(device_type: str) -> bool:
    """Whether the default group can be left while its other ranks are in a collective.

    The end of an accelerator's, abrupt or not, waits for that.
    """
    return group_size() == 1 or device_type == "cpu"


def _leave_aside() -> None:
    """Forget the default group at once, and shut it down in a thread.

    Gloo waits for 10 ms per peer there; and for collectives that have begun: if the ranks went
    different ways, until these time out. Nobody who comes next waits for that.
    """
    groups = list(dist.distributed_c10d._world.pg_names)
    _forget_group()
    _leaving[:] = [thread for thread in _leaving if thread.is_alive()]
    thread = threading.Thread(
        target=_shut_down, args=(groups,), name="optuna-fleet-leave", daemon=True
    )
    try:
        thread.start()
        _leaving.append(thread)
    except RuntimeError:  # too many threads, or processes
        _shut_down(groups)


@atexit.register  # a thread of gloo's that is still there would abort the process
def wait_until_left() -> None:
    """Wait until nothing is left of the groups that were left."""
    while _leaving:
        _leaving.pop().join()


def _shut_down(groups: list[dist.ProcessGroup]) -> None:
    while groups:
        with suppress(Exception):  # its peers may be dead
            groups.pop().shutdown()


def has_group() -> bool:
    """Whether there is a default group."""
    return dist.is_initialized()


def group_size() -> int:
    """Number of processes in the default group; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gloo_group(ranks: Sequence[int] | None = None) -> dist.ProcessGroup | None:
    """Another group of some ranks, by default all, without a time limit; all must call it.

    Who is lost closes its connections; who hangs is seen by others. None on ranks outside of it.
    """
    chosen = None if ranks is None else list(ranks)
    group = dist.new_group(chosen, timeout=timedelta(days=365), backend="gloo")
    return group if isinstance(group, dist.ProcessGroup) else None


def wire_device() -> torch.device:
    """Device that a tensor must be on to travel in the default group."""
    if dist.is_initialized() and (accelerator := of_group(dist.get_backend())):
        return torch.device(accelerator.type, accelerator.module.current_device())
    return torch.device("cpu")


def _open_store(run: RunTrial, timeout: timedelta) -> Store:
    if run.world_size == 1:
        return HashStore()
    assert run.store is not None
    store = TCPStore(
        run.store.host, run.store.port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    return PrefixStore(run.group, store)


_chose_interface = False


def _choose_interface(run: RunTrial) -> None:
    """Keep gloo on the loopback for groups on one machine, whose host name may not resolve."""
    global _chose_interface
    if run.store is None or run.world_size == 1 or run.store.host in _LOOPBACK_HOSTS:
        if _GLOO_INTERFACE not in os.environ:
            os.environ[_GLOO_INTERFACE] = "lo"
            _chose_interface = True
    elif _chose_interface:  # our own choice for an earlier group would cut this one off
        os.environ.pop(_GLOO_INTERFACE, None)
        _chose_interface = False


def _forget_group() -> None:
    """Remove the default group, and those made of it, from torch's books."""
    world = dist.distributed_c10d._world
    for book in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_to_tag):
        book.clear()
    world.tags_to_pg.clear()
    world.pg_backend_config.clear()
    _unregister_all_process_groups()
    world.group_count = 0
    dist.distributed_c10d._update_default_pg(None)
