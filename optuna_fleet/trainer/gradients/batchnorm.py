"""Synchronised BatchNorm for every backend, exact for uneven shards.

``torch.nn.SyncBatchNorm`` refuses CPU tensors and weighs the ranks alike. Here the layers of a
model keep their identity and only change class: ``forward`` is the layer's own, with
``F.batch_norm`` replaced by a kernel whose statistics span the trial's ranks. One collective
forward, one backward.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from optuna_fleet.exceptions import TrialError
from optuna_fleet.trainer.gradients.weights import Weights
from optuna_fleet.trainer.groups import group_size


def convert_batchnorm(
    module: torch.nn.Module, shares: Weights, kind: type[_BatchNorm] = _BatchNorm
) -> None:
    """Synchronise the BatchNorms of `module`, of that kind, over the trial's group, in place.

    Layer objects, parameters, buffers, hooks, training flags and ``state_dict`` keys stay what
    they are, also in subclasses of BatchNorm whose own ``forward`` calls ``F.batch_norm``. A
    converted layer in eval mode does not communicate, and under ``no_grad`` only while
    ``shares.lockstep``. Pickling gives the original class.
    """
    for layer in module.modules():
        if isinstance(layer, kind):
            if not isinstance(layer, _Synchronised):
                layer.__class__ = _synchronised_class(type(layer))  # type: ignore[arg-type]
            layer.__dict__["_fleet_shares"] = shares


class _Synchronised(_BatchNorm):
    """Put before a layer's own class: runs its ``forward`` with statistics of the whole batch."""

    _original: type[_BatchNorm]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch's interface
        shares: Weights = self.__dict__["_fleet_shares"]
        in_step = torch.is_grad_enabled() or shares.lockstep
        if not (self.training and in_step and group_size() > 1):
            return super().forward(input)
        with _SynchronisedKernel(shares) as kernel:
            output = super().forward(input)
        if not kernel.calls:
            raise TrialError(
                f"{type(self).__name__}.forward does not call torch.nn.functional.batch_norm, so "
                f"it can't be synchronised over devices: call it there, or give every trial one "
                f"device, with FleetExecutor(policy='baseline')."
            )
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> _Synchronised:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A model saved as a whole must load where there is no fleet.
        # Protocol 1 reduces to a plain call, which unlike later ones may make another class.
        reduced: Any = super().__reduce_ex__(1)
        make, (_, *args), state = reduced
        state = {key: value for key, value in state.items() if key != "_fleet_shares"}
        return make, (self._original, *args), state


class _Alone(_BatchNorm):
    """Put before ``SyncBatchNorm``, whose own ``forward`` would synchronise by itself."""

    forward = _BatchNorm.forward


@cache
def _synchronised_class(cls: type[_BatchNorm]) -> type[_BatchNorm]:
    is_torchs = cls.forward is torch.nn.SyncBatchNorm.forward
    bases = (_Synchronised, *((_Alone,) if is_torchs else ()), cls)
    return type(f"Synchronised{cls.__name__}", bases, {"_original": cls})


class _SynchronisedKernel(TorchFunctionMode):
    """While active, ``F.batch_norm`` in training mode is the synchronised one."""

    def __init__(self, shares: Weights) -> None:
        super().__init__()
        self.calls = 0
        self._shares = shares

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return (self._batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))

    def _batch_norm(
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
        self.calls += 1
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
        mean, var, count = _global_statistics(input, self._shares)
        # A sample may have many values: nodes of a graph, say. To look at a count waits for GPUs.
        if self._shares.present.global_size == 1 and count == 1:
            raise ValueError(  # the words of torch, which raises it on one device
                "Expected more than 1 value per channel when training, "
                f"got input size {input.shape}"
            )
        if running_mean is not None and running_var is not None:
            unbiased = var * (count / (count - 1))
            with torch.no_grad():
                for running, new in ((running_mean, mean), (running_var, unbiased)):
                    running.mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)
        dtype = _statistics_dtype(input)
        scale = torch.ones_like(mean) if weight is None else weight
        shift = torch.zeros_like(mean) if bias is None else bias
        output: Tensor = _Normalise.apply(
            input, scale.to(dtype), shift.to(dtype), mean, var, count, eps, self._shares
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
        shares: Weights,
    ) -> Tensor:
        mean, var = mean.to(scale.dtype), var.to(scale.dtype)
        ctx.save_for_backward(x, scale, mean, var, count)
        # Another batch may be in use before this one's backward.
        ctx.eps, ctx.dummy, ctx.shares = eps, shares.present.dummy, shares
        return F.batch_norm(x, mean, var, scale, shift, eps=eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = _Normalise._backward(ctx, grad)
        if torch.is_grad_enabled():  # create_graph=True
            x, scale, *_ = ctx.saved_tensors
            grads = _DifferentiableOnce.apply(*grads, grad, x, scale)
        return (*grads, *(None,) * 5)

    @staticmethod
    def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, scale, mean, var, count = ctx.saved_tensors
        # In eval mode the fused kernel gives scale * grad / std and the two sums, in one pass.
        saved = mean.new_empty(0)  # not None, which most of CUDA's kernels do not take
        dx, dscale, dshift = torch.ops.aten.native_batch_norm_backward(
            grad, x, scale, mean, var, saved, saved, False, ctx.eps, [True, True, True]
        )
        if ctx.needs_input_grad[0]:
            share = ctx.shares.settle().weight
            sums = torch.stack([dshift, dscale]).double().mul_(share)
            if ctx.dummy:  # zeroed, not multiplied: a dummy's NaN must not reach the others
                sums.zero_()
            ctx.shares.begin("the backward pass")
            dist.all_reduce(sums)
            if ctx.dummy:
                dx = torch.zeros_like(x)
            else:
                dshift_mean, dscale_mean = (sums / (count * share)).to(scale.dtype)
                slope = scale * torch.rsqrt(var + ctx.eps)
                pull = (slope * dscale_mean, slope * dshift_mean)
                dx = dx - F.batch_norm(x, mean, var, *pull, eps=ctx.eps)
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
def _global_statistics(x: Tensor, shares: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance per channel, and the count, over all ranks' samples, in float64.

    Ranks send mean and squared deviations, not sums of squares, which cancel for large means.
    """
    channels = x.size(1)
    row = x.new_zeros(2 * channels + 1, dtype=torch.float64)
    if not shares.present.dummy and x.numel() > 0:
        mean, var = torch.batch_norm_update_stats(x.to(_statistics_dtype(x)), None, None, 0.0)
        row[:channels], row[channels:-1] = mean, var
        row[-1] = x.numel() // channels
    rows = row.new_empty(group_size(), row.numel())
    shares.begin("the forward pass")
    dist.all_gather(list(rows.unbind()), row)
    means, variances, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    var = (counts * (variances + (means - mean).square())).sum(0) / count
    return mean, var, count
