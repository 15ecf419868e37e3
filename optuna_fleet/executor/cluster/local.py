"""The local cluster: one agent on this machine, no set-up."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import optuna_fleet
from optuna_fleet.exceptions import LaunchError
from optuna_fleet.messages import AgentConfig

_GRACE_S = 5.0
_START = "import sys; sys.path.insert(0, {root!r}); from {module} import main; main()"
_AGENT = "optuna_fleet.executor.cluster.agent"


class AgentProcess:
    """The agent as a child of the driver, in its own session: Ctrl-C is the driver's to handle."""

    def __init__(self, config: AgentConfig) -> None:
        root = str(Path(optuna_fleet.__file__).parents[1])
        # gloo would look up the machine's name, which need not resolve; one node needs no network.
        # Threads that spin at barriers starve the other slots; where all fit, they lose little.
        defaults = {
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        environment = {**defaults, **os.environ}
        environment["OMP_NUM_THREADS"] = str(config.threads_per_slot)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(root=root, module=_AGENT)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(pickle.dumps(config))
        self._process.stdin.close()
        self._pidfd = os.pidfd_open(self._process.pid)

    def fileno(self) -> int:
        """File descriptor that becomes readable when the agent ends."""
        return self._pidfd

    def check(self) -> None:
        """Raise if the agent ended.

        Raises:
            LaunchError: It did.
        """
        if not self.is_alive():
            raise LaunchError(
                f"The fleet's agent process ended with exit code {self._process.returncode}; what "
                "it printed says why."
            )

    def is_alive(self) -> bool:
        """Whether the agent still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """Wait for the agent to end, which it does when its channel closes; then insist."""
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._pidfd)
