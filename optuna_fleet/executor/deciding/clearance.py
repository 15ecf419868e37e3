"""Which trials may have several devices, and be moved, by what checks have found. Pure.

A trial is cleared when checks that have passed have had all its traits between them. What nobody
has checked counts as cleared until a plan would make use of that: then the plan is dropped, and a
check is made of the trial's kind, one at a time. Meanwhile what is unchecked stays where it is.
The first check that is wanted so is made at once. Others, and those that are made ahead, come when
they are no more than their share of the devices' time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from optuna_fleet.alloc.problem import Plan
from optuna_fleet.executor.deciding.state import Trial
from optuna_fleet.preflight.verdict import Finding

_FIRST_S = 5.0


def paid_after_s(costs_s: Sequence[float], share: float) -> float:
    """After how many device-seconds another check will be no more than its share, with all so far.

    Args:
        costs_s: Of these.
        share: The part of the devices' time that all may take.
    """
    next_s = costs_s[-1] if costs_s else _FIRST_S
    return (sum(costs_s) + next_s) / share


class Clearance:
    """That of one call.

    Args:
        findings: Of checks of this objective and these data sets; grows, and may outlive the call.

    Attributes:
        wanted: The trial whose kind is to be checked, or is being checked.
        is_affordable: Another check would be no more than its share.
    """

    def __init__(self, findings: list[Finding] | None = None) -> None:
        self.wanted: Trial | None = None
        self.is_affordable = False
        self._has_begun = self._is_under_way = False
        self._findings = [] if findings is None else findings

    def may_widen(self, trial: Trial) -> bool:
        """Whether a plan may give it several devices."""
        return self._may(self._known(trial, "widens"))

    def may_move(self, trial: Trial) -> bool:
        """Whether a plan may give it other devices than it has; if these go it moves anyway."""
        return self._may(self._known(trial, "moves"))

    def _may(self, found: bool | None) -> bool:
        return self.may_begin and self.wanted is None if found is None else found

    @property
    def may_begin(self) -> bool:
        """Whether a check that is wanted may be made."""
        return self.is_affordable or not self._has_begun

    def _known(self, trial: Trial, what: str) -> bool | None:
        """What was found of it: None if nothing was."""
        traits = frozenset() if trial.model is None else trial.model.traits
        if not traits:
            return True
        passed = frozenset[str]()
        for one in reversed(self._findings):
            if one.traits == traits:
                return bool(getattr(one, what))
            if getattr(one, what):
                passed |= one.traits
        return True if traits <= passed else None

    def is_kept(self, plan: Plan, trials: Iterable[Trial]) -> bool:
        """Whether a plan about these trials makes no use of what was not found out.

        Else one of them is wanted to be checked, unless its kind is known to fail by now.
        """
        assignments = plan.assignments
        unchecked: list[Trial] = []
        is_kept = True
        for trial in trials:
            assignment = assignments.get(trial.number)
            devices = set() if assignment is None else set(assignment.devices)
            uses = [self._known(trial, "widens")] if len(devices) > 1 else []
            if trial.run is not None and devices != set(trial.run.devices):
                uses.append(self._known(trial, "moves"))
            is_kept &= all(uses)
            if None in uses:
                unchecked.append(trial)
        if unchecked and self.wanted is None:
            self.wanted = max(unchecked, key=self._num_new)
        return is_kept

    def forget_ended(self, trials: Iterable[Trial]) -> None:
        """What is wanted is no more if its trial is not one of these, and its check not begun."""
        if not self._is_under_way and all(trial is not self.wanted for trial in trials):
            self.wanted = None

    def take(self, trials: Iterable[Trial], *, looks_ahead: bool) -> Trial | None:
        """Return the trial whose check begins now, if any does.

        Args:
            trials: All that are not done.
            looks_ahead: To be checked, nothing need be wanted.
        """
        if self._is_under_way or not self.may_begin:
            return None
        if self.wanted is None and looks_ahead and self.is_affordable:
            unchecked = [
                t for t in trials if None in [self._known(t, what) for what in ("widens", "moves")]
            ]
            self.wanted = max(filter(self._num_new, unchecked), key=self._num_new, default=None)
        if self.wanted is not None:
            self._is_under_way, self.is_affordable, self._has_begun = True, False, True
        return self.wanted

    def _num_new(self, trial: Trial) -> int:
        """How many traits a check of it would be the first to have."""
        known = frozenset[str]().union(*(one.traits for one in self._findings))
        return 0 if trial.model is None else len(trial.model.traits - known)

    def end(self, finding: Finding | None) -> None:
        """The check that was wanted has ended."""
        self.wanted, self._is_under_way = None, False
        if finding is None:
            self.is_affordable = True
        else:
            self._findings.append(finding)
