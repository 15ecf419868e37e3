"""A discrete-event simulation that drives the real controller and allocators.

It does what driver, trainers and cluster do in a real sweep, with a clock of its own.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from typing_extensions import assert_never

from optuna_fleet.alloc.isolation import in_process
from optuna_fleet.alloc.problem import AllocationProblem, Allocator, Plan
from optuna_fleet.alloc.rates import RateProfile
from optuna_fleet.alloc.rounds import CAUTIOUS
from optuna_fleet.events import (
    Abort,
    Allocate,
    AnswerEpoch,
    BeginCheck,
    CheckAffordable,
    CheckEnded,
    CheckpointSaved,
    DataRequested,
    DeviceGone,
    DeviceJoined,
    Ending,
    EpochDecision,
    EpochEnded,
    Event,
    FinishTrial,
    GiveUp,
    Instruction,
    Interrupt,
    Launch,
    PlanDecided,
    ProposalDelayed,
    ProposalsExhausted,
    Propose,
    RankEnded,
    RateMeasured,
    Requeue,
    ReturnToQueue,
    StartRound,
    TrialProposed,
)
from optuna_fleet.executor.deciding.clearance import paid_after_s
from optuna_fleet.executor.deciding.controller import Controller
from optuna_fleet.executor.deciding.state import PolicyRules
from optuna_fleet.preflight.verdict import Finding
from optuna_fleet.replay.progress import (
    Outcome,
    Progress,
    SimulatedRun,
    capacity,
    charge_loss,
    charge_start,
)
from optuna_fleet.replay.workload import FleetChange, Rules, SimulatedTrial
from optuna_fleet.resources import Fleet


class Simulation:
    """One simulated sweep.

    Args:
        fleet: All devices that ever join.
        trials: In order of submission.
        policy: The controller's.
        allocator: Decides; solver time does not count as simulated time.
        profiles: What the policy believes of the rates; see `believed_profiles`.
        rules: How the world behaves.
    """

    def __init__(
        self,
        fleet: Fleet,
        trials: Sequence[SimulatedTrial],
        policy: PolicyRules,
        allocator: Allocator,
        profiles: dict[str, RateProfile],
        rules: Rules,
    ) -> None:
        waits = replace(policy, more_may_join=True)  # `run` knows when none will
        self._controller = Controller(waits, profiles=profiles)
        self._allocator = allocator
        self._devices = {device.index: device for device in fleet.devices}
        self._trials = trials
        self._probes = policy.lookahead == 0  # as in a real sweep
        self._rules = rules
        made_per_s = rules.preprocess_samples_per_s or math.inf
        self._fastest = made_per_s / (len(fleet) if policy.own_preprocessors else 1)
        self._now = 0.0
        self._next_trial = 0
        self._outcome = Outcome()
        self._progress = self._outcome.trials
        self._flights: dict[int, SimulatedRun] = {}
        self._events: list[Event] = []
        self._unseen: list[Event] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._present: dict[int, float] = {}
        self._flotilla_of: dict[int, tuple[int, int]] = {}
        self._are_checked = any(trial.traits for trial in trials)  # until the first is due

    def run(self, changes: Iterator[FleetChange], until_s: float | None = None) -> Outcome:
        """Simulate until every trial has ended, or until `until_s`.

        Args:
            changes: Devices that join and leave, in order of time.
            until_s: When to stop at the latest, in seconds.

        Raises:
            RuntimeError: Trials are left, but nothing can happen any more.
        """
        change = next(changes, None)
        while not self._controller.finished:
            timer_s = self._timers[0][0] if self._timers else float("inf")
            change_s = change.time_s if change else float("inf")
            if until_s is not None and min(timer_s, change_s) > until_s:
                self._now = until_s
                break
            if change is not None and change_s <= timer_s:
                self._now = change_s
                self._change_fleet(change)
                change = next(changes, None)
            elif self._timers:
                self._now, _, happen = heapq.heappop(self._timers)
                happen()
            else:
                raise RuntimeError("Trials are left, but no device to fly on will ever join.")
            self._work()
        return self._ended()

    # -- what happens -----------------------------------------------------------------------------

    def _change_fleet(self, change: FleetChange) -> None:
        losses = tuple(DeviceGone(device=d) for d in change.left)
        for device in change.left:
            self._outcome.present_s[device] += self._now - self._present.pop(device)
        for device in change.joined:
            self._present[device] = self._now
        joins = tuple(DeviceJoined(device=self._devices[d]) for d in change.joined)
        self._events += [*self._unseen, *losses, *joins]
        self._unseen.clear()
        if self._are_checked:
            self._are_checked = False
            self._await_share()

    def _measured(self, run_id: int) -> None:
        if (flight := self._flights.get(run_id)) is not None:
            self._events.append(RateMeasured(run_id=run_id, samples_per_s=flight.rate))

    def _epoch_ended(self, run_id: int, version: int) -> None:
        flight = self._flights.get(run_id)
        if flight is None or flight.version != version:
            return
        flight.advance(self._now)
        progress = flight.progress
        progress.epochs_done += 1
        # The sum of many small steps: exactly an epoch's end.
        progress.samples = progress.epochs_done * progress.trial.samples_per_epoch
        if progress.epochs_done == progress.trial.epochs:
            progress.ended_s = self._now
            self._see(self._ranks_ended(flight, Ending.RETURNED))
        else:
            flight.waits = True
            if made_per_s := self._rules.preprocess_samples_per_s:
                self._events.append(capacity(self._flights.values(), made_per_s))
            self._events += _end_of_epoch(flight)

    def _see(self, events: tuple[Event, ...]) -> None:
        if self._rules.seen_at == "completions":
            self._events += events
        else:
            self._unseen += events

    def _ranks_ended(self, flight: SimulatedRun, ending: Ending) -> tuple[RankEnded, ...]:
        flight.waits = True
        flight.version += 1
        return tuple(
            RankEnded(run_id=flight.run_id, device=device, ending=ending)
            for device in flight.devices
        )

    def _proposal(self) -> tuple[Event, ...]:
        if self._next_trial == len(self._trials):
            return (ProposalsExhausted(),)
        trial, number = self._trials[self._next_trial], self._next_trial
        if trial.submit_s > self._now:
            self._set_timer(trial.submit_s, lambda: self._see(self._proposal()))
            return (ProposalDelayed(),)
        self._next_trial += 1
        self._progress[number] = Progress(trial=trial)
        to_come = len(self._trials) - self._next_trial
        model = None if self._probes else trial.model
        return (TrialProposed(number=number, model=model, num_to_come=to_come),)

    # -- what to do -------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._events:
            events, self._events = self._events, []
            for instruction in self._controller.handle(*events):
                self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:  # noqa: C901 - one arm per instruction
        match instruction:
            case Propose():
                self._events += self._proposal()
            case Launch():
                self._launch(instruction)
            case BeginCheck():
                self._check(instruction)
            case Allocate():
                decided = PlanDecided(plan=self._plan_for(instruction.problem))
                if self._rules.decision_s:
                    self._tell_at(self._now + self._rules.decision_s, decided)
                else:
                    self._events.append(decided)
            case AnswerEpoch():
                self._answer_epoch(self._flights[instruction.run_id], instruction.decision)
            case Interrupt():
                flight = self._flights[instruction.run_id]
                if flight.progress.ended_s is None:
                    flight.advance(self._now)
                    self._events += self._ranks_ended(flight, Ending.YIELDED)
            case Abort():
                self._abort(instruction)
            case FinishTrial() | Requeue() | GiveUp():
                self._end_flight(instruction.run_id)
            case StartRound():
                self._group(instruction)
            case ReturnToQueue():
                raise AssertionError("simulated trials need no probe")
            case _:
                assert_never(instruction)

    def _check(self, order: BeginCheck) -> None:
        self._outcome.checked.append(order.traits)
        ended = CheckEnded(finding=Finding(traits=order.traits, widens=True, moves=True))
        self._tell_at(ended_s := self._now + self._rules.check_s, ended)
        self._await_share(ended_s)

    def _await_share(self, after_s: float = 0.0) -> None:
        """Tell when another check is affordable, with as many devices as now."""
        now_s = sum(self._now - joined_s for joined_s in self._present.values())
        costs_s = [self._rules.check_s] * len(self._outcome.checked)
        missing_s = paid_after_s(costs_s, self._rules.check_share) - now_s
        missing_s -= sum(self._outcome.present_s.values())
        missing_s /= max(1, len(self._present))
        self._tell_at(max(after_s, self._now + missing_s), CheckAffordable())

    def _plan_for(self, problem: AllocationProblem) -> Plan:
        plan = in_process(self._allocator, CAUTIOUS, problem)
        self._outcome.solve_s.append(plan.solve_time_s)
        return plan

    def _launch(self, launch: Launch) -> None:
        progress = self._progress[launch.number]
        num_by_kind = self._num_by_kind(launch.devices)
        rate = progress.trial.rate_on(num_by_kind)
        flight = SimulatedRun(
            run_id=launch.run_id,
            number=launch.number,
            devices=launch.devices,
            progress=progress,
            launched_s=self._now,
            rate=rate,
            pace=min(rate, self._fastest),
            since_s=self._now,
            round=launch.round,
            samples_before=progress.samples,
        )
        charge_start(progress, num_by_kind, self._now, self._rules)
        if progress.begun_s is None:
            progress.begun_s = self._now
        progress.num_by_kind = num_by_kind
        self._flights[launch.run_id] = flight
        if launch.measure:
            measured_s = self._now + self._rules.profile_samples / rate
            self._set_timer(measured_s, partial(self._measured, launch.run_id))
        self._go_on(flight)
        self._couple(launch.number)
        if launch.probe:
            reached = DataRequested(run_id=launch.run_id, model=progress.trial.model)
            too_few = len(launch.devices) < progress.trial.min_devices
            ended = self._ranks_ended(flight, Ending.YIELDED) if too_few else ()
            self._events += [reached, *ended]

    def _answer_epoch(self, flight: SimulatedRun, decision: EpochDecision) -> None:
        if decision is EpochDecision.YIELD:
            self._events += self._ranks_ended(flight, Ending.YIELDED)
        else:
            flight.since_s = self._now
            self._go_on(flight)

    def _go_on(self, flight: SimulatedRun) -> None:
        flight.waits = False
        flight.version += 1
        ended = partial(self._epoch_ended, flight.run_id, flight.version)
        self._set_timer(max(self._now, flight.epoch_end_s()), ended)

    def _abort(self, instruction: Abort) -> None:
        flight = self._flights[instruction.run_id]
        if not flight.waits:
            flight.advance(self._now)
        ended = self._ranks_ended(flight, Ending.ABORTED)
        self._events += [e for e in ended if e.device in instruction.devices]

    def _end_flight(self, run_id: int) -> None:
        flight = self._flights.pop(run_id)
        if not flight.waits:  # all its devices were lost at once
            flight.advance(self._now)
        flight.progress.landed_s = self._now
        left = [device for device in flight.devices if device in self._present]
        if len(left) < len(flight.devices) and flight.progress.ended_s is None:
            charge_loss(flight.progress, self._num_by_kind(left), self._rules)
        self._outcome.add_run(flight, self._now)
        self._couple(flight.number)

    def _num_by_kind(self, devices: Iterable[int]) -> Mapping[str, int]:
        return Counter(self._devices[device].kind for device in devices)

    # -- flotillas --------------------------------------------------------------------------------

    def _group(self, instruction: StartRound) -> None:
        for k, flotilla in enumerate(instruction.plan.flotillas):
            for assignment in flotilla.assignments:
                self._flotilla_of[assignment.number] = (instruction.round, k)

    def _couple(self, number: int) -> None:
        """Lets the members of a trial's flotilla advance alike, if they share a ring."""
        if not self._rules.coupled or (flotilla := self._flotilla_of.get(number)) is None:
            return
        flying = self._flights.values()
        members = [f for f in flying if self._flotilla_of.get(f.number) == flotilla]
        pace = min([self._fastest, *(f.rate for f in members)])
        for flight in members:
            if flight.pace != pace:
                waits = flight.waits
                flight.advance(self._now)
                flight.pace = pace
                if not waits:
                    self._go_on(flight)

    def _tell_at(self, time_s: float, event: Event) -> None:
        self._set_timer(time_s, lambda: self._events.append(event))

    def _set_timer(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time_s, next(self._order), happen))

    def _ended(self) -> Outcome:
        for flight in self._flights.values():
            flight.advance(self._now)
            self._outcome.add_run(flight, self._now)
        for device, joined_s in self._present.items():
            self._outcome.present_s[device] += self._now - joined_s
        self._outcome.end_s = self._now
        return self._outcome


def _end_of_epoch(flight: SimulatedRun) -> tuple[Event, ...]:
    """With a checkpoint: a loss costs no more than what was done of an epoch."""
    run_id, progress = flight.run_id, flight.progress
    return (
        CheckpointSaved(run_id=run_id, epoch=progress.epochs_done, location="simulated"),
        EpochEnded(
            run_id=run_id,
            epochs_done=progress.epochs_done,
            converged=False,
            predicted_epochs=progress.trial.predicted_epochs,
        ),
    )
