"""HetPipe's Theorem 1: what WSP loses to the optimum of a convex problem falls as 1 / sqrt(T)."""

import math

import torch
from in_process import Blueprint
from oracle import train
from torch import nn

from optuna_fleet.virtual_workers.wsp import WaveSynchronous

NUM_WORKERS = 2
NUM_MINIBATCHES = 1000
BEST = torch.tensor([0.6, 0.0, 0.0, 0.8], dtype=torch.float64)
FURTHEST = 1.0
"""The theorem's M: half the square of the distance to BEST, 0.5 at first, stays below its."""
STEEPEST = 1.0
"""Its L: a sample's gradient is as long as its inputs, and those have length 1."""


class Term(nn.Module):
    """Adds some of the terms of x w: convex in the weights of all stages together."""

    def __init__(self, first, end):
        super().__init__()
        self.which = slice(first, end)
        self.weight = nn.Parameter(torch.zeros(end - first, dtype=torch.float64))

    def forward(self, given):
        x, total = given
        return x, total + x[self.which] @ self.weight


def sample(t):
    generator = torch.Generator().manual_seed(t)
    x, noise = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    x = x / x.norm()
    return x, x @ BEST + 0.3 * noise[0]


def time_of(worker, number):
    """Updates are counted over all virtual workers, from 1."""
    return (number - 1) * NUM_WORKERS + worker + 1


def given(worker, number):
    """With a falling rate: the theorem's is sigma / sqrt(t)."""
    t = time_of(worker, number)
    x, y = sample(t)
    return (x, torch.zeros((), dtype=torch.float64)), torch.stack([y, y.new_tensor(t**-0.5)])


def falling(output, targets):
    return targets[1] * (output[1] - targets[0]).abs()


def lost_at(address, done):
    """When, and by how much its loss was above that of BEST."""
    t = time_of(address.worker, done.turn.number)
    x, y = sample(t)
    return t, done.loss.item() * math.sqrt(t) - (x @ BEST - y).abs().item()


def test_regret_keeps_to_the_theorem_and_weights_to_its_staleness():
    own, distance = 3, 4
    others = (distance + 1) * (own + 1) + own - 1  # s_local, s_global as published
    staleness = (2 * others + own) * NUM_WORKERS
    sigma = FURTHEST / (STEEPEST * math.sqrt(staleness))
    plan = Blueprint(
        model=nn.Sequential(Term(0, 2), Term(2, 4)),
        cuts=((1,),) * NUM_WORKERS,
        schedule=WaveSynchronous(own + 1, distance),
        loss=falling,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=sigma),
    )
    num_waves = NUM_MINIBATCHES // (own + 1)
    run = train(plan, num_waves, batches=given, pass_s=lambda address, _: 1 + address.worker)
    for _, done in run.passes:  # of every stage
        number, tag = done.turn.number, done.tag
        assert number - 1 - tag.local <= own
        assert number - 1 - tag.clock * (own + 1) <= others
    lost = dict(lost_at(*each) for each in run.passes if each[1].loss is not None)
    first, whole = (sum(lost[t + 1] for t in range(n)) / n for n in (len(lost) // 4, len(lost)))
    assert len(lost) == NUM_WORKERS * NUM_MINIBATCHES
    assert whole <= 4 * FURTHEST * STEEPEST * math.sqrt(staleness / len(lost))
    assert whole <= first / 2  # as 1 / sqrt(T), or sooner
