"""Virtual workers: exact weights for each minibatch, bounded staleness, plain SGD's results."""

import copy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from in_process import Blueprint, Oracle, batch, furthest, mlp, sgd, train
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.papers.simulator import StageTimes, VirtualWorkers
from optuna_fleet.virtual_workers.stage_messages import added
from optuna_fleet.virtual_workers.versions import Agreement
from optuna_fleet.virtual_workers.wsp import Flush, Pass, WaveSynchronous


def blueprint(schedule, *cuts, model=None, loss=F.mse_loss, optimizer=sgd):
    torch.manual_seed(0)
    return Blueprint(
        model=mlp() if model is None else model,
        cuts=cuts,
        schedule=schedule,
        loss=loss,
        optimizer=optimizer,
    )


def paces(*by_worker):
    """Each virtual worker's seconds for a pass, the backward one twice that."""
    return lambda address, turn: (
        by_worker[address.worker] * (1 if turn.what is Pass.FORWARD else 2)
    )


# -- one virtual worker ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.5, "dampening": 0.2, "maximize": True},
    ],
)
def test_one_minibatch_at_a_time_is_torchs_sgd(options):
    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.02, **options)

    plan = blueprint(WaveSynchronous(1, None), (2,), optimizer=make)
    plain = copy.deepcopy(plan.model)
    optimizer = make(plain.parameters())
    for number in range(1, 31):
        x, y = batch(0, number)
        optimizer.zero_grad()
        F.mse_loss(plain(x), y).backward()
        optimizer.step()
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    assert furthest(train(plan, 30).weights, expected) <= 1e-13


class Residual(nn.Module):
    """Goes on with what it got and with what came before: a skip over the next cut."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given):
        x, before = given["x"], given["skip"]
        return {"x": torch.tanh(self.linear(x)) + before, "skip": x, "mask": given["mask"]}


class Begin(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return {"x": x, "skip": torch.zeros_like(x), "mask": tokens > 2}


class End(nn.Module):
    def forward(self, given):
        return (given["x"] * given["mask"][..., None]).mean(1)


def test_skip_connections_masks_and_token_inputs_cross_cuts():
    def tokens(worker, number):
        x, y = batch(worker, number)
        return (x.abs() * 5).long().clamp(max=9), y

    torch.manual_seed(0)
    model = nn.Sequential(Begin(), Residual(), Residual(), Residual(), End()).double()
    plan = blueprint(WaveSynchronous(3, 1), (1, 2, 3), (2, 4), model=model)
    run = train(plan, 6, batches=tokens, pass_s=paces(1, 2.5))
    assert furthest(run.weights, Oracle(plan, tokens).weights(run.starts)) <= 1e-14


class Kept(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


class Recomputed(Kept):
    """With activation checkpointing."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_what_is_computed_again_is_at_the_weights_of_the_forward_pass():
    def trained(layer):
        torch.manual_seed(0)
        model = nn.Sequential(*(layer(6, 6) for _ in range(3))).double()
        return train(blueprint(WaveSynchronous(3, None), (1,), model=model), 4).weights

    assert furthest(trained(Recomputed), trained(Kept)) == 0


# -- several virtual workers ----------------------------------------------------------------------


@settings(max_examples=15)
@given(st.data())
def test_whatever_the_speeds_and_latencies_are(data):
    depth = 4
    cuts = st.sets(st.integers(1, depth - 1)).map(lambda s: tuple(sorted(s)))
    plan = blueprint(
        WaveSynchronous(data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))),
        *data.draw(st.lists(cuts, min_size=2, max_size=3)),
    )
    rng = data.draw(st.randoms(use_true_random=False))
    run = train(
        plan,
        6,
        pass_s=lambda *_: rng.uniform(0.1, 3),
        latency_s=lambda: rng.choice([0.0, 0.5, 5.0]),
    )
    assert furthest(run.weights, Oracle(plan).weights(run.starts)) <= 1e-14


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.floats(0.3, 3), min_size=1, max_size=3), min_size=1, max_size=2),
    st.integers(1, 4),
    st.integers(0, 2),
    st.booleans(),
)
@example([[1.0, 2.0]], 3, 0, True)  # which is seldom drawn
def test_the_engine_takes_as_long_as_the_simulator_says(workers, wave_size, distance, flush):
    is_alone = len(workers) == 1
    schedule = WaveSynchronous(wave_size, None if is_alone else distance)
    if flush and is_alone:
        schedule = Flush(wave_size)
    num_waves = 8
    plan = blueprint(schedule, *(tuple(range(1, len(w))) for w in workers))
    run = train(
        plan,
        num_waves,
        pass_s=lambda address, turn: (
            workers[address.worker][address.stage] * (1 if turn.what is Pass.FORWARD else 2)
        ),
    )
    times = [[StageTimes(forward_s=s, backward_s=2 * s) for s in w] for w in workers]
    simulated = VirtualWorkers(times, schedule)
    simulated.run(num_waves)
    assert run.transport.now_s == pytest.approx(simulated.now_s, rel=1e-9)


def norms() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.register_buffer("mask", torch.tensor([-torch.inf, 0.1, 1 / 3]))
    return model


def test_statistics_become_means_and_constants_stay() -> None:
    torch.manual_seed(0)
    models = [norms() for _ in range(3)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    agreements = [Agreement(m, torch.optim.SGD(m.parameters()), 1 / 3) for m in models]
    for number, model in enumerate(models):
        model(torch.randn(8, 3) + number)
        model.register_buffer("made", torch.ones(()))
    means = torch.stack([model[1].running_mean for model in models]).mean(0)
    sums: dict[str, torch.Tensor] = {}
    for agreement in agreements:
        sums = added(sums, agreement.rest())
    for agreement, model in zip(agreements, models, strict=True):
        agreement.take(sums)
        torch.testing.assert_close(model[1].running_mean, means)
        assert torch.equal(model.mask, norms().mask)
        assert not any(moved.any() for moved in agreement.rest().values())
