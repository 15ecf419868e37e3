"""As ``python -m MODULE ARGUMENTS``, but for the imports: the nursery of the tests forks it.

For commands of schedulers, which start them anywhere on this machine. Signals are passed on; what
was forked ends with this process, however that ends. Nothing is imported here that takes long.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType

SOCKET = "OPTUNA_FLEET_TESTS_FORKS"
"""Environment variable: where the nursery is to be had; without it there is none."""
FORKED = [sys.executable, "-I", "-S", __file__]
"""In the place of ``python -m``, or of ``python``."""


def main() -> None:
    way = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    way.connect("\0" + os.environ[SOCKET])
    order = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()])
    socket.send_fds(way, [order.encode()], [1, 2])
    pid = int(way.recv(64))

    def pass_on(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):  # it has ended, and its code is on the way
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, pass_on)
    code = int(way.recv(64))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
