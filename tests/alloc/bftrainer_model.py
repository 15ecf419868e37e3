"""BFTrainer's model as published (Eq. 1 to 16), with binaries per node: an oracle for counts."""

from dataclasses import dataclass

import mip
import numpy as np


@dataclass(frozen=True)
class Trainer:
    """A Trainer j; its table is (N_j^i, s_j^i) of Eq. 11 and 12 and begins with (0, 0)."""

    table: dict
    smallest: int
    largest: int
    up_s: float
    down_s: float
    nodes: frozenset

    def rate(self, n):
        return float(np.interp(n, list(self.table), list(self.table.values())))

    def values(self, forward_s):
        """[1, N + 1] worth of each count, Eq. 16, -inf where Eq. 3 forbids it."""
        now = len(self.nodes)
        values = np.full((1, max(self.table) + 1), -np.inf)
        for n in (0, *range(self.smallest, self.largest + 1)):
            cost_s = self.up_s * (n > now) + self.down_s * (n < now)
            values[0, n] = forward_s * self.rate(n) - self.rate(now) * cost_s
        return values


def published_optimum(trainers, num_nodes, forward_s, big_m):
    """(objective, counts) by CBC; ``big_m`` is |N| + 1 in the authors' code."""
    model = mip.Model(sense=mip.MAXIMIZE, solver_name=mip.CBC)
    model.verbose = 0
    model.preprocess = 0  # CBC of python-mip 2.0 aborts in its preprocessing on this very model
    model.max_mip_gap = 1e-12
    maps = [[binary(model) for _ in range(num_nodes)] for _ in trainers]
    for node in zip(*maps, strict=True):
        model += mip.xsum(node) <= 1  # Eq. 5
    terms = []
    for trainer, x in zip(trainers, maps, strict=True):
        count = mip.xsum(x)
        limit_size(model, trainer, count, big_m)
        forbid_migration(model, trainer, x, count, big_m)
        rate = interpolated(model, trainer, count)
        cost_s = rescaling(model, trainer, count, big_m)
        terms.append(forward_s * rate - trainer.rate(len(trainer.nodes)) * cost_s)  # Eq. 16
    model.objective = mip.xsum(terms)
    assert model.optimize(max_seconds=60) == mip.OptimizationStatus.OPTIMAL
    counts = tuple(sum(var.x > 0.5 for var in x) for x in maps)
    return model.objective_value, counts


def binary(model):
    return model.add_var(var_type=mip.BINARY)


def limit_size(model, trainer, count, big_m):
    """Eq. 4."""
    below, above = binary(model), binary(model)
    model += count >= trainer.smallest - big_m * below
    model += count <= big_m * (1 - below)
    model += trainer.largest >= count - big_m * above
    model += count <= big_m * (1 - above)


def forbid_migration(model, trainer, x, count, big_m):
    """Eq. 9 and 10."""
    changes = []
    for n, var in enumerate(x):
        u, c = binary(model), int(n in trainer.nodes)
        model += u <= var + c
        model += u >= var - c
        model += u >= c - var
        model += u <= 2 - var - c
        changes.append(u)
    shrinks, change = binary(model), count - len(trainer.nodes)
    model += change >= mip.xsum(changes) - big_m * shrinks
    model += change <= big_m * (1 - shrinks) - mip.xsum(changes)


def interpolated(model, trainer, count):
    """Eq. 11 and 12."""
    weights = [model.add_var(lb=0.0, ub=1.0) for _ in trainer.table]
    model += mip.xsum(weights) == 1
    model += mip.xsum(w * n for w, n in zip(weights, trainer.table, strict=True)) == count
    model.add_sos(list(zip(weights, map(float, trainer.table), strict=True)), 2)
    return mip.xsum(w * s for w, s in zip(weights, trainer.table.values(), strict=True))


def rescaling(model, trainer, count, big_m):
    """Eq. 14 and 15."""
    now, up, down = len(trainer.nodes), binary(model), binary(model)
    model += count <= now + (big_m - now) * up
    model += count >= (now + 1) * up
    model += count <= (now - 1) + (big_m - (now - 1)) * (1 - down)
    model += count >= now * (1 - down)
    return trainer.up_s * up + trainer.down_s * down
