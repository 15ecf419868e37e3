"""Has nodes check kinds of trials before their flight on several devices, and their moves."""

from __future__ import annotations

import pickle
import time
from collections.abc import Collection
from dataclasses import replace

from optuna_fleet.events import (
    BeginCheck,
    CheckAffordable,
    CheckEnded,
    DataRequested,
    Event,
    Launch,
)
from optuna_fleet.executor.call.launches import objective_on
from optuna_fleet.executor.call.runs import TrialRecord
from optuna_fleet.executor.call.sweep import Sweep
from optuna_fleet.executor.deciding.clearance import paid_after_s
from optuna_fleet.preflight.rehearsals import Order, facts_of
from optuna_fleet.preflight.verdict import Outcome, Verdict
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.wire.node_messages import Checked, CheckObjective, EndCheck

_LOOK_EVERY_S = 5.0  # devices may come, and go

_FIRST = (
    "Trial {number} is checked: its objective's beginning runs several times in processes that "
    "are thrown away, to see whether trials like it give the same on several devices, and when "
    "they are moved (docs/objective.md; FleetExecutor(preflight=False) does without)."
)
_FOUND = "Trials like trial {number}: {finding}. {advice}"


class Checks:
    """Those of one call, one at a time."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._findings = sweep.findings  # what they have come to; outlives the call
        self._options = sweep.job.options.preflight
        self._order: BeginCheck | None = None
        self._id = -1  # of what a node was asked; none yet
        self._began = 0.0
        self._costs_s: list[float] = []
        self._is_affordable = False
        self._told: set[str] = set()

    def note(self, trial: TrialRecord, message: DataRequested) -> DataRequested:
        """A trial says what it is; return what the controller is to know: no traits, if off."""
        if self._options is None:
            return replace(message, model=replace(message.model, traits=frozenset()))
        trial.traits = message.model.traits
        return message

    def begin(self, order: BeginCheck) -> None:
        """Have a kind of trials be checked on a device."""
        if not self._findings.all and not self._costs_s:
            compat.fleet_logger.info(_FIRST.format(number=order.number))
        self._order, self._id, self._began = order, -1, time.time()
        self._is_affordable = False
        self.send_waiting()

    def send_waiting(self) -> None:
        """Ask the node, if it has the objective by now."""
        if self._order is None or self._id >= 0:
            return
        sweep, device, number = self._sweep, self._order.device, self._order.number
        if not (objective_at := objective_on(sweep, device)):
            return
        self._id = next(sweep.runtime.run_ids)
        assert self._options is not None
        order = Order(
            objective_at=objective_at,
            objective_id=sweep.job.objective_id,
            params=sweep.ledger.chosen(number),
            study=facts_of(sweep.ledger.study),
            seed=sweep.job.options.seed,
        )
        message = CheckObjective(
            check_id=self._id, order=pickle.dumps(order), first_limit_s=self._options.limit_s
        )
        sweep.runtime.agents.tell_node_of(device, message)

    def checked(self, message: Checked) -> list[Event]:
        """A node has made a check."""
        if self._order is None or message.check_id != self._id:
            return []
        verdict = Verdict(
            outcome=Outcome.NOT_CHECKED, problem="the process that makes the checks has died"
        )
        if message.verdict:
            verdict = pickle.loads(message.verdict)  # by our own agent's child
        order, self._order = self._order, None
        self._costs_s.append(time.time() - self._began)
        finding, advice = verdict.told()
        if not (verdict.may_widen and verdict.may_move) and finding not in self._told:
            self._told.add(finding)
            text = _FOUND.format(number=order.number, finding=finding, advice=advice)
            compat.fleet_logger.warning(text.strip())
        found = verdict.finding(order.traits)
        self._findings.keep(found, for_good=verdict.outcome is not Outcome.NOT_CHECKED)
        return [CheckEnded(finding=found), *self.look()]

    def node_lost(self, devices: Collection[int]) -> list[Event]:
        """A node is gone with these devices: what was checked there is begun again elsewhere."""
        if self._order is None or self._order.device not in devices:
            return []
        self._order = None
        self._is_affordable = True
        return [CheckEnded(finding=None)]

    def began_anew(self, launch: Launch, trial: TrialRecord) -> str:
        """What begins anew where a trial goes on from its checkpoint; "" if nothing is known."""
        if launch.checkpoint is None or not trial.traits:
            return ""
        found = [one.began_anew for one in self._findings.all if one.traits == trial.traits]
        return found[-1] if found else ""

    def look(self) -> list[Event]:
        """Say whether another one may be made; if not, it is looked again until one may."""
        if self._options is None or self._is_affordable or self._order is not None:
            return []
        there_s = sum(self._sweep.devices.there_s(time.time()).values())
        missing_s = paid_after_s(self._costs_s, self._options.share) - there_s
        if missing_s > 0:  # for which all devices must still work
            num_devices = max(1, len(self._sweep.runtime.nodes.devices))
            self._sweep.later(min(missing_s / num_devices + 0.01, _LOOK_EVERY_S), self.look)
            return []
        self._is_affordable = True
        return [CheckAffordable()]

    def end(self) -> None:
        """The call is over."""
        if self._order is not None:
            self._sweep.runtime.agents.tell_node_of(self._order.device, EndCheck())
