"""How an agent joins a driver: says what its node is, is told what to be, and becomes it.

Also ``optuna-fleet agent``, by which a person or a scheduler starts one.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import pickle
import secrets
import socket
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from optuna_fleet.accelerator import ACCELERATORS, device_types
from optuna_fleet.arguments import check_number
from optuna_fleet.checkpoints.file import CheckpointError
from optuna_fleet.exceptions import FleetConfigError, ProtocolError
from optuna_fleet.executor.cluster.agent.agent import Agent
from optuna_fleet.executor.cluster.config import (
    AgentOptions,
    NodeSetup,
    environment,
    machine,
    versions,
)
from optuna_fleet.executor.cluster.devices import find_fleet
from optuna_fleet.pipeline.preprocessor.payload import Payload
from optuna_fleet.processes import clean_up_after_parent, end_session, flush_prints, preload
from optuna_fleet.resources import cpu_count
from optuna_fleet.wire.channel import Channel, connect
from optuna_fleet.wire.invitation import Invitation, interface_of
from optuna_fleet.wire.node_messages import AgentFailed, AgentJoining, Refused, SignOfLife
from optuna_fleet.wire.transfer import GetDataSets, receive_file

START = f"from {__name__} import main; main()"
"""What Python is to run for an agent."""

_NO_ROOM = (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # in a memory file


def run_agent(options: AgentOptions) -> None:
    """Join the driver and serve it until it ends.

    Raises:
        FleetConfigError: The driver does not want this node, or has no data sets for it; or the
            devices do not exist.
        ProtocolError: It is the driver of another sweep.
        OSError: The driver can't be reached.
        EOFError: It has ended.
        _AgentError: The agent itself has failed.
    """
    devices = find_fleet(options.devices, options.device_type, options.slots_per_device).devices
    if options.kind is not None:
        devices = tuple(replace(device, kind=options.kind) for device in devices)
    channel = connect(options.invitation)
    agent, host = secrets.token_hex(8), local_address(channel)
    channel.send(
        AgentJoining(
            agent=agent,
            node=options.node,
            devices=devices,
            cores=options.cores or cpu_count(),
            machine=machine(),
            pid=os.getpid(),
            versions=versions(),
        )
    )
    while isinstance(setup := channel.receive(), SignOfLife):
        pass  # the answer to ours takes long
    if isinstance(setup, Refused):
        raise FleetConfigError(setup.problem)
    with _telling(channel, options.node):
        _check_paths(setup)
        _adopt(setup, host)
        setup = _with_data(setup, options.invitation)
        Agent(channel, options.invitation, agent, host, setup, options.notice_s).serve()


@contextlib.contextmanager
def _telling(channel: Channel, node: str) -> Iterator[None]:
    """Tell the driver of what fails here; who can't be told is gone, which is what failed.

    Raises:
        EOFError: The driver is gone.
        FleetConfigError: As it was raised.
        _AgentError: Anything else, which is its cause.
    """
    try:
        yield
    except EOFError:
        raise
    except Exception as error:
        is_clear = isinstance(error, FleetConfigError)
        problem = str(error) if is_clear else f"{type(error).__name__}: {error}"
        try:
            channel.send(AgentFailed(node=node, problem=problem))
        except OSError:
            raise EOFError(str(error)) from error
        if is_clear:
            raise
        raise _AgentError(problem) from error


class _AgentError(Exception):
    """The agent itself has failed, and has told the driver."""


def _with_data(setup: NodeSetup, invitation: Invitation) -> NodeSetup:
    """Fetch the data sets, where their file is none of this machine."""
    if setup.pipeline is None or setup.pipeline.payload is not None:
        return setup
    channel = connect(invitation)
    try:
        channel.send(GetDataSets())
        payload = Payload.written(lambda file: receive_file(channel.receive, file.write))
    except CheckpointError as error:
        raise FleetConfigError(
            f"{socket.gethostname()} can't fetch the data sets from the driver: {error}"
        ) from None
    except (MemoryError, OSError) as error:
        if getattr(error, "errno", errno.ENOMEM) not in _NO_ROOM:
            raise
        raise FleetConfigError(
            f"{socket.gethostname()} has no memory for the data sets ({error!r}): give the node "
            "more, or data sets that read their samples from files."
        ) from None
    finally:
        channel.close()
    return replace(setup, pipeline=replace(setup.pipeline, payload=payload))


def _check_paths(setup: NodeSetup) -> None:
    missing = [path for path in setup.needed if not os.path.exists(path)]
    if missing:
        raise FleetConfigError(
            f"{socket.gethostname()} has no {', '.join(missing)}, where the script runs or "
            "imports from. Give all nodes the same paths: a shared file system, or the same image."
        )


def _adopt(setup: NodeSetup, host: str) -> None:
    """Become what objectives know: the script's paths, and the network that leads to its peers."""
    setup.workplace.take_on()
    # gloo would look up the machine's name, which need not resolve.
    for variable in ("GLOO_SOCKET_IFNAME", *(each.interface for each in ACCELERATORS)):
        if interface := interface_of(host):
            os.environ.setdefault(variable, interface)
    preload(setup.preload)


def local_address(channel: Channel) -> str:
    """The address of this end of a connection."""
    with socket.socket(fileno=os.dup(channel.fileno())) as sock:
        return str(sock.getsockname()[0])


def main() -> None:
    """Run an agent as configured by pickled `AgentOptions` on standard input."""
    options = pickle.loads(sys.stdin.buffer.read())  # from our parent, the driver
    if options.is_child:  # others die with their parents, if these have said so
        clean_up_after_parent()
    problem = ""
    try:
        run_agent(options)
    except (EOFError, OSError) as error:
        # The driver knows, or is dead.
        problem = "" if options.is_child else f"the driver is gone: {str(error) or 'it hung up'}"
    except (FleetConfigError, ProtocolError) as error:
        problem = str(error)
    except _AgentError as error:
        traceback.print_exception(error.__cause__)
        problem = "" if options.is_child else f"it failed with {error}"
    except KeyboardInterrupt:
        problem = "interrupted"
    if problem:
        print(f"optuna-fleet agent: {problem}", file=sys.stderr)
    if options.is_child and not problem:
        end_session()
    flush_prints()  # torch was imported to be forked, not to be taken down in order
    os._exit(1 if problem else 0)


def add_agent(commands: Any) -> None:
    """Add the command to those of the command line."""
    command = commands.add_parser(
        "agent", help="offer this machine's devices to a sweep that runs elsewhere"
    )
    command.add_argument(
        "--join",
        default="",
        metavar="FILE|HOST:PORT",
        help="the file that the driver has written, or its address; the token is then taken from "
        "the variable OPTUNA_FLEET_TOKEN",
    )
    command.add_argument("--devices", type=int, metavar="N", help="how many; default all")
    command.add_argument("--device-type", choices=device_types())
    command.add_argument("--slots-per-device", type=int, default=1, metavar="K")
    command.add_argument("--name", default="", help="of this node; default its host name")
    command.add_argument(
        "--notice",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long this node is left after a first SIGTERM; default 30",
    )
    command.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    check_number("--devices", given.devices, least=1, whole=True, optional=True)
    check_number("--slots-per-device", given.slots_per_device, least=1, whole=True)
    check_number("--notice", given.notice, least=0)
    names_file = os.sep in given.join or (given.join and ":" not in given.join)
    if names_file or os.path.exists(given.join):
        invitation = Invitation.read(Path(given.join))
    else:
        invitation = Invitation.from_environment(os.environ, given.join)
    options = AgentOptions(
        invitation=invitation,
        node=given.name or socket.gethostname(),
        devices=given.devices,
        device_type=given.device_type,
        slots_per_device=given.slots_per_device,
        is_child=False,
        notice_s=given.notice,
    )
    slots = find_fleet(given.devices, given.device_type, given.slots_per_device)
    variables = environment(max(1, cpu_count() // len(slots)), os.environ)
    for name in invitation.environment():
        variables.pop(name, None)  # it is not the objectives' business
    # In place of this process, which has imported NumPy with threads for all cores.
    descriptor = os.memfd_create("options", 0)
    os.write(descriptor, pickle.dumps(options))
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, 0)
    os.execve(sys.executable, [sys.executable, "-c", START], variables)
