"""When a round of plans is over: the global paradigm then decides anew, as all do at first."""

from __future__ import annotations

from collections.abc import Iterable

from optuna_fleet.alloc.problem import Plan
from optuna_fleet.executor.deciding.trials import PolicyRules, Run, Trial


class Rounds:
    """Counts rounds, and how much of the present one is left.

    Attributes:
        number: Of the present round; 0 before the first plan.
    """

    def __init__(self, policy: PolicyRules) -> None:
        self.number = 0
        self._policy = policy
        self._widths: dict[int, int] = {}
        self._awaited: set[int] | None = None

    def begin(self, runs: Iterable[Run], plan: Plan) -> None:
        """A plan is about to be carried out."""
        self.number += 1
        self._widths = {run.number: len(run.devices) for run in runs}
        self._widths.update({n: len(a.devices) for n, a in plan.assignments.items()})

    def is_over(self, trials: dict[int, Trial]) -> bool:
        """Whether fewer than `alpha` of its devices are active; the local paradigm has but one."""
        if self.number == 0:
            return True
        if self._policy.paradigm == "local":
            return False
        active = sum(m for n, m in self._widths.items() if n in trials)
        return active < self._policy.alpha * sum(self._widths.values())

    def awaits(self, unsettled: set[int]) -> bool:
        """Whether the next round should know the rates of runs that are measured now.

        Only those under way when the round ended: where trials are short, there is always some.
        """
        self._awaited = unsettled if self._awaited is None else self._awaited & unsettled
        return bool(self._awaited)

    def decide(self) -> None:
        """A plan is asked for."""
        self._awaited = None
