"""The world of a controller: carries out what it says, and checks what must always hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from optuna_fleet.alloc import Allocator, GreedyAllocator, validate
from optuna_fleet.alloc.problem import Assignment, Flotilla, Plan
from optuna_fleet.events import (
    Allocate,
    AnswerEpoch,
    BeginCheck,
    CheckEnded,
    DataRequested,
    DeviceGone,
    DeviceJoined,
    DeviceLost,
    Ending,
    EpochDecision,
    EpochEnded,
    Event,
    FinishTrial,
    GiveUp,
    Interrupt,
    Launch,
    Model,
    PlanDecided,
    ProposalsExhausted,
    Propose,
    RankEnded,
    RateMeasured,
    ReturnToQueue,
    TrialProposed,
)
from optuna_fleet.executor.deciding.controller import Controller
from optuna_fleet.executor.deciding.state import PolicyRules
from optuna_fleet.preflight.verdict import Finding
from optuna_fleet.resources import Device


def joined(index: int, *, node: int = 0, kind: str = "cpu") -> DeviceJoined:
    return DeviceJoined(device=Device(index=index, node=node, kind=kind))


def reached(
    run_id: int, structure: str, *, resumable: bool = True, max_devices: int = 32, **more: Any
) -> DataRequested:
    model = Model(structure=structure, resumable=resumable, max_devices=max_devices, **more)
    return DataRequested(run_id=run_id, model=model)


def epoch_ended(run_id: int, *, epochs_done: int = 1, converged: bool = False) -> EpochEnded:
    return EpochEnded(run_id=run_id, epochs_done=epochs_done, converged=converged)


def rate(run_id: int, samples_per_s: float = 100.0) -> RateMeasured:
    return RateMeasured(run_id=run_id, samples_per_s=samples_per_s)


def goes_on(run_id: int) -> AnswerEpoch:
    return AnswerEpoch(run_id=run_id, decision=EpochDecision.GO)


def yields(run_id: int, *devices: int) -> AnswerEpoch:
    return AnswerEpoch(run_id=run_id, decision=EpochDecision.YIELD, devices=devices)


def plan_of(placed: dict[int, tuple[int, ...]]) -> PlanDecided:
    rated = [Assignment(number=n, devices=d, rate=100.0 * len(d)) for n, d in placed.items()]
    flotillas = tuple(Flotilla(assignments=(assignment,)) for assignment in rated)
    return PlanDecided(plan=Plan(flotillas=flotillas, allocator="", reason="", status="heuristic"))


def launches(instructions: list[Any]) -> list[tuple[int, tuple[int, ...]]]:
    return [(i.number, i.devices) for i in instructions if isinstance(i, Launch)]


class World:
    """Driver, trainers and a study with so many trials; a plan is made when a test says so.

    Or `at_once`. What devices run, and that they are lost, it sees in the events.
    """

    def __init__(
        self,
        num_devices: int = 4,
        trials: int = 4,
        *,
        devices: Iterable[Device] | None = None,
        at_once: bool = False,
        **policy: Any,
    ) -> None:
        self.controller = Controller(PolicyRules(**policy))
        every = (Device(index=d, node=d // 4, kind="cpu") for d in range(num_devices))
        self.devices = [*(every if devices is None else devices)]
        self.allocator: Allocator = GreedyAllocator()
        self.budget = trials
        self.numbers = itertools.count()
        self.runs: dict[int, Launch] = {}
        self.busy: dict[int, int] = {}
        self.done: list[int] = []
        self.log: list[Any] = []
        self.unanswered: list[Allocate] = []
        self.problems: list[Any] = []
        self.yielding: set[int] = set()
        self.check: BeginCheck | None = None  # under way
        self._at_once = at_once
        for device in self.devices:
            self.tell(DeviceJoined(device=device))

    def tell(self, *told: Event) -> list[Any]:
        """Handle events and everything that follows by itself; return the instructions."""
        seen: list[Any] = []
        queue: list[tuple[Event, ...]] = [told]
        while queue:
            for event in queue[0]:
                if isinstance(event, RankEnded | DeviceLost | DeviceGone):
                    run_id = self.busy.pop(event.device, None)
                    if run_id not in self.busy.values():
                        self.runs.pop(-1 if run_id is None else run_id, None)
            for instruction in self.controller.handle(*queue.pop(0)):
                seen.append(instruction)
                queue += [(event,) for event in self._carry_out(instruction)]
            if self._at_once and self.unanswered:
                queue.append((self._plan(),))
        self.log += seen
        return seen

    def _carry_out(self, instruction: Any) -> list[Event]:
        match instruction:
            case Propose():
                if self.budget == 0:
                    return [ProposalsExhausted()]
                self.budget -= 1
                return [TrialProposed(number=next(self.numbers))]
            case Launch():
                checked_on = {self.check.device} if self.check else set()
                used = {*self.busy, *checked_on}
                assert not set(instruction.devices) & used, "a device is used twice"
                assert len(set(instruction.devices)) == len(instruction.devices)
                flying = [run.number for run in self.runs.values()]
                assert instruction.number not in flying, "a trial flies twice"
                self.runs[instruction.run_id] = instruction
                self.busy.update(dict.fromkeys(instruction.devices, instruction.run_id))
            case BeginCheck():
                assert self.check is None, "two checks at once"
                assert instruction.device not in self.busy, "a device is used twice"
                self.check = instruction
            case Allocate():
                self.problems.append(instruction.problem)
                self.unanswered.append(instruction)
            case AnswerEpoch():
                if instruction.decision is EpochDecision.YIELD:
                    self.yielding.add(instruction.run_id)
            case Interrupt():
                self.yielding.add(instruction.run_id)
            case FinishTrial() | GiveUp() | ReturnToQueue():
                assert instruction.number not in self.done, "a trial ends twice"
                self.done.append(instruction.number)
        return []

    def decide(self) -> list[Any]:
        """The solver answers."""
        return self.tell(self._plan())

    def _plan(self) -> PlanDecided:
        problem = self.unanswered.pop(0).problem
        plan = self.allocator.allocate(problem)
        validate(problem, plan)
        return PlanDecided(plan=plan)

    def decide_all(self) -> list[Any]:
        """It answers as long as it is asked."""
        seen: list[Any] = []
        while self.unanswered:
            seen += self.decide()
        return seen

    def settle_all(self) -> None:
        """Let every flying trial be measured and every decision be made."""
        for run_id in list(self.runs):
            self.tell(reached(run_id, f"s{run_id}"))
            self.tell(rate(run_id))
        self.decide_all()

    def checked(self, *, widens: bool = True, moves: bool = True) -> list[Any]:
        """The check under way has come to this."""
        assert self.check is not None
        traits, self.check = self.check.traits, None
        return self.tell(CheckEnded(finding=Finding(traits=traits, widens=widens, moves=moves)))

    def end(self, run_id: int, ending: Ending = Ending.RETURNED) -> list[Any]:
        """All ranks of a run end."""
        seen: list[Any] = []
        for device in self.runs[run_id].devices:
            if self.busy.get(device) == run_id:
                seen += self.tell(RankEnded(run_id=run_id, device=device, ending=ending))
        return seen

    def lose(self, run_id: int) -> None:
        """The trainer of a run's first device dies, its peers notice; then a new one joins."""
        lost, *peers = self.runs[run_id].devices
        self.tell(DeviceLost(device=lost))
        for peer in peers:
            self.tell(RankEnded(run_id=run_id, device=peer, ending=Ending.RAISED))
        self.tell(DeviceJoined(device=self.devices[lost]))
