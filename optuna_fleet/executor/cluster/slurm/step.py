"""One srun of agents: how it is started, what it says, how it ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from optuna_fleet.executor.cluster.slurm.commands import in_a_step, is_of_ending
from optuna_fleet.executor.cluster.slurm.gpus import gpu_options
from optuna_fleet.processes import outlet

_KILL_LIMIT_S = 2.0
_LAST_LINES = 5
_LONG_S = 3600.0


class Step:
    """An srun with an agent on each of its nodes.

    Args:
        agent: Command line of an agent, but for its name.
        gpus: How many to ask for, by node.

    Attributes:
        said: Its last lines, and those of the agents.
    """

    def __init__(
        self,
        agent: Sequence[str],
        nodes: Sequence[str],
        gpus: Mapping[str, int],
        environment: Mapping[str, str],
    ) -> None:
        self._begun = time.monotonic()
        where = f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}"
        self._process = subprocess.Popen(
            in_a_step(agent, *where, *gpu_options(nodes, gpus)),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=outlet(sys.__stdout__),
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C is for the driver
        )
        self.wait = self._process.wait
        self.said = ""

    @property
    def has_lasted(self) -> bool:
        """Whether an agent of it that ends now is none that can't work there."""
        return time.monotonic() - self._begun >= _LONG_S

    def lines(self) -> Iterator[str]:
        """What it says, and the agents, until all have ended."""
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                if not is_of_ending(line):  # the driver says so itself
                    yield line

    def say(self, line: str) -> None:
        """Print a line where the driver prints."""
        self.said = "".join([*self.said.splitlines(keepends=True)[1 - _LAST_LINES :], line])
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(line, end="", file=sys.__stderr__, flush=True)

    def end(self, patience_s: float) -> None:
        """Wait so long for its end, then end it."""
        for end, limit_s in (
            (self._process.terminate, patience_s),
            (self._process.kill, _KILL_LIMIT_S),
        ):
            try:
                self.wait(limit_s)
            except subprocess.TimeoutExpired:
                end()
        self.wait()
