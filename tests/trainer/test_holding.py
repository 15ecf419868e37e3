"""What a rank goes back to if others die: the beginning of a step, as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from optuna_fleet.trainer.gradients.shares import BatchShares, Share
from torch import nn

from optuna_fleet.trainer import groups
from optuna_fleet.trainer.checkpoints.saving import Saver
from optuna_fleet.trainer.data.reading import EpochPosition
from optuna_fleet.trainer.groups import GroupSpec
from optuna_fleet.trainer.moves import holding
from optuna_fleet.trainer.moves.holding import Held, Holding
from optuna_fleet.trainer.moves.object_copies import Contents, ObjectCopies
from optuna_fleet.trainer.moves.totals import SumsExchange, Totals
from optuna_fleet.trainer.parts import Parts
from optuna_fleet.trainer.reports import Reports
from optuna_fleet.trainer.unsaved.steps import Steps


class Here:
    """Stands for a session."""

    def __init__(self) -> None:
        self.run = SimpleNamespace(run_id=7)
        self.num_calls = 0
        self.reports = Reports(None)
        self.parameters: dict[str, Any] = {}
        self.remarks: list[str] = []

    def remark(self, keys: Any, text: str) -> None:
        self.remarks.append(text)


class Rank:
    """One of two ranks; the other is always at the same step."""

    def __init__(self, *objects: Any) -> None:
        self.objects = list(objects)
        self.state: dict[str, Any] = {}
        self.session: Any = Here()
        self.steps = Steps(self.objects, lambda text: None)
        self.shares = BatchShares()
        self.shares.hand_out(1, Share(1, 1), None, lockstep=True, trains=True)
        self.totals = Totals(self.shares, torch.device("cpu"), lambda own: [own])
        for thing in objects:
            if isinstance(thing, nn.Module):
                self.steps.watch(thing)
        parts = Parts(
            session=self.session,
            device=torch.device("cpu"),
            objects=self.objects,
            state=self.state,
            position=EpochPosition(),
            steps=self.steps,
            shares=self.shares,
            totals=self.totals,
            saver=Saver(self.session),
        )
        self.holding = Holding(parts)
        self.holding.is_due = lambda: True  # type: ignore[method-assign]

    def begin(self, step: int, epoch: int = 0, *, is_last: bool = False) -> None:
        self.holding.begin_step((1, epoch, step), is_last=is_last)
        if (told := self.holding._told) is not None:
            told.wait()  # all ranks have come to it

    def held(self) -> Held:
        held = self.holding.held()
        assert held is not None
        return held


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(holding, "outlives_peers", lambda: True)
    monkeypatch.setattr(Saver, "__init__", lambda self, session: None)
    groups.join_group(
        GroupSpec(rank=0, world_size=1, prefix="", store_host="", store_port=None), "gloo", 30
    )
    yield
    groups.leave_group()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))


def step(
    rank: Rank,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    adds_late: bool = True,
) -> None:
    loss = model(torch.randn(5, 3)).sum()
    if not adds_late:
        rank.totals["n"] += 5
    beside = rank.shares.at_gradients()
    loss.backward()
    if beside is not None:
        rank.shares.at_reduced(beside)
    if adds_late:
        rank.totals["n"] += 5
    rank.state.setdefault("steps", []).append(len(rank.state))
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def states(*objects: Any) -> list[Any]:
    return copy.deepcopy([thing.state_dict() for thing in objects])


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("done", ["nothing", "backward", "all", "another optimizer's"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_step_is_undone(make: Any, done: str, number: int) -> None:
    model, other = net(), net()
    optimizer, others = make(model.parameters()), make(other.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    objects = (model, optimizer, scheduler, other, others)
    rank = Rank(*objects)
    for before in range(number):
        rank.begin(before)
        step(rank, model, optimizer)
        scheduler.step()
    rank.begin(number)
    known, draws = states(*objects), torch.get_rng_state()
    steps = list(rank.state.get("steps", []))
    if done in ("all", "another optimizer's"):
        step(rank, other, others)
    if done != "nothing":
        step(rank, model, optimizer if done == "all" else None)
        model[0].requires_grad_(False)
    if done == "all":
        scheduler.step()
    held = rank.held()
    assert held.place == (1, 0, number)
    assert held.checkpoint.totals == ([{"n": 5 * number}] if number else [])
    assert held.checkpoint.state.get("steps", []) == steps
    for now, then in zip(held.checkpoint.objects, known, strict=True):
        same(dict(now), dict(then))
    assert torch.equal(held.checkpoint.rng[0]["torch"], draws)
    assert all(part.get("frozen", []) == [] for part in held.checkpoint.remainder)
    assert all(not part.get("gradients") for part in held.checkpoint.remainder)


def test_gradients_that_wait_are_kept() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = Rank(model, optimizer)
    rank.begin(0)
    step(rank, model, None)
    rank.begin(1)
    gradients = {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }
    step(rank, model, None)
    held = rank.held()
    assert held.place == (1, 0, 1)
    same(held.checkpoint.remainder[0]["gradients"], gradients)


@pytest.mark.parametrize("last", [4, 6, 7])
@pytest.mark.parametrize("steps_each", [1, 2])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_several_steps_are_undone(make: Any, steps_each: int, last: int) -> None:
    """Every third one can be copied as a whole; an optimizer steps in each, or every other one."""
    model = net()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    objects = (model, optimizer, scheduler, average)
    rank = Rank(*objects)
    known, draws, gradients = [], [], []
    at = copied = 0
    for number in range(last + 1):
        is_copied = number % 3 == 0
        rank.holding.is_due = lambda yes=is_copied: yes  # type: ignore[misc,method-assign]
        rank.begin(number)
        known.append(states(*objects))
        draws.append(torch.get_rng_state())
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        rank.session.reports.add(0.1 * number, number)
        steps = (number + 1) % steps_each == 0
        step(rank, model, optimizer if steps else None)
        if steps:
            scheduler.step()
            average.update_parameters(model)
        copied = number if is_copied and steps else copied
        at = copied if steps else number
    held = rank.held()
    assert held.place == (1, 0, at)
    assert held.checkpoint.totals == ([{"n": 5 * at}] if at else [])
    assert len(held.checkpoint.state.get("steps", [])) == at
    assert list(held.checkpoint.history) == list(range(at))
    for now, then in zip(held.checkpoint.objects, known[at], strict=True):
        same(dict(now), dict(then))
    assert torch.equal(held.checkpoint.rng[0]["torch"], draws[at])
    same([p.grad for p in model.parameters()], gradients[at])


class Loop:
    """Trains a model whose step nothing follows; parameters can't be copied but once."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.rank = Rank(self.model, self.optimizer, self.average)
        self.rank.holding.is_due = lambda: False  # type: ignore[method-assign]

    def step(self, number: int, *, epoch: int = 0, is_last: bool = False) -> None:
        self.rank.begin(number, epoch, is_last=is_last)
        self.train()

    def train(self) -> None:
        step(self.rank, self.model, self.optimizer, adds_late=False)
        self.average.update_parameters(self.model)

    def states(self) -> list[Any]:
        return states(self.model, self.optimizer, self.average)


@pytest.mark.parametrize("number", range(6))
def test_nothing_is_copied_where_nothing_follows(number: int) -> None:
    """Whenever a rank can lose others, it can go on with the step that it is at."""
    loop = Loop()
    for before in range(number):
        loop.step(before)
        if before > 2:
            assert loop.rank.holding._now.objects.late is None  # type: ignore[union-attr]
    loop.rank.begin(number)
    known = loop.states()
    loop.model(torch.randn(5, 3)).sum().backward()
    held = loop.rank.held()
    assert held.place == (1, 0, number)
    assert held.checkpoint.totals == ([{"n": 5 * number}] if number else [])
    for now, then in zip(held.checkpoint.objects, known, strict=True):
        same(dict(now), dict(then))


def test_the_last_step_of_an_epoch_is_copied() -> None:
    loop = Loop()
    for number in range(6):
        loop.step(number, is_last=number == 5)
    assert loop.rank.held().place == (1, 0, 5)


def test_a_loop_that_leaves_its_passes_early_is_copied() -> None:
    loop = Loop()
    for number in range(4):
        loop.step(number)
    loop.rank.holding.is_due = lambda: True  # type: ignore[method-assign]
    loop.rank.totals.begin()
    for number in range(4):
        loop.step(number, epoch=1)
    assert loop.rank.held().place == (1, 1, 3)


@pytest.mark.parametrize("what", ["call", "collective", "sum"])
def test_it_is_copied_again_once_something_follows(what: str) -> None:
    loop = Loop()
    loop.rank.holding.is_due = lambda: True  # type: ignore[method-assign]
    for number in range(4):
        loop.step(number)
    if what == "call":
        loop.rank.session.num_calls += 1
    elif what == "collective":
        loop.rank.shares.begin("trial.sum")
    else:
        loop.rank.totals["n"] += 1
    for number in range(4, 7):
        loop.step(number)
    held = loop.rank.held()
    assert held.place == (1, 0, 6)
    assert held.checkpoint.totals == [{"n": 30 + (what == "sum")}]


@pytest.mark.parametrize("adds", [True, False])
def test_sums_of_a_step_without_a_backward_pass_are_told(adds: bool) -> None:
    loop = Loop()
    for number in range(4):
        loop.step(number, is_last=number == 3)
    loop.rank.totals.begin()
    loop.rank.begin(0, epoch=1)
    if adds:
        loop.rank.totals["n"] += 1
    loop.rank.begin(1, epoch=1)
    held = loop.rank.held()
    assert held.place == (1, 1, 1)
    assert held.checkpoint.totals == [{"n": 1} if adds else {}]


def test_what_an_epoch_has_left_is_not_gone_back_to_from_a_later_one() -> None:
    """Whose batches are not movable: it ends with a checkpoint, perhaps."""
    loop = Loop()
    for epoch in range(4):
        loop.rank.holding.begin_epoch()
        if epoch == 1:
            for number in range(4):
                loop.step(number, epoch=epoch, is_last=number == 3)
        assert (loop.rank.holding._kept is not None) is (epoch in (1, 2))
    assert loop.rank.holding.held() is None


class Unheard:
    """What ranks are told, if one dies before it tells."""

    def has_arrived(self) -> bool:
        return False

    def wait(self) -> None: ...


@pytest.mark.parametrize("what", ["run", "epoch"])
def test_the_first_step_needs_no_news(what: str) -> None:
    loop = Loop()
    for number in range(4):
        loop.step(number, is_last=number == 3)
    exchange: Any = loop.rank.holding._exchange
    exchange.tell = lambda own, note: Unheard()
    if what == "run":
        loop.rank.holding.begin_run()
        loop.rank.totals.begin([{"n": 7}])
    elif what == "epoch":
        loop.rank.totals.begin()
    place = (1, 1, 0) if what == "epoch" else (1, 0, 4)
    loop.rank.begin(place[-1], place[1])
    held = loop.rank.held()
    assert held.place == place
    assert [part for part in held.checkpoint.totals if part] == [{"n": 7}] * (what == "run")


def test_nobody_goes_on_with_sums_that_were_not_told() -> None:
    loop = Loop()
    for number in range(4):
        loop.step(number)
    loop.rank.totals["n"] += 1
    loop.rank.begin(4)
    assert loop.rank.held().place < (1, 0, 4)


def test_what_there_was_no_room_to_tell_replaces_no_copy() -> None:
    loop = Loop()
    loop.rank.holding.is_due = lambda: True  # type: ignore[method-assign]
    for number in range(5):
        loop.rank.begin(number)
        step(loop.rank, loop.model, loop.optimizer)  # adds late
        if number == 3:
            loop.rank.totals["counts"] = torch.arange(100)
    assert loop.rank.held().place == (1, 0, 3)


@pytest.mark.parametrize("is_at_once", [True, False])
def test_another_epoch_and_another_run_begin_with_what_was_added_there(is_at_once: bool) -> None:
    loop = Loop()
    for number in range(4):
        loop.step(number, is_last=number == 3)
    loop.rank.totals.begin()
    if is_at_once:
        loop.rank.begin(0, epoch=1)
        held = loop.rank.held()
        assert (held.place, held.checkpoint.totals) == ((1, 1, 0), [{}, {}])
        return
    for number in range(2):
        loop.step(number, epoch=1)
    loop.rank.begin(2, epoch=1)
    loop.rank.holding.begin_run()
    loop.rank.totals.begin([{"n": 7}])
    loop.rank.begin(2, epoch=1)
    held = loop.rank.held()
    assert (held.place, held.checkpoint.totals) == ((1, 1, 2), [{"n": 7}])


def test_memory_that_an_objective_gives_a_parameter_is_undone() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = Rank(model, optimizer)
    rank.begin(0)
    known = states(model)[0]
    step(rank, model, optimizer)
    model[0].weight.data = model[0].weight.data.clamp(-0.1, 0.1)
    same(dict(rank.held().checkpoint.objects[0]), dict(known))


def test_a_step_that_changes_no_parameter_is_not_undone_without_a_copy() -> None:
    """As the first step of a warm-up: momentum has changed, and would do so twice."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    rank = Rank(model, optimizer)
    for number in range(4):
        rank.begin(number)
        step(rank, model, optimizer, adds_late=False)
    held = rank.holding.held()
    assert held is None or held.place != (1, 0, 3)


def test_copies_take_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, copied = [100.0], []
    monkeypatch.setattr(holding.time, "perf_counter", lambda: now[0])

    def copies(self: ObjectCopies, spare: Any) -> None:
        copied.append(number)
        now[0] += 1.0 if number == 10 else 0.0021  # one slow copy changes nothing

    monkeypatch.setattr(ObjectCopies, "copy_late", copies)
    loop = Loop()
    del loop.rank.holding.is_due
    for number in range(900):
        loop.rank.begin(number)
        step(loop.rank, loop.model, loop.optimizer)  # which adds late
        now[0] += 60.0 if number == 500 else 0.010  # nor does one slow step
    assert copied[:4] == [0, 1, 10, 19]
    assert len(copied) == 102


def test_what_was_changed_by_hand_is_not_gone_on_with() -> None:
    """As by an optimizer that looks ahead before it steps: then with the step before."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = Rank(model, optimizer)
    rank.begin(0)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    assert rank.holding.held() is None
    rank = Rank(model, optimizer)
    rank.begin(0)
    weight = model[0].weight.detach().clone()
    step(rank, model, optimizer)
    rank.begin(1)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    held = rank.held()
    assert held.place == (1, 0, 0)
    same(held.checkpoint.objects[0]["0.weight"], weight)


def test_what_is_often_changed_by_hand_is_copied_early() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = Rank(model, optimizer)
    for number in range(2):
        rank.begin(number)
        known = states(model)
        model[0].weight.data.mul_(0.5)
        step(rank, model, optimizer)
    held = rank.held()
    assert held.place == (1, 0, 1)
    same(dict(held.checkpoint.objects[0]), dict(known[0]))


def test_what_is_changed_by_hand_in_every_other_step_is_noticed_where_nothing_is_copied() -> None:
    loop = Loop()
    for number in range(30):
        loop.rank.begin(number)
        if number % 2 and number > 9:
            loop.model[0].weight.data.mul_(0.5)
        loop.train()
    loop.rank.begin(30)
    known = loop.states()
    loop.model[0].weight.data.mul_(0.5)
    held = loop.rank.held()
    assert held.place == (1, 0, 30)
    same(dict(held.checkpoint.objects[0]), dict(known[0]))


@pytest.mark.parametrize("why", ["state", "size", "optimizer"])
def test_what_can_not_be_copied_is_not_held(why: str) -> None:
    model = net()
    kind = torch.optim.LBFGS if why == "optimizer" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[operator]
    rank = Rank(model, optimizer)
    if why == "state":
        rank.state["function"] = lambda: None
    elif why == "size":
        rank.state["large"] = bytes(2**20)
    for number in range(2):
        rank.begin(number)

        def loss() -> float:
            optimizer.zero_grad()
            loss = model(torch.randn(5, 3)).sum()
            loss.backward()
            return loss.item()

        optimizer.step(loss)
    assert rank.holding.held() is None
    told = "`trial.state` takes 1.0 MiB" if why == "size" else ""
    assert [text[: len(told)] for text in rank.session.remarks] == [told] * (why == "size")


def test_what_one_rank_adds_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {
        "n": 3,
        "loss": 0.1,
        "by label": torch.tensor([[2, 1, 3], [4, 5, 6]]).T,
        "x": torch.tensor(0.1).double(),
        "none": torch.zeros(0, dtype=torch.float64),
    }
    exchange = SumsExchange()
    told = exchange.tell(own, 5)
    assert exchange.hear(told) == 5
    assert told.has_arrived()
    (part,) = told.parts()
    same(part, own)


class OnGpu(torch.Tensor):
    """Refuses what a tensor on a GPU does."""

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_ranks_on_slots_of_one_gpu_tell_of_tensors_there() -> None:
    own = {"loss": torch.tensor(0.1).double(), "by label": torch.arange(3)}
    there: dict[str, Any] = {name: value.as_subclass(OnGpu) for name, value in own.items()}
    exchange = SumsExchange()
    told = exchange.added(exchange.beside(there, 5).as_subclass(OnGpu))  # beside gradients there
    assert exchange.hear(told) == 5
    (part,) = told.parts()
    same(part, own)


def test_there_is_room_for_more_next_time() -> None:
    exchange, own = SumsExchange(), {"counts": torch.arange(1000)}
    told = exchange.tell(own, 1)
    exchange.hear(told)
    assert not told.has_arrived()
    told = exchange.tell(own, 1)
    exchange.hear(told)
    assert told.has_arrived()
    same(told.parts()[0], own)


def test_a_large_matrix_is_not_told_in_each_step() -> None:
    exchange, own = SumsExchange(), {"confusion": torch.zeros(1000, 1000).double()}
    for _ in range(10):
        told = exchange.tell(own, 5)
        assert told._rows.size(1) <= 2**15
        assert exchange.hear(told) == 5
        assert not told.has_arrived()


def test_copies_are_made_where_the_last_ones_were() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    first, second = (
        ObjectCopies.of(Contents([model, optimizer], ()), with_gradients=False) for _ in range(2)
    )
    first.copy_late(None)
    second.copy_late(first.late)
    assert first.late is not None
    assert second.late is not None
    assert second.late.copies is first.late.copies
    assert len(second.late.copies) == 6 + 3 * 6  # parameters; and step, mean, square of each
