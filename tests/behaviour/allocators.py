"""Allocators for sweeps under test. A module of its own: the solver's process imports it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optuna_fleet.alloc import AllocationFailed, AllocationProblem, Allocator, Flotilla, Plan
from optuna_fleet.policies import policy_of


@dataclass(frozen=True)
class Told:
    """An allocator that is told rates, and that moves cost nothing: measured ones vary."""

    inner: Allocator
    rates: tuple[tuple[float, ...], ...]

    @property
    def name(self) -> str:
        return self.inner.name

    def allocate(self, problem: AllocationProblem) -> Plan:
        free: dict[str, Any] = {"rates_by_kind": {}, "rescale_up_s": 0.0, "rescale_down_s": 0.0}
        told = [replace(c, rates=self.rates[c.number], **free) for c in problem.candidates]
        plan = self.inner.allocate(replace(problem, candidates=tuple(told), kinds=()))

        def measured(flotilla: Flotilla) -> Flotilla:
            rates = {n: problem.by_number[n].rates for n in problem.by_number}
            own = [
                replace(a, rate=rates[a.number][len(a.devices) - 1]) for a in flotilla.assignments
            ]
            return replace(flotilla, assignments=tuple(own))

        return replace(plan, flotillas=tuple(map(measured, plan.flotillas)))


@dataclass(frozen=True)
class Troubled:
    """Is in trouble as the script says, one decision after the other; then it is well."""

    script: tuple[str, ...]
    folder: Path
    name: str = "troubled"

    def allocate(self, problem: AllocationProblem) -> Any:
        turn = len(list(self.folder.iterdir()))
        (self.folder / f"{turn}").touch()
        plan = policy_of("greedy").new_allocator(0).allocate(problem)
        match self.script[turn] if turn < len(self.script) else "well":
            case "fails":
                raise AllocationFailed("no incumbent")
            case "crashes":
                raise ZeroDivisionError("oh")
            case "talks nonsense":
                return 17
            case "lies":
                return replace(plan, flotillas=plan.flotillas * 2)
            case "hangs":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
        return replace(plan, allocator=self.name)
