"""What virtual workers come to agree on, and who serves it."""

from __future__ import annotations

import torch
from torch import nn

from optuna_fleet.virtual_workers.parameter_server import Directory
from optuna_fleet.virtual_workers.stage_messages import added
from optuna_fleet.virtual_workers.versions import Agreement


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
