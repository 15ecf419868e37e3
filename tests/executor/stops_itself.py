"""A process that is stopped before it has done anything."""

import os
import signal


def main() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
