"""What the processes of a `RankPool` do. Every job joins a group of its own and leaves it."""

from __future__ import annotations

import copy
import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from optuna_fleet.exceptions import TrainerLostError
from optuna_fleet.trainer import groups
from optuna_fleet.trainer.checkpoints import checkpoint
from optuna_fleet.trainer.gradients import batchnorm, collectives, gradient_sync
from optuna_fleet.trainer.gradients.shares import BatchShares, Share
from optuna_fleet.trainer.groups import GroupSpec
from optuna_fleet.trainer.randomness import rng_state

ODD_TYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "bool", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float64", "complex64", "complex128", "float8_e4m3fn"),
)


@contextmanager
def group(spec: GroupSpec, timeout_s: float = 30.0) -> Iterator[None]:
    groups.join_group(spec, "gloo", timeout_s)
    try:
        yield
    finally:
        batchnorm.end()
        groups.leave_group()


class Net(torch.nn.Module):
    """A CNN with BatchNorm of all kinds.

    No bias before a norm, no norm of the features of two samples: gradients would be exactly 0,
    and Adam makes steps of any size out of rounding errors there.
    """

    def __init__(self, normed_head: bool) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(2, 4, 3, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(4)
        self.conv2 = torch.nn.Conv2d(4, 4, 3, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(4, momentum=None)
        self.fc = torch.nn.Linear(4, 3, bias=not normed_head)
        self.bn3: torch.nn.Module = torch.nn.Identity()
        self.bn4: torch.nn.Module = torch.nn.Identity()
        if normed_head:
            self.bn3 = torch.nn.BatchNorm1d(4, affine=False)
            self.bn4 = torch.nn.BatchNorm1d(3, track_running_stats=False)
        self.unused = torch.nn.Linear(2, 2)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.bn3(F.relu(self.bn2(self.conv2(x))).mean((2, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn4(self.fc(self.features(x)))


def build(seed: int = 0, normed_head: bool = True) -> Net:
    torch.manual_seed(seed)
    return Net(normed_head).double()


def batches(num: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(size, 2, 7, 7, generator=generator, dtype=torch.float64) * 3 + 5,
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(num)
    ]


def shard(x: torch.Tensor, shares: BatchShares) -> torch.Tensor:
    """This rank's part; a copy of a sample of the batch, spoilt, where there is none."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    size = groups.group_size()
    part = x.tensor_split(size)[rank]
    shares.present = Share(len(part), len(x))
    if len(part):
        return part
    return torch.full_like(x[:1], torch.nan) if x.is_floating_point() else x[:1]


def train(
    spec: GroupSpec, optimizer: str, batch_size: int, method: str = "forward"
) -> dict[str, Any]:
    with group(spec):
        shares = BatchShares()
        model = build(seed=spec.rank, normed_head=batch_size > 2)
        make = {"sgd": sgd, "adam": torch.optim.Adam}[optimizer]
        optim = make(model.parameters(), lr=0.05)
        model = gradient_sync.make_data_parallel(model, shares)
        losses, grads = [], {}
        for x, y in batches(4, batch_size):
            optim.zero_grad()
            x, y = shard(x, shares), shard(y, shares)
            if method == "forward":
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            elif method == "parts":
                loss = F.cross_entropy(model.fc(model.features(x)), y)
                loss.backward()
            else:  # gradient accumulation over two backward passes
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                F.cross_entropy(model(x) * 2, y).backward()
            optim.step()
            losses.append(collectives.mean(loss.item(), shares.present.local_size))
        grads = {
            name: None if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
        }
        model.eval()
        with torch.no_grad():
            evaluated = model(batches(1, 5)[0][0])
        return {
            "losses": losses,
            "grads": grads,
            "state": {key: value.clone() for key, value in model.state_dict().items()},
            "eval": evaluated,
        }


def sgd(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.01)


def batchnorm_pass(spec: GroupSpec, dtype: torch.dtype, kind: str) -> dict[str, Any]:
    """One forward and backward of a layer over uneven parts; the gradients of its input."""
    with group(spec):
        shares = BatchShares()
        layer = NORMS[kind](3).to(torch.float64)
        if dtype != torch.float64:
            layer.float()
        batchnorm.begin(shares)
        generator = torch.Generator().manual_seed(3)
        x = (torch.randn(7, 3, 2, generator=generator, dtype=torch.float64) + 1e3).to(dtype)
        x = shard(x, shares).requires_grad_()
        loss = (layer(x).float() if dtype != torch.float64 else layer(x)).pow(3).mean()
        loss.backward()
        return {
            "dx": (x.grad * shares.present.weight)[: shares.present.local_size],
            "state": layer.state_dict(),
        }


class ActivatedNorm(torch.nn.BatchNorm1d):
    """A subclass with a forward of its own, as in timm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training
        )
        return F.relu(x)


NORMS = {
    "plain": torch.nn.BatchNorm1d,
    "custom": ActivatedNorm,
    "torch's": torch.nn.SyncBatchNorm,
}


def graphs_norm(spec: GroupSpec) -> list[torch.Tensor]:
    """A batch of one sample, which has several rows."""
    with group(spec):
        shares = BatchShares()
        layer = torch.nn.BatchNorm1d(3, dtype=torch.float64)
        batchnorm.begin(shares)
        shares.present = Share(local_size=int(spec.rank == 0), global_size=1)
        rows = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
        layer(rows)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            layer(rows[:1])
        return list(layer.buffers())


def lonely_passes(spec: GroupSpec) -> str:
    """Only rank 0 evaluates: a collective would hang and time out."""
    with group(spec, timeout_s=3.0):
        shares = BatchShares()
        model = gradient_sync.make_data_parallel(build(), shares)
        if spec.rank == 0:
            x = batches(1, 5)[0][0]
            with torch.no_grad():
                model(x)
                model.eval()
                model(x)
            model.features(x)  # its norms have statistics of their own
        return "done"


def accumulate_stats(spec: GroupSpec) -> dict[str, torch.Tensor]:
    with group(spec):
        shares = BatchShares()
        shares.lockstep = True
        model = gradient_sync.make_data_parallel(build(), shares)
        with torch.no_grad():
            for x, _ in batches(3, 8):
                model(shard(x, shares))
        return dict(model.named_buffers())


def freezing(spec: GroupSpec) -> list[torch.Tensor]:
    """Freeze, unfreeze; data-dependent branches; reentrant checkpointing; a failed backward."""
    with group(spec):
        shares = BatchShares()
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(3)]).double()
        model[0].requires_grad_(False)
        model = gradient_sync.make_data_parallel(model, shares)
        x = shard(torch.arange(15.0, dtype=torch.float64).view(5, 3), shares)
        model[2](model[0](x)).square().mean().backward()
        frozen = model[0].weight.grad is None and model[1].weight.grad is None
        model[0].requires_grad_(True)

        def fail(_: torch.Tensor) -> None:
            raise KeyError("planted")

        hidden = model[0](x)
        hidden.register_hook(fail)
        try:
            model[2](hidden).mean().backward()
        except KeyError:
            model.zero_grad()
        run = torch.utils.checkpoint.checkpoint
        y = run(model[0], x.requires_grad_(), use_reentrant=True)
        y = run(model[2], y + model[0](x), use_reentrant=True)
        y.square().mean().backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert frozen
        return grads


def branches(spec: GroupSpec) -> list[torch.Tensor | None]:
    """A layer that only the last sample needs; rank 0 never sees it."""
    with group(spec):
        shares = BatchShares()
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(3)]).double()
        model = gradient_sync.make_data_parallel(model, shares)
        x = torch.arange(10.0, dtype=torch.float64).view(5, 2)
        mine = shard(x, shares)
        losses = []
        for row in mine:
            layer = model[1] if row[0] > 7 else model[0]
            losses.append(layer(row).square().mean())
        torch.stack(losses).mean().backward()
        return [param.grad for param in model.parameters()]


def trained_before(spec: GroupSpec) -> tuple[list[torch.Tensor | None], bool]:
    """A model that an earlier trial has trained as well, whose last batch was all rank 0's."""
    with group(spec):
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(3)]).double()
        earlier, shares = BatchShares(), BatchShares()
        gradient_sync.make_data_parallel(model, earlier)
        earlier.present = Share(int(spec.rank == 0), 1)
        earlier.end()
        gradient_sync.make_data_parallel(model, shares)
        x = shard(torch.arange(10.0, dtype=torch.float64).view(5, 2), shares)
        model[1](model[0](x)).square().mean().backward()
        return [param.grad for param in model.parameters()], earlier.collectives[-1][0] == 0


def sparse(spec: GroupSpec) -> list[Any]:
    with group(spec):
        shares = BatchShares()
        torch.manual_seed(0)
        model = torch.nn.Embedding(6, 2, sparse=True).double()
        optim = torch.optim.SparseAdam(model.parameters())
        gradient_sync.make_data_parallel(model, shares)
        model(shard(torch.tensor([0, 1, 1, 5]), shares)).square().mean().backward()
        optim.step()
        return [model.weight.grad.is_sparse, model.weight.grad.to_dense(), model.weight.detach()]


def identity(spec: GroupSpec) -> dict[str, Any]:
    """The model stays the user's own object."""
    with group(spec):
        mine = build()
        bn, weight = mine.bn1, mine.bn1.weight
        keys = list(mine.state_dict())
        attributes = [set(vars(part)) for part in mine.modules()]
        model = gradient_sync.make_data_parallel(mine, BatchShares())
        twin = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        return {
            "same object": model is mine and model.bn1 is bn and bn.weight is weight,
            "same keys": list(model.state_dict()) == keys,
            "method": callable(model.features),
            "nothing in it": [set(vars(part)) for part in mine.modules()] == attributes,
            "types": {type(one.bn1) for one in (mine, twin, loaded)} == {torch.nn.BatchNorm2d},
            "same text": repr(mine) == repr(build()) == repr(loaded),
        }


def wrong_model(spec: GroupSpec) -> None:
    with group(spec):
        gradient_sync.make_data_parallel(torch.nn.Linear(2 + spec.rank, 2), BatchShares())


def odd_buffers(spec: GroupSpec) -> dict[str, torch.Tensor]:
    """Each buffer holds 3 on rank 0, another number elsewhere."""
    with group(spec):
        module = torch.nn.Linear(2, 2)
        for name in ODD_TYPES:
            value = torch.full((2, 3), 3 - spec.rank, dtype=torch.float32)
            module.register_buffer(f"its_{name}", value.to(getattr(torch, name)))
        gradient_sync.make_data_parallel(module, BatchShares())
        return {name: module.get_buffer(f"its_{name}").to(torch.complex64) for name in ODD_TYPES}


def penalty(spec: GroupSpec, how: str) -> Any:
    """A gradient penalty through BatchNorm; `how` it is taken, if at all."""
    with group(spec):
        shares = BatchShares()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)]
        model = torch.nn.Sequential(*layers[: 2 if how == "norm last" else 3]).double()
        model = gradient_sync.make_data_parallel(model, shares).train(how != "eval")
        x = torch.arange(12.0, dtype=torch.float64).view(6, 2).square()
        x = shard(x, shares).requires_grad_()
        loss = model(x).square().mean()
        if how != "none":
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + gradient.square().sum()
        params = list(model.parameters())
        return [grad.detach() for grad in torch.autograd.grad(loss, params, create_graph=True)]


def grad_of(spec: GroupSpec, what: str) -> tuple[bool, bool]:
    """Whether a reduced loss carries gradients, and whether it is the tensor given."""
    with group(spec):
        loss = torch.ones((), requires_grad=True) * 2
        reduced: Any = getattr(collectives, what)(loss)
        return reduced.requires_grad, reduced.data_ptr() == loss.data_ptr()


def reduce(spec: GroupSpec, values: list[Any]) -> Any:
    with group(spec):
        return collectives.all_reduce_sum(values[spec.rank])


def average(spec: GroupSpec, values: list[Any], weights: list[float | None]) -> Any:
    with group(spec):
        return collectives.mean(values[spec.rank], weights[spec.rank])


def ranks_sum(spec: GroupSpec) -> tuple[int, float]:
    with group(spec):
        value = torch.tensor([float(spec.rank + 1)])
        dist.all_reduce(value)
        return dist.get_world_size(), value.item()


def resources(spec: GroupSpec, repeats: int) -> list[tuple[int, int, bool]]:
    """Open files and threads, and whether the excepthook is as before, after each group."""
    seen, own = [], sys.excepthook  # on Python 3.10 it may be that of the exceptiongroup package
    for repeat in range(repeats):
        one = GroupSpec(
            rank=spec.rank,
            world_size=spec.world_size,
            prefix=f"{spec.prefix}-{repeat}",
            store_host=spec.store_host,
            store_port=spec.store_port,
        )
        with group(one):
            if hasattr(dist.ProcessGroup, "shutdown"):  # before torch 2.7 it leaves files open
                dist.barrier()
        groups.wait_until_left()
        hook = sys.excepthook is own
        seen.append((len(os.listdir("/proc/self/fd")), threading.active_count(), hook))
    return seen


def part_ways(spec: GroupSpec) -> tuple[list[float], bool]:
    """Begin what the other rank never does; what two groups have in common after that.

    And whether the first one is still being left then.
    """
    sums = []
    for repeat in range(3):
        one = replace(spec, prefix=f"{spec.prefix}-{repeat}")
        with group(one, 200.0):
            if repeat == 0:
                dist.broadcast(torch.ones(1), src=1 - spec.rank, async_op=True)
                continue
            sums.append(collectives.all_reduce_sum(1.0))
    return sums, any(thread.is_alive() for thread in groups._leaving)


def join_in_vain(spec: GroupSpec) -> None:
    with suppress(TrainerLostError), group(spec, 0.1):
        raise AssertionError("there is nobody else")


def join_late(spec: GroupSpec, folder: str) -> bool:
    """Whether rank 1, which is the last to join, has done so when the group is there."""
    mark, begin = Path(folder, "joined"), dist.init_process_group

    def begin_slowly(*args: Any, **options: Any) -> None:
        begin(*args, **options)
        time.sleep(0.2)
        mark.touch()

    if spec.rank == 1:
        dist.init_process_group = begin_slowly
    try:
        with group(spec):
            return mark.exists()
    finally:
        dist.init_process_group = begin


def reduce_forever(spec: GroupSpec, folder: str) -> None:
    with group(spec):
        while True:
            dist.all_reduce(torch.ones(10))
            Path(folder, str(spec.rank)).touch()  # now it may be killed


def backward_forever(spec: GroupSpec, folder: str) -> None:
    with group(spec):
        shares = BatchShares()
        model = gradient_sync.make_data_parallel(build(), shares)
        while True:
            for x, y in batches(4, 6):
                F.cross_entropy(model(shard(x, shares)), shard(y, shares)).backward()
                Path(folder, str(spec.rank)).touch()


def rng(spec: GroupSpec) -> list[Any]:
    """Draws, again after restoring every rank's state, and after restoring the leader's."""
    with group(spec):
        torch.manual_seed(spec.rank)
        np.random.seed(spec.rank)
        states = checkpoint.gather(rng_state())
        before = (torch.rand(1).item(), np.random.rand())
        torch.rand(3)
        checkpoint.restore_rng(states)
        again = (torch.rand(1).item(), np.random.rand())
        checkpoint.restore_rng(states[:1])
        leaders = (torch.rand(1).item(), np.random.rand())
        return [before, again, leaders]
