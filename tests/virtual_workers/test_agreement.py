"""What virtual workers come to agree on, and who serves it."""

from __future__ import annotations

import pytest
import torch
from in_process import Blueprint, InProcess, Workers
from oracle import Oracle, batch, furthest, mlp, sgd
from torch import nn

from optuna_fleet.virtual_workers.parameter_server import Directory
from optuna_fleet.virtual_workers.stage_messages import added
from optuna_fleet.virtual_workers.sums import Agreement
from optuna_fleet.virtual_workers.wsp import Pass, WaveSynchronous


@pytest.mark.parametrize(("num_minibatches", "distance"), [(1, 0), (5, 0), (8, 1), (11, 3)])
def test_all_settle_on_the_same_weights_also_in_the_midst_of_a_wave(
    num_minibatches: int, distance: int
) -> None:
    torch.manual_seed(0)
    plan = Blueprint(
        model=mlp(),
        cuts=((1, 3), (2,), ()),
        schedule=WaveSynchronous(4, distance),
        loss=nn.functional.mse_loss,
        optimizer=sgd,
    )
    starts = []

    def note(address, done):
        if address.stage == 0 and done.turn.what is Pass.FORWARD:
            starts.append((address.worker, done.turn.number, done.tag))

    transport = InProcess(lambda address, turn: 1.0 + 3 * address.worker)
    workers = Workers(plan, transport, note)
    workers.give(batch, num_minibatches)
    transport.run()
    unsettled = [stage.weights for stage in workers.stages.values()]
    least = plan.schedule.least_clock((num_minibatches // 4 + 1) * 4)
    while unsettled:
        unsettled = [weights for weights in unsettled if not weights.settle(least, {})]
        transport.run()
    found = {}
    for stage in workers.stages.values():
        for name, weight in stage.weights.latest().items():
            assert torch.equal(found.setdefault(name, weight), weight)
    oracle = Oracle(plan)
    oracle.weights(starts)
    weights = {name: p.detach() for name, p in plan.model.named_parameters()}
    for update in oracle._updates.values():
        weights = added(weights, update)
    assert furthest(found, weights) <= 1e-14


def norms() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.register_buffer("mask", torch.tensor([-torch.inf, 0.1, 1 / 3]))
    return model


def test_momenta_and_statistics_become_means_and_constants_stay() -> None:
    torch.manual_seed(0)
    models = [norms() for _ in range(3)]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    agreements = [
        Agreement(model, optimizer, 1 / 3)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        model(torch.randn(8, 3) + number).square().sum().backward()
        model.register_buffer("made", torch.ones(()))
        optimizer.step()
    means = torch.stack([model[1].running_mean for model in models]).mean(0)
    momenta = [
        optimizer.state[model[0].weight]["momentum_buffer"]
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    mean_momentum = torch.stack(momenta).mean(0)
    sums: dict[str, torch.Tensor] = {}
    for agreement in agreements:
        sums = added(sums, agreement.rest())
    for agreement, model, optimizer in zip(agreements, models, optimizers, strict=True):
        agreement.take(sums)
        torch.testing.assert_close(model[1].running_mean, means)
        momentum = optimizer.state[model[0].weight]["momentum_buffer"]
        torch.testing.assert_close(momentum, mean_momentum)
        assert torch.equal(model.mask, norms().mask)
        assert all(
            not moved.any() for name, moved in agreement.rest().items() if name.endswith("buffer")
        )


def directory(cuts, ranks, nodes):
    return Directory.of(ranks, cuts, dict.fromkeys("abcdef", 1.0), nodes)


def test_servers_are_on_the_node_of_most_who_ask_them_and_shared_out() -> None:
    # ED: both virtual workers have the first stage on node 0, and the second on node 1.
    local = directory(((3,), (3,)), ((0, 2), (1, 3)), [0, 0, 1, 1])
    assert local.hosts == (0, 2)
    # One node, cut unlike.
    shared = directory(((2, 4), (3,)), ((0, 1, 2), (3, 4)), [0] * 5)
    assert shared.pieces == ((0, 2), (2, 3), (3, 4), (4, 6))
    assert shared.hosts == (0, 1, 4, 2)
    # A node that has two of three stages.
    most = directory(((), (), ()), ((0,), (1,), (2,)), [0, 1, 1])
    assert most.hosts == (1,)
