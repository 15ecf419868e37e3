"""The controller among random events: refused moves, late plans, losses. Nobody waits for nothing.

The world below is that of driver and trainers, without time: what can happen next is a list, and a
seed says what does.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optuna_fleet.alloc import (
    Allocator,
    ElasticAllocator,
    GreedyAllocator,
    validate,
)
from optuna_fleet.alloc.problem import AllocationProblem, Assignment, Flotilla, Plan
from optuna_fleet.events import (
    Abort,
    Allocate,
    AnswerEpoch,
    BeginCheck,
    CheckAffordable,
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
    MoveRefused,
    PlanDecided,
    ProposalDelayed,
    ProposalsExhausted,
    Propose,
    RankEnded,
    RateMeasured,
    Requeue,
    ReturnToQueue,
    RunFailed,
    RunLingers,
    TrialProposed,
    WidthLimited,
)
from optuna_fleet.executor.deciding.controller import Controller
from optuna_fleet.executor.deciding.state import PolicyRules, Status
from optuna_fleet.preflight.verdict import Finding
from optuna_fleet.resources import Device

STEPS = 60


@dataclass
class Anything:
    """Moves, stops and starts whom it likes, but leaves no device idle that a trial could use."""

    rng: random.Random
    name: str = "anything"

    def allocate(self, problem: AllocationProblem) -> Plan:
        placed = {n: problem.by_number[n].devices for n in problem.pinned}
        free = sorted(set(problem.devices).difference(*placed.values()))
        others = [c for n, c in problem.by_number.items() if n not in placed]
        self.rng.shuffle(others)
        for candidate in others:
            if (
                candidate.devices
                and set(candidate.devices) <= set(free)
                and self.rng.random() < 0.3
            ):
                placed[candidate.number] = candidate.devices
            elif free and self.rng.random() < 0.7:
                most = min(len(free), candidate.widest)
                devices = self.rng.sample(free, self.rng.randint(1, most))
                placed[candidate.number] = tuple(devices)
            free = [d for d in free if d not in placed.get(candidate.number, ())]
        for candidate in others:
            if free and candidate.number not in placed:
                placed[candidate.number] = (free.pop(),)
        assignments = (
            Assignment(number=n, devices=devices, rate=problem.by_number[n].rate(len(devices)))
            for n, devices in placed.items()
        )
        return Plan(
            flotillas=tuple(Flotilla(assignments=(a,)) for a in assignments),
            allocator=self.name,
            reason="",
            status="heuristic",
        )


@dataclass
class Ranks:
    """A run, as its ranks see it."""

    launch: Launch
    left: list[int]
    has_reached: bool = False
    has_told_rate: bool = False
    rests: bool = False
    yields: bool = False
    has_refused: bool = False
    is_cut: bool = False
    is_killed: bool = False
    lingers: bool = False
    ending: Ending | None = None
    ended: set[int] = field(default_factory=set)

    @property
    def goes_on(self) -> bool:
        """Nobody expects that it ends."""
        return len(self.left) == len(self.launch.devices) and not self.is_cut


@dataclass
class World:
    """Driver, trainers and study; checks the controller after each event."""

    controller: Controller
    allocator: Allocator
    rng: random.Random
    budget: int
    knows_models: bool = False
    has_wide_trials: bool = False
    fleet: list[Device] = field(default_factory=list)
    devices: set[int] = field(default_factory=set)
    runs: dict[int, Ranks] = field(default_factory=dict)
    unanswered: list[AllocationProblem] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    limited: set[int] = field(default_factory=set)
    is_delayed: bool = False
    is_draining: bool = False
    has_traits: bool = False
    checks: frozenset[str] | None = None  # what is checked at the moment
    checked_on: set[int] = field(default_factory=set)  # unless that is lost
    findings: dict[frozenset[str], Finding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.numbers = itertools.count()

    # -- instructions -----------------------------------------------------------------------------

    def tell(self, *events: Event) -> list[Any]:
        seen: list[Any] = []
        queue = [events]
        while queue:
            for instruction in self.controller.handle(*queue.pop(0)):
                seen.append(instruction)
                queue += [(event,) for event in self.carry_out(instruction)]
        self.check()
        return seen

    def carry_out(self, instruction: Any) -> list[Event]:  # noqa: C901 - one arm per instruction
        match instruction:
            case Propose():
                if self.rng.random() < 0.1 and not self.is_draining:
                    self.is_delayed = True
                    return [ProposalDelayed()]
                return [self.proposal()]
            case Launch():
                self.launch(instruction)
            case BeginCheck():
                assert self.checks is None, "two checks at once"
                assert instruction.device in self.devices - self.busy()
                self.checks, self.checked_on = instruction.traits, {instruction.device}
            case Allocate():
                assert not self.unanswered, "a plan is asked for while another is made"
                self.unanswered.append(instruction.problem)
            case AnswerEpoch():
                run = self.runs[instruction.run_id]
                assert run.rests, "a question that nobody asked is answered"
                run.rests = False
                run.yields = instruction.decision is EpochDecision.YIELD
                assert not (run.yields and run.has_refused), "a trial is asked again"
            case Interrupt():
                self.runs[instruction.run_id].yields = True
            case Abort():
                run = self.runs[instruction.run_id]
                assert sorted(instruction.devices) == sorted(run.left)
                run.is_cut, run.is_killed = True, run.is_killed or instruction.lost
            case FinishTrial() | GiveUp():
                self.land(instruction.run_id)
                self.done.append(instruction.number)
            case ReturnToQueue():
                self.done.append(instruction.number)
            case Requeue():
                self.land(instruction.run_id)
        return []

    def proposal(self) -> Event:
        if self.budget == 0:
            return ProposalsExhausted()
        self.budget -= 1
        number = next(self.numbers)
        model = self.model_of(number) if self.knows_models else None
        return TrialProposed(number=number, model=model)

    def model_of(self, number: int) -> Model:
        return Model(
            structure="known" if self.knows_models else f"{number % 3}",
            resumable=self.knows_models or number % 5 > 0,
            min_devices=self.min_devices(number),
            max_devices=8,
            spans_types=self.spans_types(number),
            traits=self.traits_of(number),
        )

    def min_devices(self, number: int) -> int:
        kinds = [device.kind for device in self.fleet]
        of_one = max(map(kinds.count, kinds))
        most = len(kinds) if self.spans_types(number) else of_one
        return min(1 + number % 4, most) if self.has_wide_trials else 1

    def spans_types(self, number: int) -> bool:
        return number % 2 == 1 and len({device.kind for device in self.fleet}) > 1

    def traits_of(self, number: int) -> frozenset[str]:
        is_checked = self.has_traits and self.min_devices(number) == 1
        return frozenset({f"{number % 3}"} if is_checked else ())

    def busy(self) -> set[int]:
        return self.checked_on.union(*(run.left for run in self.runs.values()))

    def launch(self, launch: Launch) -> None:
        assert len(set(launch.devices)) == len(launch.devices)
        assert self.devices >= set(launch.devices), "a run begins where no trainer is"
        assert not self.busy() & set(launch.devices), "a run begins where another is"
        kinds = {known.kind for known in self.fleet if known.index in launch.devices}
        assert len(kinds) == 1 or self.spans_types(launch.number)
        if len(launch.devices) > 1 and (traits := self.traits_of(launch.number)):
            assert self.findings[traits].widens, "what was not cleared is widened"
        assert launch.number not in [run.launch.number for run in self.runs.values()]
        assert launch.number not in self.done
        assert len(launch.devices) == 1 or launch.number not in self.limited
        assert launch.probe or len(launch.devices) >= self.min_devices(launch.number)
        self.runs[launch.run_id] = Ranks(launch=launch, left=list(launch.devices))

    def land(self, run_id: int) -> None:
        assert not self.runs.pop(run_id).left
        self.over.append(run_id)

    # -- what must hold after each event ----------------------------------------------------------

    def check(self) -> None:
        state = self.controller._state
        promised = [d for a in state.pending.values() for d in a.devices]
        assert len(promised) == len(set(promised)), "a device is promised twice"
        for number, assignment in state.pending.items():
            assert state.can_serve(assignment), f"trial {number} waits for what never falls free"
        for run in self.runs.values():
            if run.has_refused and run.goes_on:
                assert not set(promised) & set(run.left), "somebody waits for who stays"
        ending = [run.ended for run in self.runs.values() if not run.lingers]
        free = self.devices - self.busy() - set(promised).union(*ending)
        waiting = [
            number
            for number, trial in state.trials.items()
            if trial.status in (Status.WAITING, Status.PROPOSED) and number not in state.pending
        ]
        if self.unanswered:
            return
        wide = [number for number in waiting if self.min_devices(number) > 1]
        planner = self.controller._planner
        if not planner.takes_new:  # a round is under way: what its trials leave stays free
            waiting = [n for n in waiting if planner.may_start(state.trials[n])]
        for number in set(waiting).difference(wide):
            usable = {device for device in free if self.may_start(number, device)}
            assert not usable, f"{usable} are idle while trial {number} waits"
        assert not [run for run in self.runs.values() if run.rests], "nobody answers a trial"
        may_ask = self.budget > 0 and not self.is_delayed and not wide and planner.takes_new
        assert not (may_ask and free), "devices are idle, and the study is not asked for trials"

    def may_start(self, number: int, device: int) -> bool:
        """With its last restart a trial waits for a node that it was not lost on."""
        trial, problems = self.controller._state.trials[number], self.controller._problems
        node = next(known.node for known in self.fleet if known.index == device)
        return node not in trial.lost_on or not problems.waits(trial)

    # -- what may happen --------------------------------------------------------------------------

    def step(self) -> bool:
        """Let something happen; return whether anything could."""
        choices = self.choices()
        if choices:
            self.rng.choice(choices)()
        return bool(choices)

    def choices(self) -> list[Callable[[], Any]]:
        choices: list[Callable[[], Any]] = []
        if self.unanswered:
            choices.append(self.decide)
        if self.is_delayed:
            choices.append(self.propose_late)
        if self.checks is not None:
            choices.append(self.end_check)
        elif self.has_traits and not self.is_draining:
            choices.append(self.afford_check)
        for run_id, run in self.runs.items():
            choices += [self.bind(action, run_id) for action in self.actions(run)]
            if run.ended and not run.lingers:
                choices.append(self.bind(self.linger, run_id))
        absent = {device.index for device in self.fleet} - self.devices
        choices += [self.bind(self.join, device) for device in absent]
        if not self.is_draining:
            if self.rng.random() < 0.1:
                choices.append(self.node_leaves)
            choices += [self.bind(self.lose, d) for d in self.devices if self.rng.random() < 0.1]
            if self.over:
                choices.append(self.say_something_late)
        return choices

    def bind(self, action: Callable[[int], Any], about: int) -> Callable[[], Any]:
        return lambda: action(about)

    def actions(self, run: Ranks) -> list[Callable[[int], Any]]:
        if run.is_killed:
            return [self.kill_rank]
        if run.is_cut:
            return [self.kill_rank, self.end_rank]
        if run.ending is not None:
            return [self.end_rank]
        if run.rests:
            return []
        if run.yields:
            return [self.begin_to_yield, *([] if self.is_draining else [self.refuse])]
        if not run.has_reached:
            return [self.reach]
        tells = [] if run.has_told_rate else [self.measure]
        if self.is_draining:
            return [*tells, self.begin_to_end, self.epoch]
        single = len(run.launch.devices) == 1 and not self.has_wide_trials
        rare = [self.condemn, self.raise_alone, self.begin_to_end]
        rare += [self.limit] if single else []
        return [*tells, self.epoch, self.epoch, self.epoch, self.rng.choice(rare)]

    def decide(self) -> None:
        problem = self.unanswered[0]
        plan = self.allocator.allocate(problem)
        validate(problem, plan)
        self.unanswered.clear()
        self.tell(PlanDecided(plan=plan))

    def propose_late(self) -> None:
        self.is_delayed = False
        self.tell(self.proposal())

    def afford_check(self) -> None:
        self.tell(CheckAffordable())

    def end_check(self) -> None:
        """It was lost, or has found something."""
        assert self.checks is not None
        traits, self.checks, finding = self.checks, None, None
        self.checked_on.clear()
        if self.is_draining or self.rng.random() < 0.8:
            widens, moves = (self.rng.random() < 0.7 for _ in range(2))
            finding = Finding(traits=traits, widens=widens, moves=moves)
            self.findings[traits] = finding
        self.tell(CheckEnded(finding=finding))

    def reach(self, run_id: int) -> None:
        run = self.runs[run_id]
        run.has_reached = True
        run.has_told_rate = not run.launch.measure
        model = self.model_of(run.launch.number)
        if len(run.launch.devices) < model.min_devices:
            run.ending = Ending.YIELDED
        self.tell(DataRequested(run_id=run_id, model=model))

    def measure(self, run_id: int) -> None:
        self.runs[run_id].has_told_rate = True
        self.tell(RateMeasured(run_id=run_id, samples_per_s=self.rng.uniform(1, 100)))

    def limit(self, run_id: int) -> None:
        self.limited.add(self.runs[run_id].launch.number)
        self.tell(WidthLimited(run_id=run_id, max_devices=1))

    def epoch(self, run_id: int) -> None:
        self.runs[run_id].rests = True
        self.tell(EpochEnded(run_id=run_id, epochs_done=1, converged=False))

    def refuse(self, run_id: int) -> None:
        self.runs[run_id].yields, self.runs[run_id].has_refused = False, True
        self.tell(MoveRefused(run_id=run_id))

    def begin_to_yield(self, run_id: int) -> None:
        self.runs[run_id].ending = Ending.YIELDED
        self.end_rank(run_id)

    def begin_to_end(self, run_id: int) -> None:
        self.runs[run_id].ending = Ending.RETURNED
        self.end_rank(run_id)

    def raise_alone(self, run_id: int) -> None:
        self.end_rank(run_id, Ending.RAISED)

    def end_rank(self, run_id: int, ending: Ending | None = None) -> None:
        run = self.runs[run_id]
        device = run.left.pop(self.rng.randrange(len(run.left)))
        run.ended.add(device)
        ending = ending or run.ending or Ending.ABORTED
        run.rests = False
        leaves = self.rng.random() < 0.1
        self.devices -= {device} if leaves else set()
        ended = RankEnded(run_id=run_id, device=device, ending=ending, is_leaving=leaves)
        self.tell(ended, *([DeviceLost(device=device)] if leaves else []))

    def linger(self, run_id: int) -> None:
        self.runs[run_id].lingers = True
        self.tell(RunLingers(run_id=run_id))

    def kill_rank(self, run_id: int) -> None:
        self.lose(self.rng.choice(self.runs[run_id].left), by_order=True)

    def condemn(self, run_id: int) -> None:
        self.tell(RunFailed(run_id=run_id))

    def forget(self, device: int) -> None:
        self.devices.discard(device)
        self.checked_on.discard(device)
        for run in self.runs.values():
            if device in run.left:
                run.left.remove(device)
                run.rests = False

    def lose(self, device: int, *, by_order: bool = False) -> None:
        self.forget(device)
        self.tell(DeviceLost(device=device, by_order=by_order))

    def node_leaves(self) -> None:
        """With all its devices: those that are there, and those whose trainers were to come."""
        node = self.rng.choice(self.fleet).node
        events: list[Event] = []
        for device in [device.index for device in self.fleet if device.node == node]:
            if self.rng.random() < 0.5:
                events.append(DeviceLost(device=device, with_node=True))
            events.append(DeviceGone(device=device))
            self.forget(device)
        self.tell(*events)

    def join(self, device: int) -> None:
        self.devices.add(device)
        (joins,) = (known for known in self.fleet if known.index == device)
        self.tell(DeviceJoined(device=joins))

    def say_something_late(self) -> None:
        run_id = self.rng.choice(self.over)
        events: list[Event] = [
            MoveRefused(run_id=run_id),
            EpochEnded(run_id=run_id, epochs_done=3, converged=False),
            RateMeasured(run_id=run_id, samples_per_s=1.0),
            RankEnded(run_id=run_id, device=0, ending=Ending.YIELDED),
            WidthLimited(run_id=run_id, max_devices=1),
            RunLingers(run_id=run_id),
        ]
        self.tell(self.rng.choice(events))

    # -- the end ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Let all trials come to their end: nothing goes wrong any more."""
        self.is_draining = True
        for _ in range(100_000):
            if self.controller.finished or not self.step():
                break
        assert self.controller.finished, "nothing can happen any more, but trials are left"
        assert self.budget == 0
        assert sorted(self.done) == list(range(next(self.numbers)))


def world_of(
    seed: int, allocator: Allocator | None = None, *, devices: int, trials: int, **policy: Any
) -> World:
    rng = random.Random(seed)
    kinds = rng.choice(["a", "ab"]) if allocator else "a"  # `Anything` knows no types
    indices = rng.sample(range(3 * devices), devices)  # with gaps, in any order
    return World(
        controller=Controller(PolicyRules(max_restarts=2, **policy)),
        fleet=[
            Device(index=index, node=7 - k // 2, kind=rng.choice(kinds))
            for k, index in enumerate(indices)
        ],
        allocator=allocator or Anything(rng),
        rng=rng,
        budget=trials,
        knows_models=rng.random() < 0.3,
        has_traits=rng.random() < 0.4,
    )


def play_out(world: World) -> None:
    """Let devices join, things happen, and all trials come to their end."""
    for device in world.fleet:
        world.join(device.index)
    for _ in range(STEPS):
        if world.controller.finished:
            break
        world.step()
    world.drain()


ALLOCATORS = (None, GreedyAllocator(), ElasticAllocator())


@pytest.mark.parametrize("allocator", ALLOCATORS, ids=lambda one: one and one.name)
@pytest.mark.parametrize("paradigm", ["global", "local", "elastic"])
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    devices=st.integers(1, 6),
    trials=st.integers(1, 12),
    within_epochs=st.booleans(),
    lookahead=st.integers(0, 3),
    wide=st.booleans(),
)
def test_no_device_is_idle_while_a_trial_waits_and_none_waits_for_ever(
    allocator: Allocator | None,
    paradigm: str,
    seed: int,
    devices: int,
    trials: int,
    within_epochs: bool,
    lookahead: int,
    wide: bool,
) -> None:
    """Nor does one that waits for as many devices as it needs stall others."""
    wide = wide and allocator is not None
    rules: dict[str, Any] = {"paradigm": paradigm, "moves_within_epochs": within_epochs}
    rules |= {"lookahead": lookahead, "more_may_join": wide}
    world = world_of(seed, allocator, devices=devices, trials=trials, **rules)
    world.has_wide_trials = wide
    play_out(world)
