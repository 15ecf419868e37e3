"""Allocators that a sweep has to survive. A module of its own: the solver process imports it."""

import os
import signal
import time
from dataclasses import dataclass, replace

from optuna_fleet.alloc import AllocationFailed, GreedyAllocator


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

    def abort(self, plan):
        os.kill(os.getpid(), signal.SIGABRT)

    def leave(self, plan):
        os._exit(3)

    def hang(self, plan):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if told := os.environ.get("TELL_HANGING"):
            with open(told, "w"):
                pass
        time.sleep(600)

    def fail(self, plan):
        raise AllocationFailed("no incumbent")

    def crash(self, plan):
        raise ZeroDivisionError("oh")

    def lie(self, plan):
        return replace(plan, flotillas=plan.flotillas * 2)

    def prattle(self, plan):
        os.write(1, b"Cbc0010I After 0 nodes, 1 on tree\n")
        print("Welcome to the CBC MILP Solver", flush=True)
        return replace(plan, allocator=self.name)

    def nonsense(self, plan):
        return 17
