"""Which part of each batch this rank holds, and so what weight its gradients have in the trial's.

A rank's loss is the mean over its shard; the trial's gradient is the mean over the global batch,
so a rank's gradient weighs local / global samples. Loops need not use a batch as soon as they get
it: they fetch ahead, keep batches, read two data sets at once, skip steps. So the weight is not
that of the batch that came last, but that of the batches with which prepared modules were called
since the last reduction, as far as the graphs of these calls still live. Where these weigh unlike,
the gradient at the outputs of each call is scaled by its own weight. Where it can't be told which
batch a call is about, gradients are exact only with `FleetTrial.weighted`, and refused otherwise.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from optuna_fleet.exceptions import TrialError
from optuna_fleet.trainer.gradients.collectives import share_of_sum
from optuna_fleet.trainer.gradients.tensor_owners import Places, Scaled, drop_nans, owners_behind
from optuna_fleet.trainer.groups import group_size

_MOST_AHEAD = 64


@dataclass(frozen=True)  # no slots: torch.compile of torch 2.4 keeps weak references to these
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
    """The last batches of a pass; a call may be about any of those that are read ahead.

    Attributes:
        ahead: Most batches that were handed out between two calls: one, unless the loop reads
            ahead.
        num_new: How many since the last call.
    """

    last: deque[_Batch] = field(default_factory=lambda: deque(maxlen=_MOST_AHEAD))
    ahead: int = 0
    num_new: int = 0

    def at_hand(self) -> list[_Batch]:
        """Those that a call may be about of which it is not known which batch it is about."""
        return list(self.last)[-max(self.ahead, 1) :]


@dataclass(eq=False)
class _Call:
    """A call of a prepared module: alive as long as its graph, whose nodes hold it.

    Attributes:
        batches: Those that it may be about.
        is_scaled: Gradients of its outputs are scaled by `share` where others weigh unlike.
    """

    batches: frozenset[_Batch]
    is_scaled: bool = True

    @property
    def share(self) -> Share | None:
        """What its batch weighs; None where it can't be told, and batches weigh unlike."""
        shares = {batch.share.pattern: batch.share for batch in self.batches}
        return next(iter(shares.values())) if len(shares) == 1 else None


class BatchShares:
    """What the batches of a rank weigh. One per run; its reducers and BatchNorms look at it.

    Attributes:
        present: The share of the batch in use: the one that a module was called with, or else the
            one that was handed out last.
        lockstep: True while every rank is served equally many batches. Only then do BatchNorm
            layers in training mode communicate under ``no_grad`` (``swa_utils.update_bn``).
        step: How many batches had been handed out for training when a module was called last; 0
            where they are read ahead.
        collectives: Number, purpose and step of the last collectives of this rank.
        follows: Note which batches modules are called with on one device too.
        is_found: What a module was called with last is of a batch, or several, that are known.
        hooks: Of the reducers, at parameters.
        at_collective: Told what a collective is for that is about to begin.
        at_gradients: Called before gradients are reduced: returns bytes to travel along, if any.
        at_reduced: Called with these, added up over the ranks.
        on_too_wide: Told of what can't be done on so many devices, and on how many it can, before
            it is raised.
    """

    def __init__(self) -> None:
        self.follows = False
        self.on_too_wide: Callable[[str, int], None]
        self.at_collective: Callable[[str], None]
        self.at_gradients: Callable[[], Tensor | None]
        self.at_reduced: Callable[[Tensor], None]
        self.hooks: list[RemovableHandle] = []
        self.end()
        self._thread = threading.get_ident()
        self._is_threaded = False
        self.begin_run()

    def end(self) -> None:
        """Reduce no more, as a model may train in the next trial too, and tell nobody.

        The session leads here, and would keep all that is told as long as it is kept itself.
        """
        while self.hooks:
            self.hooks.pop().remove()
        self.on_too_wide = lambda text, max_devices: None
        self.at_collective = lambda purpose: None
        self.at_gradients = lambda: None
        self.at_reduced = lambda added: None

    def begin_run(self) -> None:
        """All ranks begin to count alike; nothing of an earlier batch is in use."""
        self.present = Share()
        self.lockstep = False
        self.step = 0
        self.is_found = False
        self.collectives: tuple[tuple[int, str, int], ...] = ((0, "", 0),)
        self._num_steps = 0
        self._open: dict[int, tuple[Share, bool]] = {}
        self._passes: dict[int, _Pass] = {}
        self._places = Places[_Batch]()
        self._known: _Batch | None = None  # what calls since the last hand-out were about
        self._calls: list[weakref.ref[_Call]] = []
        self._kept: list[_Call] = []  # whose outputs hold nothing
        self._reference: Share | None = None
        self._is_weighted = False
        self._depth = 0
        self._call: _Call | None = None  # under way

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchShares:
        # A copied model trains on the same batches, so its layers look at the same holder.
        return self

    def check_step(self, purpose: str) -> None:
        """All ranks are about to call something.

        Raises:
            TrialError: In an evaluation's step that some have no sample for, and skip.
        """
        open_ = self._open.values()
        sizes = [share.global_size for share, lockstep in open_ if not lockstep]
        if sizes and min(sizes) < group_size():
            raise self._too_wide(
                f"{purpose}() was called within an evaluation's step that {min(sizes)} of the "
                f"trial's {group_size()} devices have a sample for: the others skip it. Add up in "
                f"a local variable, and call {purpose}() after the loop.",
                max_devices=min(sizes),
            )

    def begin(self, purpose: str) -> None:
        """This rank begins a collective, of which others can tell how far it is."""
        self.at_collective(purpose)
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
        if not trains or not (self.follows or group_size() > 1):
            return
        self._is_threaded = self._is_threaded or threading.get_ident() != self._thread
        batch, self._known, self._reference = _Batch(share, self._num_steps), None, None
        if number not in self._passes:  # those whose batches were only kept are over
            self._passes = {n: one for n, one in self._passes.items() if n in self._open}
        one = self._passes.setdefault(number, _Pass())
        one.last.append(batch)
        one.num_new += 1
        self._places.add(batch, data)

    def close(self, number: int) -> None:
        """A pass has ended; the batch in use is again that of those which are open."""
        one = self._passes.get(number)
        if one is not None and one.ahead:
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

    # -- calls of prepared modules ----------------------------------------------------------------

    def enter(self, module: torch.nn.Module, inputs: Any) -> Any:
        """See `module_hooks.Listener`."""
        self._depth += 1
        if not self._num_steps or (self._depth > 1 and self.is_found):
            return None
        batches = self.identify(inputs)
        if self._depth > 1:
            if self.is_found and self._call is not None:
                self._call.batches = batches
            return None
        if not torch.is_grad_enabled():
            return None
        self._call = _Call(batches)
        self._calls.append(weakref.ref(self._call))
        # What comes through the outputs of this call is scaled there, but may come from others.
        return self._scaled(inputs, self._call, is_inverse=True)

    def leave(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
        """See `module_hooks.Listener`."""
        self._depth -= 1
        if self._depth or self._call is None:
            return None
        call, self._call = self._call, None
        scaled = self._scaled(outputs, call, is_inverse=False)
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(outputs)):
            call.is_scaled = False  # an object of the user's, say, with tensors in it
            self._kept.append(call)
        return scaled

    def _scaled(self, values: Any, call: _Call, *, is_inverse: bool) -> Any:
        """`values`, nested, with the gradients of all that has any scaled; None if nothing has.

        By the share of their call, where others weigh unlike.
        """

        def factor() -> float | None:
            reference, share = self.settle(), call.share
            if share is None or share.pattern == reference.pattern:
                return None
            ratio = share.weight / reference.weight
            return ratio if not is_inverse else 1 / ratio if ratio else 0.0

        def scale(value: Tensor) -> Tensor:
            return value if value.grad_fn is None else Scaled.apply(value, call, factor)

        leaves = pytree.tree_leaves(values)
        has_any = any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in leaves)
        return pytree.tree_map_only(Tensor, scale, values) if has_any else None

    def identify(self, inputs: Any) -> frozenset[_Batch]:
        """A module is called with these inputs: returns the batches that this may be about."""
        for one in self._passes.values():
            one.ahead, one.num_new = max(one.ahead, one.num_new), 0
        found = self._places.owners(inputs)
        self.is_found = bool(found)
        if len(found) == 1:
            (self._known,) = found
            self.present = self._known.share
        # As on all ranks, whether or not each has found its part of the batch.
        reads_ahead = self._is_threaded or any(one.ahead > 1 for one in self._passes.values())
        self.step = 0 if reads_ahead else self._num_steps
        if found:
            return frozenset(found)
        # What was made of a batch that a module was called with before, or of another one.
        others = [one.at_hand() for one in self._passes.values()]
        if self._known is not None:
            others = [[self._known], *(some for some in others if self._known not in some)]
        return frozenset(batch for some in others for batch in some)

    def unclear(self, inputs: Any) -> list[int]:
        """A module is called: sizes of the batches this may be about; empty if that is clear."""
        batches = self.identify(inputs)
        return [batch.share.global_size for batch in batches] if len(batches) > 1 else []

    # -- gradients --------------------------------------------------------------------------------

    def share_behind(self, loss: Tensor) -> Share | None:
        """The share of the batch that a loss is of; None if that can't be told.

        Raises:
            TrialError: It is of several, which weigh unlike.
        """
        shares = [call.share for call in owners_behind(loss, _Call)]
        known = {share.pattern: share for share in shares if share is not None}
        if len(known) > 1:
            raise self._unlike(known.values())
        return next(iter(known.values())) if known and None not in shares else None

    def weigh(self, loss: Tensor, weight: Tensor) -> Tensor:
        """Returns `loss`, whose gradients will count with that weight instead of the shard's.

        Args:
            loss: This rank's loss.
            weight: A scalar; of the ranks' sum this is its part in the trial's loss.
        """
        self.begin("trial.weighted")
        share = self.share_behind(loss)
        is_dummy = (share or self.present).dummy
        part = share_of_sum(torch.zeros_like(weight) if is_dummy else weight)
        return self._weighed(loss, part.to(loss.device), share)

    def _weighed(self, loss: Tensor, weight: Tensor, share: Share | None) -> Tensor:
        def factor() -> Tensor | float:
            batch = share or self.settle()
            return 0.0 if batch.dummy else weight / batch.weight

        self._is_weighted = True
        drop_nans(loss, weight == 0)
        return Scaled.apply(loss, None, factor)  # type: ignore[no-any-return]

    def settle(self) -> Share:
        """What gradients are multiplied with in the reduction that comes: the same until it ends.

        A backward pass is under way, so only graphs live that it may be about.

        Raises:
            TrialError: It can't be told which batch a part of it is about, and they weigh unlike.
        """
        if self._reference is not None:
            return self._reference
        calls = [call for ref in self._calls if (call := ref()) is not None]
        if not calls:
            calls = [_Call(self.identify(()))]
        shares = {batch.share for call in calls for batch in call.batches}
        if len({share.pattern for share in shares}) < 2:
            self._reference = next(iter(shares), self.present)
            return self._reference
        is_weighted = self._is_weighted and all(s.global_size >= group_size() for s in shares)
        if not is_weighted and any(call.share is None or not call.is_scaled for call in calls):
            raise self._unlike(shares)
        self._reference = Share()
        return self._reference

    def _unlike(self, shares: Iterable[Share]) -> TrialError:
        sizes = ", ".join(map(str, sorted({share.global_size for share in shares})))
        return self._too_wide(
            f"Gradients of one step come, or may come, from batches of unlike sizes ({sizes}), "
            f"which the trial's {group_size()} devices share unlike, so that their mean can't be "
            "exact. Hand each to the model as it came from trial.batches, with a loss of its own; "
            "or read them with drop_last=True and batch sizes that the number of devices divides; "
            "or give each loss its weight, `trial.weighted(loss_1, len(x_1)) + "
            "trial.weighted(loss_2, len(x_2))`.",
            max_devices=1,
        )

    def _too_wide(self, text: str, *, max_devices: int) -> TrialError:
        self.on_too_wide(text, max_devices)
        return TrialError(text)

    def reduced(self) -> None:
        """Gradients were reduced."""
        self._calls.clear()
        self._kept.clear()
        self._reference = None
        self._is_weighted = False
