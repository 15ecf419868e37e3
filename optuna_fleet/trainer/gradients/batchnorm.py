"""Synchronised BatchNorm for every backend, exact for uneven shards.

``torch.nn.SyncBatchNorm`` refuses CPU tensors and weighs the ranks alike. Here all layers stay as
they are. While a trial trains on several devices, ``torch.nn.functional.batch_norm``, which they
call, is replaced by a kernel whose statistics span the trial's ranks: one collective forward, one
backward. So what calls it by hand is synchronised too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from optuna_fleet.exceptions import TrialError
from optuna_fleet.trainer.gradients.weights import Weights
from optuna_fleet.trainer.groups import group_size

_own_batch_norm = F.batch_norm
_own_sync_forward = SyncBatchNorm.forward


def begin(weights: Weights) -> None:
    """Until `end`, BatchNorm in training mode has the statistics of the trial's whole batch.

    On one device only ``SyncBatchNorm`` is another: as BatchNorm is, on every kind of device.
    Under ``no_grad`` it communicates only while ``weights.lockstep``, and with given statistics
    (those of a layer in eval mode) never.
    """
    SyncBatchNorm.forward = _BatchNorm.forward  # type: ignore[method-assign]
    if group_size() > 1:
        # A method: torch.compile takes any function that it finds under that name for torch's.
        F.batch_norm = _StandIn(weights).batch_norm


def end() -> None:
    """BatchNorm is torch's own again."""
    F.batch_norm = _own_batch_norm
    SyncBatchNorm.forward = _own_sync_forward  # type: ignore[method-assign]


class _StandIn:
    """For ``F.batch_norm``, while a trial trains on several devices."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._kernel: Any = _uncompiled()

    def batch_norm(
        self,
        input: Tensor,  # noqa: A002 - the signature of F.batch_norm
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        given = (input, running_mean, running_var, weight, bias)
        if not training:
            return _own_batch_norm(*given, eps=eps)
        output: Tensor = self._kernel(self._weights, *given, momentum, eps)
        return output


@cache
def _uncompiled() -> Any:
    """Made where it is needed: that imports the compiler, which takes a second."""
    return torch.compiler.disable(_of_all_ranks)  # type: ignore[no-untyped-call]


def _of_all_ranks(
    weights: Weights,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    if group_size() == 1 or not (torch.is_grad_enabled() or weights.lockstep):
        return _own_batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)
    is_padding = weights.are_padding()
    mean, var, count = _global_statistics(x, weights, is_padding=is_padding)
    # A sample may have many values: nodes of a graph, say. To look at a count waits for GPUs.
    if weights.present.global_size == 1 and count == 1:
        raise ValueError(  # the words of torch, which raises it on one device
            f"Expected more than 1 value per channel when training, got input size {x.shape}"
        )
    if running_mean is not None and running_var is not None:
        unbiased = var * (count / (count - 1))
        with torch.no_grad():
            for running, new in ((running_mean, mean), (running_var, unbiased)):
                running.mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)
    dtype = _statistics_dtype(x)
    scale = torch.ones_like(mean) if weight is None else weight
    shift = torch.zeros_like(mean) if bias is None else bias
    output: Tensor = _Normalise.apply(
        x, scale.to(dtype), shift.to(dtype), mean, var, count, eps, weights, is_padding
    )
    return output


class _Normalise(torch.autograd.Function):
    """BatchNorm with given statistics of the global batch, differentiated through them.

    The loss of a rank is the mean over its shard and is weighted by local/global only later, when
    gradients are reduced. So the sums over the batch need that weight here, and what is subtracted
    from the rank's own gradient must be divided by it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        eps: float,
        weights: Weights,
        is_padding: bool,
    ) -> Tensor:
        mean, var = mean.to(scale.dtype), var.to(scale.dtype)
        ctx.save_for_backward(x, scale, mean, var, count)
        # Another batch may be in use before this one's backward.
        ctx.eps, ctx.dummy, ctx.weights = eps, is_padding, weights
        return _own_batch_norm(x, mean, var, scale, shift, eps=eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = _Normalise._backward(ctx, grad)
        if torch.is_grad_enabled():  # create_graph=True
            x, scale, *_ = ctx.saved_tensors
            grads = _DifferentiableOnce.apply(*grads, grad, x, scale)
        return (*grads, *(None,) * 6)

    @staticmethod
    def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, scale, mean, var, count = ctx.saved_tensors
        # In eval mode the fused kernel gives scale * grad / std and the two sums, in one pass.
        saved = mean.new_empty(0)  # not None, which most kernels of GPUs do not take
        dx, dscale, dshift = torch.ops.aten.native_batch_norm_backward(
            grad, x, scale, mean, var, saved, saved, False, ctx.eps, [True, True, True]
        )
        if ctx.needs_input_grad[0]:
            share = ctx.weights.settle().weight
            sums = torch.stack([dshift, dscale]).double().mul_(share)
            if ctx.dummy:  # zeroed, not multiplied: a dummy's NaN must not reach the others
                sums.zero_()
            ctx.weights.begin("the backward pass")
            dist.all_reduce(sums)
            if ctx.dummy:
                dx = torch.zeros_like(x)
            else:
                dshift_mean, dscale_mean = (sums / (count * share)).to(scale.dtype)
                slope = scale * torch.rsqrt(var + ctx.eps)
                pull = (slope * dscale_mean, slope * dshift_mean)
                dx = dx - _own_batch_norm(x, mean, var, *pull, eps=ctx.eps)
        return dx, dscale, dshift


class _DifferentiableOnce(torch.autograd.Function):
    """Lets gradients pass that nobody differentiates.

    torch's ``once_differentiable`` lets those pass as constants that are differentiated with
    ``autograd.grad``: it does not say what they are made of.
    """

    @staticmethod
    def forward(
        ctx: Any, dx: Tensor, dscale: Tensor, dshift: Tensor, *made_of: Tensor
    ) -> tuple[Tensor, ...]:
        return dx.view_as(dx), dscale.view_as(dscale), dshift.view_as(dshift)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise TrialError(
            "A gradient of gradients (of a gradient penalty, say) goes through a BatchNorm in "
            "training mode, but one that is synchronised over devices can be differentiated only "
            "once: put it in eval mode for the penalty, use GroupNorm or LayerNorm, or give every "
            "trial one device, with FleetExecutor(policy='baseline')."
        )


def _statistics_dtype(x: Tensor) -> torch.dtype:
    """Half precision keeps its statistics and factors in float32, as torch's kernels do."""
    return torch.promote_types(x.dtype, torch.float32)


@torch.no_grad()
def _global_statistics(
    x: Tensor, weights: Weights, *, is_padding: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance per channel, and the count, over all ranks' samples, in float64.

    Ranks send mean and squared deviations, not sums of squares, which cancel for large means.
    """
    channels = x.size(1)
    row = x.new_zeros(2 * channels + 1, dtype=torch.float64)
    if not is_padding and x.numel() > 0:
        mean, var = torch.batch_norm_update_stats(x.to(_statistics_dtype(x)), None, None, 0.0)
        row[:channels], row[channels:-1] = mean, var
        row[-1] = x.numel() // channels
    rows = row.new_empty(group_size(), row.numel())
    weights.begin("the forward pass")
    dist.all_gather(list(rows.unbind()), row)
    means, variances, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    var = (counts * (variances + (means - mean).square())).sum(0) / count
    return mean, var, count
