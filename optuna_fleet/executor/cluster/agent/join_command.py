"""``optuna-fleet agent``: starts an agent that joins a driver, by hand or by a scheduler."""

from __future__ import annotations

import argparse
import os
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

from optuna_fleet.accelerator import device_types
from optuna_fleet.arguments import check_number
from optuna_fleet.executor.cluster.agent.entry import environment
from optuna_fleet.executor.cluster.config import AgentOptions
from optuna_fleet.executor.cluster.devices import find_fleet
from optuna_fleet.resources import cpu_count
from optuna_fleet.wire.invitation import Invitation

_START = "from optuna_fleet.executor.cluster.agent.entry import main; main()"


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
    os.execve(sys.executable, [sys.executable, "-c", _START], variables)
