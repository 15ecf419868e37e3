"""Processes that stand for trainers: they run jobs by name and live as long as a test module."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Failure:
    kind: str
    text: str


def _serve(pipe: Any, folder: str) -> None:
    sys.path.insert(0, folder)
    import torch

    torch.set_num_threads(1)
    jobs = importlib.import_module("rank_jobs")
    while True:
        request = pipe.recv()
        if request is None:
            return
        name, args = request
        try:
            pipe.send(getattr(jobs, name)(*args))
        except Exception as error:
            pipe.send(Failure(type(error).__name__, traceback.format_exc()))


class RankPool:
    def __init__(self, num_ranks: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "optuna_fleet.trainer.training"])
        self.pipes, self.processes = [], []
        for _ in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, str(Path(__file__).parent)), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def start(self, index: int, name: str, *args: Any) -> None:
        self.pipes[index].send((name, args))

    def result(self, index: int) -> Any:
        assert self.pipes[index].poll(800), f"process {index} hangs"
        return self.pipes[index].recv()

    def run(self, calls: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Run ``name, *args`` on each process at the same time; return the results."""
        for index, call in calls.items():
            self.start(index, *call)
        return {index: self.result(index) for index in calls}

    def kill(self, index: int) -> None:
        os.kill(self.processes[index].pid, signal.SIGKILL)
        self.processes[index].join()

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
                process.join(10)
            pipe.close()
