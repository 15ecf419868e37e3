"""Who lives through a SIGTERM that is a notice, and who does not."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
    import os, selectors, signal
    from optuna_fleet.executor.cluster.agent.children import heed_notice

    def told_end(pid):
        os.kill(pid, signal.SIGTERM)
        return os.waitpid(pid, 0)[1]

    selector = selectors.DefaultSelector()
    heed_notice(selector, lambda: print("noticed", flush=True))
    child = os.fork()
    if child == 0:
        forked, tells = os.pipe()
        grandchild = os.fork()
        if grandchild == 0:
            os.write(tells, b"!")
            signal.pause()
        os.read(forked, 1)  # before, its signals are still the child's
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(told_end(grandchild))
    assert selector.select(0) == []
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    ((key, mask),) = selector.select()
    key.data(mask)
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_an_agent_and_its_children_live_through_it_once() -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.returncode) == ("noticed\n", -signal.SIGTERM), done.stderr
