"""Has nodes check kinds of trials before their flight on several devices, and their moves."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from optuna_fleet.events import (
    BeginCheck,
    CheckAffordable,
    CheckEnded,
    DataRequested,
    Event,
    Launch,
)
from optuna_fleet.executor.call.journal import DeviceLog
from optuna_fleet.executor.call.launcher import ObjectiveCopies
from optuna_fleet.executor.call.runs import Job, TrialRecord
from optuna_fleet.executor.deciding.clearance import paid_after_s
from optuna_fleet.executor.fleet.runtime import Runtime
from optuna_fleet.preflight.findings import Findings
from optuna_fleet.preflight.notes import Order, facts_of
from optuna_fleet.preflight.verdict import Outcome, Verdict
from optuna_fleet.sampler_bridge import compat
from optuna_fleet.sampler_bridge.ledger import Ledger
from optuna_fleet.wire.node_messages import Checked, CheckObjective, EndCheck

_LOOK_EVERY_S = 5.0  # devices may come, and go

_FIRST = (
    "Trial {number} is checked: its objective's beginning runs several times in processes that "
    "are thrown away, to see whether trials like it give the same on several devices, and when "
    "they are moved (docs/objective.md; FleetExecutor(preflight=False) does without)."
)
_FOUND = "Trials like trial {number}: {finding}. {advice}"


class Checks:
    """Those of one call, one at a time.

    Args:
        findings: What they have come to; outlives the call.
        devices: When which device was there.
        later: Has `look` called so many seconds from now.
    """

    def __init__(
        self,
        runtime: Runtime,
        job: Job,
        ledger: Ledger,
        copies: ObjectiveCopies,
        findings: Findings,
        devices: DeviceLog,
        later: Callable[[float, Callable[[], list[Event]]], None],
    ) -> None:
        self._runtime = runtime
        self._job = job
        self._ledger = ledger
        self._copies = copies
        self._findings = findings
        self._devices = devices
        self._later = later
        self._order: BeginCheck | None = None
        self._id = -1  # of what a node was asked; none yet
        self._began = 0.0
        self._costs_s: list[float] = []
        self._is_affordable = False
        self._told: set[str] = set()

    def note(self, trial: TrialRecord, message: DataRequested) -> DataRequested:
        """A trial says what it is; return what the controller is to know: no traits, if off."""
        if self._job.options.preflight is None:
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
        process = self._runtime.trainers.process_on(self._order.device)
        objective_at = self._copies.on_device(self._order.device)
        if process is None or objective_at is None:
            return
        self._id = next(self._runtime.run_ids)
        assert self._job.options.preflight is not None
        order = self._rehearsed(self._order.number, objective_at)
        limit_s = self._job.options.preflight.limit_s
        message = CheckObjective(
            check_id=self._id, order=pickle.dumps(order), first_limit_s=limit_s
        )
        self._runtime.agents.tell(process.agent, message)

    def _rehearsed(self, number: int, objective_at: str) -> Order:
        return Order(
            objective_at=objective_at,
            objective_id=self._job.objective_id,
            params=self._ledger.chosen(number),
            study=facts_of(self._ledger.study),
            seed=self._job.options.seed,
        )

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

    # -- its share of the devices' time -----------------------------------------------------------

    def _missing_s(self) -> float:
        """Seconds for which all devices must still work, until the next one is affordable."""
        assert self._job.options.preflight is not None
        there_s = sum(self._devices.there_s(time.time()).values())
        return paid_after_s(self._costs_s, self._job.options.preflight.share) - there_s

    def look(self) -> list[Event]:
        """Say whether another one may be made; if not, it is looked again until one may."""
        is_off = self._job.options.preflight is None
        if is_off or self._is_affordable or self._order is not None:
            return []
        if (missing_s := self._missing_s()) > 0:
            all_work_s = missing_s / max(1, len(self._runtime.nodes.devices)) + 0.01
            self._later(min(all_work_s, _LOOK_EVERY_S), self.look)
            return []
        self._is_affordable = True
        return [CheckAffordable()]

    def end(self) -> None:
        """The call is over."""
        if self._order is not None:
            self._runtime.agents.tell_node_of(self._order.device, EndCheck())
