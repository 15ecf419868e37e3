"""Allocators that a sweep has to survive. A module of its own: the solver process imports it."""

import os
import signal
import time
from dataclasses import dataclass, replace

from optuna_fleet.alloc import GreedyAllocator


@dataclass(frozen=True)
class Misbehaving:
    """Behaves as told for trial 99, well for any other."""

    how: str
    name: str = "misbehaving"

    def allocate(self, problem):
        plan = GreedyAllocator().allocate(problem)
        if problem.candidates[0].number != 99:
            return replace(plan, allocator=self.name)
        return getattr(self, self.how)(plan)

    def hang(self, plan):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if told := os.environ.get("TELL_HANGING"):
            with open(told, "w"):
                pass
        time.sleep(600)

    def prattle(self, plan):
        os.write(1, b"Cbc0010I After 0 nodes, 1 on tree\n")
        print("Welcome to the CBC MILP Solver", flush=True)
        return replace(plan, allocator=self.name)
