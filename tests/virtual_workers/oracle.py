"""Virtual workers in this process, and an oracle that does what they recorded on one device."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from in_process import Blueprint, InProcess, Workers
from torch import nn
from torch.func import functional_call

from optuna_fleet.virtual_workers.wsp import Pass

LR = 0.05


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=LR)


def mlp(width=6, depth=4):
    """As many layers as `depth`, in float64."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers).double()


def batch(worker, number, width=6, size=3):
    generator = torch.Generator().manual_seed(1000 * worker + number)
    x = torch.randn(2, size, width, generator=generator, dtype=torch.float64)
    return x[0], x[1]


@dataclass
class Run:
    """What came of it: passes in their order, and everybody's state."""

    blueprint: Blueprint
    transport: InProcess
    passes: list = field(default_factory=list)
    workers: Workers | None = None

    def note(self, address, done):
        self.passes.append((address, done))

    @property
    def starts(self):
        """(virtual worker, minibatch, tag) as first stages started them."""
        return [
            (address.worker, done.turn.number, done.tag)
            for address, done in self.passes
            if address.stage == 0 and done.turn.what is Pass.FORWARD
        ]

    @property
    def losses(self):
        firsts = [done for address, done in self.passes if address.stage == 0]
        return [done.loss.item() for done in firsts if done.loss is not None]


def train(blueprint, num_waves, *, batches=batch, pass_s=None, latency_s=None):
    """Run until every virtual worker has trained as many waves."""
    run = Run(blueprint, InProcess(pass_s, latency_s))
    run.workers = Workers(blueprint, run.transport, run.note)
    run.workers.give(batches, num_waves * blueprint.schedule.wave_size)
    run.transport.run()
    ended = Counter((address, done.turn.what) for address, done in run.passes)
    assert set(ended.values()) == {num_waves * blueprint.schedule.wave_size}, "some never ended"
    return run


class Oracle:
    """Plain SGD on one device, at the weights that the tags of a run say."""

    def __init__(self, blueprint, batches=batch):
        self._model = blueprint.model
        self._loss = blueprint.loss
        self._batches = batches
        self._wave_size = blueprint.schedule.wave_size
        self._num_workers = len(blueprint.cuts)
        first = {name: p.detach().clone() for name, p in self._model.named_parameters()}
        self._snapshots = [first]
        self._updates = {}

    def weights(self, starts):
        """After all minibatches of a run, which started in this order."""
        for worker, number, tag in starts:
            self._updates[worker, number] = self._update(worker, number, tag)
        numbers = max(number for _, number, _ in starts)
        return self._snapshot(numbers // self._wave_size)

    def _update(self, worker, number, tag):
        weights = self._snapshot(tag.clock)
        for own in range(tag.clock * self._wave_size + 1, tag.local + 1):
            weights = self._plus(weights, self._updates[worker, own])
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        x, y = self._batches(worker, number)
        self._loss(functional_call(self._model, leaves, (x,)), y).backward()
        return {name: -LR * w.grad for name, w in leaves.items() if w.grad is not None}

    def _snapshot(self, clock):
        while len(self._snapshots) <= clock:
            wave, weights = len(self._snapshots) - 1, self._snapshots[-1]
            for number in range(wave * self._wave_size + 1, (wave + 1) * self._wave_size + 1):
                for worker in range(self._num_workers):
                    weights = self._plus(weights, self._updates[worker, number])
            self._snapshots.append(weights)
        return self._snapshots[clock]

    @staticmethod
    def _plus(weights, update):
        return {n: w + update[n] if n in update else w for n, w in weights.items()}


def furthest(some, others):
    """The largest difference of two sets of weights."""
    assert some.keys() == others.keys()
    return max((some[name] - others[name]).abs().max().item() for name in some)
