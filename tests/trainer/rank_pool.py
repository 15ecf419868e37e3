"""Processes that stand for trainers: they run jobs by name and live as long as a test module."""

from __future__ import annotations

import importlib
import pickle
import sys
import traceback
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from tests.nursery import Nursery


@dataclass(frozen=True)
class Failure:
    kind: str
    text: str


def main() -> None:
    """Run jobs until there are no more."""
    import torch

    torch.set_num_threads(1)
    jobs = importlib.import_module("rank_jobs")
    pipe: Any = Connection(int(sys.stdin.read()))
    while request := pipe.recv_bytes():
        name, args = pickle.loads(request)
        try:
            result = getattr(jobs, name)(*args)
        except Exception as error:
            result = Failure(type(error).__name__, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(result))  # not `send`, for which torch would share tensors


class RankPool:
    def __init__(self, nursery: Nursery, num_ranks: int) -> None:
        self.pipes, self.processes = [], []
        for _ in range(num_ranks):
            ours, theirs = Pipe()
            with theirs:
                process = nursery.start_main(__name__, pass_fds=(theirs.fileno(),))
                assert process.stdin is not None
                with process.stdin as stdin:
                    stdin.write(b"%d" % theirs.fileno())
            self.pipes.append(ours)
            self.processes.append(process)

    def start(self, index: int, name: str, *args: Any) -> None:
        self.pipes[index].send_bytes(pickle.dumps((name, args)))

    def result(self, index: int) -> Any:
        assert self.pipes[index].poll(800), f"process {index} hangs"
        return pickle.loads(self.pipes[index].recv_bytes())

    def run(self, calls: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Run ``name, *args`` on each process at the same time; return the results."""
        for index, call in calls.items():
            self.start(index, *call)
        return {index: self.result(index) for index in calls}

    def kill(self, index: int) -> None:
        self.processes[index].kill()
        self.processes[index].wait()

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.poll() is None:
                pipe.send_bytes(b"")
                process.wait()
            pipe.close()
