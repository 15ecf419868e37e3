"""Stands in for an agent where only its placement is looked at: joins, and ends as its peer does.

It needs nothing of the package, so that many start at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys

TOLD = ("CUDA_VISIBLE_DEVICES", "SLURM_CPUS_ON_NODE", "SLURM_JOB_ID", "OPTUNA_FLEET_TOKEN")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default=os.environ.get("STUB_NAME"))
    options, others = parser.parse_known_args()
    host, _, port = os.environ["OPTUNA_FLEET_JOIN"].rpartition(":")
    with socket.create_connection((host, int(port))) as sock:
        told = {name: os.environ.get(name) for name in TOLD}
        joining = {"node": options.name, "pid": os.getpid(), "options": others, **told}
        signal.signal(signal.SIGTERM, lambda *_: sock.sendall(b"notice\n"))
        sock.sendall(json.dumps(joining).encode() + b"\n")
        sys.exit(int(sock.recv(64) or 0))


if __name__ == "__main__":
    main()
