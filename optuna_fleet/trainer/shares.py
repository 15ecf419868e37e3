"""Which part of each batch this rank holds, and so what weight its gradients have in the trial's.

A rank's loss is the mean over its shard; the trial's gradient is the mean over the global batch,
so a rank's gradient weighs local / global samples. Loops need not use a batch as soon as they get
it: they fetch ahead, keep batches, read two data sets at once, skip steps. So the weight is not
that of the batch that came last, but that of the batches with which prepared modules were called
since the last reduction, as far as the graphs of these calls still live. Where these weigh unlike,
gradients are exact only with `FleetTrial.weighted`, and refused otherwise.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from optuna_fleet.exceptions import TrialError
from optuna_fleet.trainer.groups import group_size

_MOST_AHEAD = 64
_LIFE = "optuna_fleet"


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a batch.

    Attributes:
        local_size: Samples of the batch on this rank; 0 for a padding sample, which only keeps the
            ranks in step and counts for nothing.
        global_size: Samples of the batch on all ranks; 0 while nothing is known, and then every
            rank counts alike.
    """

    local_size: int = 0
    global_size: int = 0

    @property
    def weight(self) -> float:
        """Weight of this rank in the mean over the global batch; the ranks' weights sum to 1."""
        if self.global_size == 0:
            return 1.0 / group_size()
        return self.local_size / self.global_size

    @property
    def dummy(self) -> bool:
        """Whether this rank's samples must not count."""
        return self.global_size > 0 and self.local_size == 0

    @property
    def pattern(self) -> int:
        """Equal for batches that weigh alike on every rank; 0 where all ranks count alike."""
        return self.global_size if self.global_size % group_size() else 0


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """A training batch that was handed out; `step` numbers these."""

    share: Share
    step: int


@dataclass(slots=True)
class _Pass:
    """The batches of a pass that a call may be about whose inputs are not known: the last ones.

    As many as had been handed out when the first call came: one, unless the loop fetches ahead.
    """

    last: deque[_Batch] = field(default_factory=lambda: deque(maxlen=_MOST_AHEAD))
    is_called: bool = False


class _Life:
    """Lives as long as the graph of a call: it is kept by the nodes of the call's outputs."""


@dataclass(slots=True)
class _Call:
    """A call of a prepared module, and the batches that it may be about."""

    batches: frozenset[_Batch]
    life: weakref.ref[_Life]


class BatchShares:
    """What the batches of a rank weigh. One per run; its reducers and BatchNorms look at it.

    Attributes:
        present: The share of the batch in use: the one that a module was called with, or else the
            one that was handed out last.
        lockstep: True while every rank is served equally many batches. Only then do BatchNorm
            layers in training mode communicate under ``no_grad`` (``swa_utils.update_bn``).
        step: Which of the batches handed out for training a module was called with last, from 1;
            0 while that is not known.
        collectives: Number, purpose and step of the last collectives of this rank.
    """

    def __init__(self, present: Share | None = None, *, lockstep: bool = False) -> None:
        self.present = present or Share()
        self.lockstep = lockstep
        self.step = 0
        self.collectives: tuple[tuple[int, str, int], ...] = ((0, "", 0),)
        self._num_steps = 0
        self._open: dict[int, tuple[Share, bool]] = {}
        self._passes: dict[int, _Pass] = {}
        self._places = _Places()
        self._known: _Batch | None = None  # what calls since the last hand-out were about
        self._calls: list[_Call] = []
        self._reference: Share | None = None
        self._is_weighted = False
        self._modules = weakref.WeakSet[torch.nn.Module]()
        self._depth = 0
        self._life: _Life | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchShares:
        # A copied model trains on the same batches, so its layers look at the same holder.
        return self

    def begin(self, purpose: str) -> None:
        """This rank begins a collective, of which others can tell how far it is."""
        latest = (self.collectives[-1][0] + 1, purpose, self.step)
        self.collectives = (*self.collectives[-7:], latest)  # at once: another thread reads it

    # -- batches ----------------------------------------------------------------------------------

    def hand_out(
        self, number: int, share: Share, data: Any, *, lockstep: bool, trains: bool
    ) -> None:
        """The objective is about to get a batch of the pass of that number."""
        self._num_steps += trains
        self._open.pop(number, None)  # the last of these is what came last
        self._open[number] = (share, lockstep)
        self._use_last()
        if not trains or group_size() == 1:
            return
        batch, self._known, self._reference = _Batch(share, self._num_steps), None, None
        if number not in self._passes:  # those whose batches were only kept are over
            self._passes = {n: one for n, one in self._passes.items() if n in self._open}
        self._passes.setdefault(number, _Pass()).last.append(batch)
        self._places.add(batch, data)

    def close(self, number: int) -> None:
        """A pass has ended; the batch in use is again that of those which are open."""
        one = self._passes.get(number)
        if one is not None and one.is_called:
            del self._passes[number]
        if self._open.pop(number, None) is not None and self._open:
            self._use_last()

    def _use_last(self) -> None:
        self.present, self.lockstep = next(reversed(self._open.values()))

    # -- calls of prepared modules ----------------------------------------------------------------

    def watch(self, module: torch.nn.Module) -> None:
        """Note with what a module, or a part of it, is called."""
        self._modules.update(module.modules())
        _watch_with(self)

    def enter(self, module: torch.nn.Module, inputs: Any) -> None:
        """A module begins its forward."""
        if module not in self._modules:
            return
        self._depth += 1
        if not self._num_steps or (self._depth > 1 and self._known is not None):
            return
        self._identify(inputs)
        if not torch.is_grad_enabled():
            return
        if self._depth == 1:
            self._life = _Life()
            self._calls.append(_Call(self._candidates(), weakref.ref(self._life)))
        elif self._known is not None and self._calls:  # the outer call is about that batch
            self._calls[-1].batches = frozenset([self._known])

    def leave(self, module: torch.nn.Module, outputs: Any) -> None:
        """A module has ended its forward, or failed."""
        if module not in self._modules:
            return
        self._depth -= 1
        if self._depth or self._life is None:
            return
        for leaf in pytree.tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                kept: Any = leaf.grad_fn.metadata
                kept.setdefault(_LIFE, []).append(self._life)
        self._life = None

    def _identify(self, inputs: Any) -> None:
        for one in self._passes.values():
            if not one.is_called:
                one.is_called = True
                one.last = deque(one.last, maxlen=len(one.last))
        batch = self._places.find(inputs)
        if batch is not None:
            self._known, self.present, self.step = batch, batch.share, batch.step

    def _candidates(self) -> frozenset[_Batch]:
        if self._known is not None:
            return frozenset([self._known])
        return frozenset(batch for one in self._passes.values() for batch in one.last)

    # -- gradients --------------------------------------------------------------------------------

    def weigh(self, loss: Tensor, weight: Tensor) -> Tensor:
        """Returns `loss`, whose gradients will count with that weight instead of the shard's.

        Args:
            loss: This rank's loss.
            weight: This rank's share in the trial's loss, a scalar; the ranks' add up to 1.
        """
        self._is_weighted = True
        _drop_nans(loss, weight == 0)
        return _Weighed.apply(loss, weight, self)  # type: ignore[no-any-return]

    def settle(self) -> Share:
        """What gradients are multiplied with in the reduction that comes: the same until it ends.

        A backward pass is under way, so only graphs live that it may be about.

        Raises:
            TrialError: It is about batches that weigh unlike, so that one weight can't be exact.
        """
        if self._reference is not None:
            return self._reference
        self._calls = [call for call in self._calls if call.life() is not None]
        if not self._calls:
            self._identify(())
        batches = [call.batches for call in self._calls] or [self._candidates()]
        shares = {batch.share for some in batches for batch in some}
        if len({share.pattern for share in shares}) > 1:
            self._check_weighed(shares)
            self._reference = Share()
        else:
            self._reference = next(iter(shares), self.present)
        return self._reference

    def _check_weighed(self, shares: set[Share]) -> None:
        if self._is_weighted and all(share.global_size >= group_size() for share in shares):
            return
        sizes = ", ".join(map(str, sorted({share.global_size for share in shares})))
        raise TrialError(
            f"Gradients of one step come, or may come, from batches of unlike sizes ({sizes}), "
            f"which the trial's {group_size()} devices share unlike, so that their mean can't be "
            "exact. Give each its weight, `loss = trial.weighted(loss_1, len(x_1)) + "
            "trial.weighted(loss_2, len(x_2))`; or read them with drop_last=True and batch sizes "
            "that the number of devices divides; or hand the batches to the model as they came "
            "from trial.batches."
        )

    def reduced(self) -> None:
        """Gradients were reduced."""
        self._calls.clear()
        self._reference = None
        self._is_weighted = False


class _Places:
    """Where in memory the batches lie that were handed out."""

    def __init__(self) -> None:
        self._found: dict[int, list[_Place]] = {}
        self._num_added = 0

    def add(self, batch: _Batch, data: Any) -> None:
        for tensor in _dense(pytree.tree_leaves(data)):
            storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            place = _Place(storage, tensor.nbytes, batch)
            others = [p for p in self._at(tensor) if p.num_bytes != tensor.nbytes]
            self._found[tensor.data_ptr()] = [*others, place]
        self._num_added += 1
        if self._num_added % 256 == 0:
            kept = ((at, [*filter(_Place.is_there, ps)]) for at, ps in self._found.items())
            self._found = {at: places for at, places in kept if places}

    def find(self, inputs: Any) -> _Batch | None:
        """The batch that one of these tensors is of, or a view of from its first sample on."""
        for tensor in _dense(pytree.tree_leaves(inputs)):
            places = self._at(tensor)
            exact = [place for place in places if place.num_bytes == tensor.nbytes]
            if exact or len(places) == 1:
                return (exact or places)[0].batch
        return None

    def _at(self, tensor: Tensor) -> list[_Place]:
        return [place for place in self._found.get(tensor.data_ptr(), ()) if place.is_there()]


@dataclass(frozen=True, slots=True)
class _Place:
    """The memory of a tensor, whose address means it for as long as its storage is there."""

    storage: StorageWeakRef
    num_bytes: int
    batch: _Batch

    def is_there(self) -> bool:
        return not self.storage.expired()  # type: ignore[no-untyped-call]


def _dense(leaves: Iterable[Any]) -> Iterable[Tensor]:
    return (
        leaf
        for leaf in leaves
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel()
    )


class _Weighed(torch.autograd.Function):
    """The same value; its gradient counts with another weight than it will be reduced with."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: Tensor, shares: BatchShares) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shares = shares
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        share = ctx.shares.settle()
        factor = 0.0 if share.dummy else weight / share.weight
        return (grad * factor).to(grad.dtype), None, None


def _drop_nans(loss: Tensor, is_unweighted: Tensor) -> None:
    """Of a rank without any weight nothing must count, also where its loss is 0 / 0.

    Such a quotient lies between the loss and the sums that it is made of: among scalars.
    """

    def cleaned(grads: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        return tuple(
            None if grad is None else torch.where(is_unweighted, torch.zeros_like(grad), grad)
            for grad in grads
        )

    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or any(item.shape for item in node._input_metadata):
            continue
        node.register_hook(cleaned)
        nodes += [function for function, _ in node.next_functions]


_watching: weakref.ref[BatchShares] | None = None
_has_hooks = False


def _watch_with(shares: BatchShares) -> None:
    """Let `shares` know of calls. The hooks are torch's global ones: a module stays as it is."""
    global _watching, _has_hooks
    _watching = weakref.ref(shares)
    if not _has_hooks:
        _has_hooks = True
        torch_module.register_module_forward_pre_hook(_enter)
        torch_module.register_module_forward_hook(_leave, always_call=True)


def _enter(module: torch.nn.Module, inputs: Any) -> None:
    shares = None if torch.compiler.is_compiling() or _watching is None else _watching()
    if shares is not None:
        shares.enter(module, inputs)


def _leave(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
    shares = None if torch.compiler.is_compiling() or _watching is None else _watching()
    if shares is not None:
        shares.leave(module, outputs)
