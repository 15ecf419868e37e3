"""What a rank's gradients weigh in the trial's: as much as its part of the batch is of the whole.

A rank's loss is the mean over its part, the trial's gradient the mean over the whole batch. The
weight is applied in one place, where gradients are reduced, and is that of the batch that was
handed out last. Where another batch of unlike weight is at hand as well, because the loop fetches
ahead, keeps batches or reads two data sets at once, the trial goes on on one device; unless the
losses say what they weigh (`FleetTrial.weighted`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from optuna_fleet.exceptions import TrialError
from optuna_fleet.trainer.gradients.collectives import share_of_sum
from optuna_fleet.trainer.groups import group_size

_MOST_AHEAD = 64  # batches; of those that are read further ahead the last count


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a batch, in samples.

    A padding sample, which only keeps the ranks in step, counts for nothing: it has 0 of them.
    While nothing is known both are 0, and every rank counts alike.
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


@dataclass(slots=True)
class _Pass:
    """One pass over training batches."""

    last: deque[Share] = field(default_factory=lambda: deque(maxlen=_MOST_AHEAD))  # handed out
    num_new: int = 0  # of these since gradients were reduced
    ahead: int = 1  # most that were between two reductions: a loss may be of any of so many

    @property
    def is_used_up(self) -> bool:
        """Whether each batch was trained on before the next."""
        return self.ahead == 1 and not self.num_new

    def at_hand(self) -> list[Share]:
        """What a loss may be of."""
        return list(self.last)[-max(self.ahead, self.num_new) :]


class Weights:
    """What the batches of a rank weigh. One per run; its reducer and BatchNorms look at it.

    Attributes:
        too_wide: See `Widths`.
        present: The share of the batch that was handed out last.
        lockstep: True while every rank is served equally many batches. Only then do BatchNorm
            layers in training mode communicate under ``no_grad`` (``swa_utils.update_bn``).
        step: How many batches were handed out for training; 0 where another thread takes them.
    """

    def __init__(
        self,
        too_wide: Callable[..., TrialError] = TrialError,
        begin_collective: Callable[[str, int], object] = lambda purpose, step: None,
    ) -> None:
        self.too_wide = too_wide
        self._begin_collective = begin_collective
        self._thread = threading.get_ident()
        self._is_threaded = False
        self.present = Share()
        self.lockstep = self._has_trained = False
        self._is_weighted = self._is_ahead = False
        self.step = 0
        self._open: dict[int, tuple[Share, bool]] = {}
        self._passes: dict[int, _Pass] = {}
        self._settled: Share | None = None

    # -- collectives ------------------------------------------------------------------------------

    def begin(self, purpose: str) -> None:
        """This rank begins a collective, of which others can tell how far it is."""
        self._begin_collective(purpose, self.step)

    def check_step(self, purpose: str) -> None:
        """All ranks are about to call something.

        Raises:
            TrialError: In an evaluation's step that some have no sample for, and skip.
        """
        open_ = self._open.values()
        sizes = [share.global_size for share, lockstep in open_ if not lockstep]
        if sizes and min(sizes) < group_size():
            raise self.too_wide(
                f"{purpose}() was called within an evaluation's step that {min(sizes)} of the "
                f"trial's {group_size()} devices have a sample for: the others skip it. Add up in "
                f"a local variable, and call {purpose}() after the loop.",
                max_devices=min(sizes),
            )

    # -- batches ----------------------------------------------------------------------------------

    def hand_out(
        self, number: int, share: Share, *, lockstep: bool, trains: bool, is_whole: bool = False
    ) -> None:
        """The objective is about to get a batch of the pass of that number, or all of it."""
        self._open.pop(number, None)  # the last of these is what came last
        self._open[number] = (share, lockstep)
        self._use_last()
        if not trains:
            return
        self._has_trained |= not is_whole
        self._is_threaded = self._is_threaded or threading.get_ident() != self._thread
        self.step = 0 if self._is_threaded else self.step + 1
        self._settled = None
        if number not in self._passes:  # those whose batches were only kept are over
            self._passes = {n: one for n, one in self._passes.items() if n in self._open}
        one = self._passes.setdefault(number, _Pass())
        one.last.append(share)
        one.num_new += 1

    def close(self, number: int) -> None:
        """A pass has ended; the batch in use is again that of those which are open."""
        if number in self._passes and self._passes[number].is_used_up:
            del self._passes[number]
        if self._open.pop(number, None) is not None and self._open:
            self._use_last()

    @property
    def is_reading(self) -> bool:
        """Whether batches are being read."""
        return bool(self._open)

    def reads_only(self, number: int) -> bool:
        """Whether no other pass than that of this number is under way."""
        return self._open.keys() <= {number}

    def _use_last(self) -> None:
        self.present, self.lockstep = next(reversed(self._open.values()))

    def take_trained(self) -> bool:
        """Whether a part of a batch was handed out for training since this was last asked."""
        has_trained, self._has_trained = self._has_trained, False
        return has_trained

    # -- gradients --------------------------------------------------------------------------------

    def settle(self) -> Share:
        """What gradients are multiplied with in the reduction that comes: the same until it ends.

        Raises:
            TrialError: The batches at hand weigh unlike.
        """
        if self._settled is None:
            shares = self._at_hand()
            if len({share.pattern for share in shares}) == 1:
                self._settled = shares[-1]
            elif self._is_weighted and (self._is_ahead or not _have_padding(shares)):
                self._settled = Share()
            else:
                raise self._unlike(shares)
        return self._settled

    def are_padding(self) -> bool:
        """Whether the samples that a model is called with must not count on this rank.

        Raises:
            TrialError: They may be of one of several batches, and are padding in some.
        """
        if not torch.is_grad_enabled():
            return self.present.dummy
        shares = self._at_hand()
        if len({share.pattern for share in shares}) > 1 and _have_padding(shares):
            raise self._unlike(shares)
        return shares[-1].dummy

    def _at_hand(self) -> list[Share]:
        """The batches that a loss may be of; at least one, which was handed out last."""
        new = [one for one in self._passes.values() if one.num_new]
        shares = [share for one in new or self._passes.values() for share in one.at_hand()]
        return shares or [self.present]

    def _unlike(self, shares: Iterable[Share]) -> TrialError:
        sizes = ", ".join(map(str, sorted({share.global_size for share in shares})))
        return self.too_wide(
            f"Gradients of one step come, or may come, from batches of unlike sizes ({sizes}), "
            f"which the trial's {group_size()} devices share unlike, so that their mean can't be "
            "exact. Train on each batch before the next is read; or read with drop_last=True and "
            "batch sizes that the number of devices divides; or note `size = trial.shard_size` as "
            "each is read, and give its loss its weight, `trial.weighted(loss, size, "
            "fetched_ahead=True)`."
        )

    def weigh(self, loss: Tensor, weight: Tensor, *, fetched_ahead: bool) -> Tensor:
        """Returns `loss`, whose gradients will count with that weight instead of the shard's.

        If it may be of another batch than the last, `weight` is 0 where that is padding.
        """
        self.begin("trial.weighted")
        is_padding = self.present.dummy and not fetched_ahead
        part = share_of_sum(torch.zeros_like(weight) if is_padding else weight)
        part = part.to(loss.device)

        def factor() -> Tensor | float:
            share = self.settle()
            return 0.0 if share.dummy else part / share.weight

        self._is_weighted, self._is_ahead = True, fetched_ahead
        drop_nans(loss, part == 0)
        return _Scaled.apply(loss, factor)  # type: ignore[no-any-return]

    def reduced(self) -> None:
        """Gradients were reduced."""
        for one in self._passes.values():
            one.ahead, one.num_new = max(one.ahead, one.num_new), 0
        self._settled, self._is_weighted = None, False


def _have_padding(shares: Iterable[Share]) -> bool:
    return any(share.global_size < group_size() for share in shares)


class _Scaled(torch.autograd.Function):
    """The same value; its gradient times `factor()`, asked for when that is there."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: Callable[[], Tensor | float]) -> Tensor:
        ctx.factor = factor
        return value.detach()  # which, unlike a view, may be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * ctx.factor()).to(grad.dtype), None


def drop_nans(loss: Tensor, is_unweighted: Tensor) -> None:
    """Of a rank without any weight nothing must count, also where its loss is 0 / 0.

    Such a quotient lies between the loss and the sums that it is made of: among scalars.
    """
    if loss.grad_fn is not None:
        _clean(loss.grad_fn, is_unweighted)


def _clean(node: Any, is_unweighted: Tensor) -> None:
    """Clean what a node of scalars hands on, and those of scalars that it hands it to."""
    following = [function for function, _ in node.next_functions]

    def cleaned(grads: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        for function, grad in zip(following, grads, strict=True):
            if function is not None and grad is not None and not grad.shape:
                _clean(function, is_unweighted)
        return tuple(
            None if grad is None else torch.where(is_unweighted, torch.zeros_like(grad), grad)
            for grad in grads
        )

    node.register_hook(cleaned)
