"""Ranks of a trial that go different ways, or say different things: told of, never recorded."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from optuna.trial import TrialState
from torch import nn

from optuna_fleet import TrialError
from optuna_fleet.events import Ending
from optuna_fleet.executor.call.ranks import RunCalls, out_of_step, parted
from optuna_fleet.wire.calls import Call, RankCall, Reply, Report
from optuna_fleet.wire.messages import Ended, Progress
from optuna_fleet.wire.packing import pack, pack_error, unpack_error
from tests.fleets import Leg, num_wrong, small_model, train_epoch

ON_THREE = [Leg((0, 1, 2))]


# -- as a user ------------------------------------------------------------------------------------


def trained(trial: Any, epochs: int = 3) -> Any:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = trial.prepare(model, optimizer)
    for epoch in trial.epochs(epochs):
        train_epoch(trial, model, optimizer, [], batch_size=10)
        yield epoch, model


def own_share(trial: Any, model: Any) -> float:
    """What is right on one device, and this rank's part of the truth on several."""
    model.eval()
    wrong = [num_wrong(model(x), y) / len(y) for x, y in trial.batches("val", batch_size=8)]
    return float(sum(wrong)) + trial.rank / 100


def reports_its_share(trial: Any) -> float:
    for epoch, model in trained(trial):
        trial.report(own_share(trial, model), epoch)
    return 0.0


def returns_its_share(trial: Any) -> float:
    *_, (_, model) = trained(trial)
    return own_share(trial, model)


def stops_on_its_own_loss(trial: Any) -> float:
    for epoch, _ in trained(trial):
        if trial.rank == 2 and epoch == 1:
            break
    return 0.0


def steps(trial: Any, model: Any, does: str) -> float:
    """Rank 1 does otherwise in the third step: where its own loss is not finite, say."""
    model = trial.prepare(model)
    optimizer = trial.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
    for _ in trial.epochs(2):
        for number, (x, y) in enumerate(trial.batches("train", batch_size=10)):
            loss = F.cross_entropy(model(x), y)
            if number == 2 and trial.rank == 1:
                if does == "leaves":
                    break
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return 0.0


def leaves_an_epoch_alone(trial: Any) -> float:
    return steps(trial, small_model(), "leaves")


def skips_a_step_alone(trial: Any) -> float:
    return steps(trial, small_model(), "skips")


def skips_a_step_without_batchnorm(trial: Any) -> float:
    return steps(trial, nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double(), "skips")


def is_pruned_alone(trial: Any) -> float:
    for epoch, _ in trained(trial):
        if epoch == 1 and trial.rank == 1:
            raise optuna.TrialPruned
    return 0.0


def only_rank_0_reports(trial: Any) -> float:
    for epoch, _ in trained(trial):
        if trial.rank == 0:
            trial.report(1.0, epoch)
    return 0.0


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (reports_its_share, r"trial.report\(\) is .* on rank 0, but .* on rank [12].*trial.sum\("),
        (returns_its_share, r"the objective returned is .* on rank 0, but .* on rank 1.*trial.su"),
        (stops_on_its_own_loss, r"rank 2 returned in epoch 1, while rank [01] went on.*trial.mea"),
        (leaves_an_epoch_alone, r"rank 1 left its loop.* in epoch 0, while rank [02] went on"),
        (skips_a_step_alone, r"rank . is at the .* of batch [34] in epoch 0, while"),
        (
            skips_a_step_without_batchnorm,
            r"left out a `backward` that|is at the gradients of batch [34]",
        ),
        (is_pruned_alone, r"went different ways: rank 1 was pruned"),
        (only_rank_0_reports, r"rank 0 called `report` where rank [12] called `end_epoch`"),
    ],
)
def test_ranks_that_part_are_told_of_before_anything_is_recorded(
    fleet: Any, objective: Any, said: str
) -> None:
    study = optuna.create_study()
    fleet.script = {0: ON_THREE}
    with pytest.raises(TrialError, match=said):
        study.optimize(objective, n_trials=1, executor=fleet)
    (trial,) = study.trials
    assert trial.state is TrialState.FAIL
    assert trial.intermediate_values == {}
    assert trial.values is None


# -- without processes ----------------------------------------------------------------------------


def at(calls: int, number: int, purpose: str = "gradients", **more: Any) -> Progress:
    recent = ((number - 1, "forward"), (number, purpose))
    return Progress(num_calls=calls, collectives=recent, **more)


@pytest.mark.parametrize(
    ("progress", "left", "apart"),
    [
        ([at(3, 10), at(3, 10)], {}, False),
        ([at(4, 9), at(6, 12)], {}, False),  # one is slower
        ([at(4, 9), at(5, 6)], {}, True),
        ([at(4, 9, is_ordered=False), at(5, 6)], {}, False),  # reports come from another thread
        ([at(4, 9, "gradients"), at(4, 9, "trial.sum")], {}, True),
        ([at(4, 9, "gradients"), at(4, 10, "gradients")], {}, True),  # the ninth is unlike
        ([at(4, 9, "forward"), at(4, 10, "gradients")], {}, False),
        ([at(4, 9), at(4, 9)], {0: "returned"}, False),
        ([at(4, 9), at(3, 8, "forward")], {0: "returned"}, False),
        ([at(4, 9, "forward"), at(4, 10)], {0: "returned"}, True),
        ([at(4, 9), at(5, 9)], {0: "returned"}, True),
        ([at(4, 30, passed=(4, 30)), at(4, 9, passed=(4, 9))], {}, True),  # one left its loop
        ([at(4, 30, passed=(4, 9)), at(4, 9, passed=(4, 9))], {}, False),
        ([at(8, 30, passed=(8, 30)), at(4, 9, passed=(4, 9))], {}, False),
    ],
)
def test_ranks_are_at_places_of_one_sequence(
    progress: list[Progress], left: dict[int, str], apart: bool
) -> None:
    ways = {r: replace(p, way_out=left.get(r, "")) for r, p in enumerate(progress)}
    assert (out_of_step(ways) is not None) is apart


def ended(rank: int, value: Any = None, error: BaseException | None = None) -> Ended:
    ways = {type(None): "returned", optuna.TrialPruned: "was pruned"}
    way_out = ways.get(type(error), "")
    return Ended(
        run_id=0,
        rank=rank,
        device=rank,
        time_s=0.0,
        ending=Ending.RETURNED if error is None else Ending.RAISED,
        value=pack(value) if error is None else b"",
        error=None if error is None else pack_error(error),
        progress=Progress(way_out=way_out),
    )


@pytest.mark.parametrize(
    ("values", "apart"),
    [
        ([0.5, 0.5], False),
        ([0.5, 0.5 + 1e-5], False),  # evaluated by each for itself
        ([0.5, 0.501], True),
        ([math.nan, math.nan], False),
        ([math.nan, 0.5], True),
        ([(1.0, 2.0), (1.0, 2.0)], False),
        ([(1.0, 2.0), (1.0, 3.0)], True),
        ([None, None], False),
    ],
)
def test_returned_values_are_alike(values: list[Any], apart: bool) -> None:
    ranks = [ended(rank, value) for rank, value in enumerate(values)]
    assert (parted(ranks) is not None) is apart


def report(rank: int, value: float, index: int = 0) -> Report:
    return Report(run_id=0, index=index, rank=rank, value=value, step=3)


def ask(rank: int, index: int = 1, name: str = "should_prune") -> Call:
    arguments = pack(((), {}))
    return Call(run_id=0, index=index, rank=rank, target="trial", name=name, arguments=arguments)


class Made(RunCalls):
    """The calls of a run, what it has sent, and those carried out, all of which were answered."""

    def __init__(self, world_size: int, *made: RankCall) -> None:
        self.sent: list[tuple[int, Reply]] = []
        super().__init__(world_size=world_size, send=lambda *sent: self.sent.append(sent))
        self.carried_out: list[RankCall] = []
        self.make(*made)

    def make(self, *made: RankCall) -> None:
        for one in made:
            now = self.take(one)
            while now is not None:
                self.carried_out.append(now)
                self.answer(now, Reply(run_id=0, index=now.index))
                now = self.next_call()

    @property
    def errors(self) -> dict[int, str]:
        return {rank: str(unpack_error(r.error)) for rank, r in self.sent if r.error is not None}


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_report_is_carried_out_when_all_ranks_have_made_it(order: tuple[int, ...]) -> None:
    first, last = order[:2], order[2:]
    calls = Made(3, *(call for rank in first for call in (report(rank, 0.5), ask(rank))))
    assert calls.carried_out == []
    calls.make(*(call for rank in last for call in (report(rank, 0.5), ask(rank))))
    made = [(one.rank, one.name) for one in calls.carried_out]
    assert made == [(0, "report"), (0, "should_prune")]
    assert sorted(rank for rank, _ in calls.sent) == [0, 1, 2]
    assert calls.errors == {}


def test_unlike_reports_fail_at_every_ranks_next_question() -> None:
    calls = Made(2, report(0, 0.5), report(1, 0.7), report(0, 1.0, 1))
    assert calls.sent == []
    calls = Made(2, report(0, 0.5), report(1, 0.7), ask(0), ask(1))
    assert set(calls.errors) == {0, 1}
    assert "0.7 on rank 1" in calls.errors[0]
    assert calls.carried_out == []


@pytest.mark.parametrize("reporting", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
def test_a_report_of_one_rank_alone_is_refused(reporting: int, first: int) -> None:
    """The other one need not come any further for that."""
    alone, other = [report(reporting, 0.5), ask(reporting)], [ask(1 - reporting, 0)]
    calls = Made(2, *(alone + other if first == reporting else other + alone))
    assert reporting in calls.errors
    assert "report" not in [one.name for one in calls.carried_out]
    assert len(calls.sent) == 2


def test_a_report_does_not_wait_for_a_rank_that_has_ended() -> None:
    calls = Made(3, report(0, 0.5), ask(0), report(1, 0.5), ask(1))
    assert calls.sent == []
    calls.leave(2)
    assert calls.next_call() is None
    assert set(calls.errors) == {0, 1}


def test_an_error_that_no_call_waited_for_is_the_end_of_the_objective() -> None:
    calls = Made(2, report(0, 0.5), report(1, 0.7))
    at_end = [calls.at_its_end(ended(rank, 1.0)) for rank in range(2)]
    assert [one.ending for one in at_end] == [Ending.RAISED] * 2
    pruned, own = ended(0, error=optuna.TrialPruned()), ended(0, error=ValueError("its own"))
    assert calls.at_its_end(pruned).ending is Ending.RAISED
    assert calls.at_its_end(pruned).error != pruned.error
    assert calls.at_its_end(own) is own


def test_answers_that_all_ranks_have_read_are_forgotten() -> None:
    calls = Made(3)
    for step in range(50):
        calls.make(ask(0, 3 * step, name="set_user_attr"))  # by rank 0 only
        calls.make(*(report(rank, 0.5, 3 * step + 1) for rank in range(3)))
        calls.make(*(ask(rank, 3 * step + 2) for rank in range(3)))
    assert len(calls._done) <= 2
    assert not calls._waiting
