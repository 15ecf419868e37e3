"""Exact data parallelism: gradients are the mean over the *global* batch, however it is split.

A model is not wrapped. Hooks at its parameters reduce their gradients when a backward pass has
reached them, and the model stays the user's own object: its type, attributes, ``state_dict`` keys,
copies and pickles do not depend on the number of devices. Because the hooks see gradients, not
calls of ``forward``, training through other methods (``model.encode(x)``), parts of the model or
several forward passes is synchronised too; ``DistributedDataParallel`` misses those silently.

There is one reducer for all that a trial has prepared, since ranks must reduce the same in the
same order, and what a backward pass reaches may depend on a rank's samples. At the end of a pass
the ranks agree which gradients any of them has, and reduce these. While these belong to one module
they expect the same of the next pass of the epoch: its gradients travel during that pass, and only
what has arrived beside the expected needs another agreement.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from optuna_fleet.exceptions import TrialError
from optuna_fleet.trainer.gradients.weights import Share, Weights
from optuna_fleet.trainer.groups import group_size, wire_device

_BUCKET_BYTES = 25 * 2**20
_FIRST_BUCKET_BYTES = 2**20  # small, so that communication starts early in the backward pass
_TAGS = 3  # what is summed over hundreds of ranks must be exact in half precision
_MOST_PLANS = 4  # whose buffers are kept, where passes reach now these modules, now those
_NONE, _SPARSE, _DENSE = range(3)
"""What kind of gradient a parameter has; of those on several ranks, the greatest."""

OUT_OF_STEP = (
    "The ranks of the trial are not at the same batch: one has left out a `backward` that others "
    "have done, as in `if not loss.isfinite(): continue`, where a rank sees the loss of its own "
    "samples only. What decides must be alike on all ranks: decide on `trial.mean(loss.item(), "
    "weight=trial.shard_size)`."
)

NESTED = (
    "A backward pass runs within another one, as activation checkpointing with use_reentrant=True "
    "makes it: the gradients of all parameters are exchanged in each. That is exact, but slow; "
    "use_reentrant=False exchanges them once."
)


class Reducer:
    """Reduces the gradients of the modules that it watches, and counts backward passes.

    It refers to parameters weakly: a finished trial's memory is free at once.

    Attributes:
        num_passes: Backward passes that have reached a parameter, on one device as well.
    """

    def __init__(self, weights: Weights, remark: Callable[[list[str], str], None]) -> None:
        self.num_passes = 0
        self._weights = weights
        self._remark = remark
        self._stepped: dict[int, int] = {}  # by optimizer: after how many passes, the last time
        self._hooks: list[RemovableHandle] = [register_optimizer_step_post_hook(self._has_stepped)]
        self._params: list[TensorWeakRef] = []
        self._module_of: list[int] = []
        self._reached = set[int]()  # modules, in this epoch
        self._plans: dict[bytes, _Plan] = {}
        self._expected: _Plan | None = None
        self._task: int | None = None  # the backward pass under way
        self._arrived = bytearray()  # the kind of each parameter's gradient in it
        self._is_shared = False  # among several ranks

    def watch(self, module: torch.nn.Module) -> None:
        """Reduce the gradients of this module's parameters, each of them once, from now on.

        All ranks watch the same modules in the same order. Parameters may be frozen and unfrozen
        at any time, but those that are added later are not reduced.
        """
        known = {id(param) for ref in self._params if (param := ref()) is not None}
        number = len(set(self._module_of))
        for param in module.parameters():
            if id(param) not in known and (param.is_floating_point() or param.is_complex()):
                self._hooks.append(_hook_gradient(param, partial(self._arrive, len(self._params))))
                self._params.append(TensorWeakRef(param))
                self._module_of.append(number)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Expect nothing of the next pass: other parameters may be trained from now on."""
        self._expected = self._task = None
        self._arrived = bytearray(len(self._params))
        self._reached.clear()
        self._plans.clear()

    def close(self) -> None:
        """Reduce no more: a model may train in the next trial too."""
        while self._hooks:
            self._hooks.pop().remove()

    def awaits_step_of(self, objects: Sequence[object]) -> bool:
        """Whether gradients wait for the step of some optimizer among these, and must be kept."""
        optimizers = [id(one) for one in objects if isinstance(one, torch.optim.Optimizer)]
        return any(self._stepped.get(one) != self.num_passes for one in optimizers)

    def _has_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._stepped[id(optimizer)] = self.num_passes

    # -- one backward pass ------------------------------------------------------------------------

    def _arrive(self, index: int, param: Tensor) -> None:
        """A backward pass has added to a parameter's gradient."""
        # A nested backward (reentrant checkpointing) and one after a backward that failed are
        # passes of their own. Reducing a reduced gradient again is harmless: weights add up to 1.
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._begin(task)
        grad = param.grad
        if not self._is_shared or grad is None:  # it was frozen after the forward pass
            return
        self._arrived[index] = _SPARSE if grad.is_sparse and grad.sparse_dim() == 1 else _DENSE
        if (plan := self._expected) is not None and (
            number := plan.bucket_of.get(index)
        ) is not None:
            plan.missing[number] -= 1
            if not plan.missing[number] and number + 1 < len(plan.missing):
                plan.launch_full(self._share, self._tag)

    def _begin(self, task: int) -> None:
        self.num_passes += 1
        self._task = task
        self._is_shared = group_size() > 1
        if not self._is_shared:
            return
        if self._expected is not None:
            self._expected.begin()
        self._weights.begin("the gradients")
        self._share, self._tag = self._weights.settle(), self._weights.step % _TAGS
        # What has arrived in a pass that goes on around this one is reduced with it.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(self._finish, task))

    @torch.no_grad()
    def _finish(self, task: int) -> None:
        if task != self._task:  # another pass has begun and ended within this one
            self._remark(["a nested backward"], NESTED)
            return
        self._task = None
        expected = self._expected
        if expected is None or expected.finish(self._arrived, self._share, self._tag):
            self._reduce_others(expected)
        self._arrived = bytearray(len(self._params))
        self._weights.reduced()

    def _reduce_others(self, expected: _Plan | None) -> None:
        """Agree with the other ranks on what was not expected, and reduce that."""
        done = bytes(len(self._params)) if expected is None else expected.pattern
        pattern = self._agreed()
        others = bytes(kind * (kind > past) for kind, past in zip(pattern, done, strict=True))
        plan = self._plan(others)
        plan.begin()
        plan.finish(self._arrived, self._share, self._tag)
        self._expect(bytes(map(max, pattern, done)))

    def _expect(self, known: bytes) -> None:
        """The next pass may reach the same: all that any has in this epoch, of one module."""
        self._reached |= {self._module_of[i] for i, kind in enumerate(known) if kind}
        if wire_device().type != "cpu":  # where nobody is told of more: all that is trained
            self._reached |= set(self._module_of)
            params = [ref() for ref in self._params]
            trained = [param is not None and param.requires_grad for param in params]
            known = bytes(kind or _DENSE * one for kind, one in zip(known, trained, strict=True))
        self._expected = self._plan(known) if len(self._reached) == 1 else None

    def _agreed(self) -> bytes:
        """What kind of gradient each parameter has, on any rank."""
        own = self._arrived + bytes([self._tag, _TAGS - self._tag])
        everyone = torch.frombuffer(own, dtype=torch.uint8).to(wire_device())
        dist.all_reduce(everyone, dist.ReduceOp.MAX)
        *pattern, most, least = everyone.tolist()
        if most + least != _TAGS:
            raise TrialError(OUT_OF_STEP)
        return bytes(pattern)

    def _plan(self, pattern: bytes) -> _Plan:
        if pattern not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[pattern] = _Plan(pattern, self._params)
        return self._plans[pattern]


class _Plan:
    """The messages that reduce all gradients which a pattern tells of.

    Attributes:
        pattern: The kind of each parameter's gradient.
        bucket_of: The number of the bucket that a gradient is in, by that of its parameter.
        missing: How many gradients of each bucket have not arrived in this pass.
    """

    def __init__(self, pattern: bytes, params: Sequence[TensorWeakRef]) -> None:
        self.pattern = pattern
        # Backward reaches the last layers first.
        indices = [index for index, kind in enumerate(pattern) if kind][::-1]
        there = [(index, param) for index in indices if (param := params[index]()) is not None]
        chunks = list(_chunks(there))
        self._buckets = [
            _Bucket([param for _, param in chunk], [pattern[index] for index, _ in chunk])
            for chunk in chunks
        ]
        self.bucket_of = {index: n for n, chunk in enumerate(chunks) for index, _ in chunk}
        self.begin()

    def begin(self) -> None:
        """A pass begins, whatever has become of another one."""
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        self.missing = [len(bucket.params) for bucket in self._buckets]
        self._num_launched = 0

    @torch.no_grad()
    def launch_full(self, share: Share, tag: int) -> None:
        """Start to reduce the buckets that are full, in order, as the ranks must agree on that.

        Not the last one, which tells whether anything has arrived beside.
        """
        for bucket in self._buckets[self._num_launched : -1]:
            if self.missing[self._num_launched]:
                break
            bucket.launch(share, tag)
            self._num_launched += 1

    def finish(self, arrived: bytearray, share: Share, tag: int) -> bool:
        """Reduce what is left; returns whether any rank has gradients beside, or of another kind.

        On a GPU that is only looked for on this rank: to hear of others would wait for the device.
        """
        is_more = any(map(operator.gt, arrived, self.pattern))
        for bucket in self._buckets[self._num_launched :]:
            bucket.launch(share, tag, is_more=is_more)
        for bucket in self._buckets:
            is_more |= bucket.collect(tag)
        return is_more


class _Bucket:
    """Gradients that travel together: their places in one flat buffer, and what tells of them.

    A flag counts the ranks that have this gradient: where none has, ``grad`` stays None, as it
    would in one process, and the optimizer skips the parameter. Of sparse gradients each row has
    such a flag. The tag tells the steps apart; the last number counts the ranks that have more
    than all expect.
    """

    def __init__(self, params: Sequence[Tensor], kinds: Sequence[int]) -> None:
        self.params = [TensorWeakRef(param) for param in params]
        sizes = [param.numel() for param in params]
        rows = [
            len(param) if kind == _SPARSE else 0 for param, kind in zip(params, kinds, strict=True)
        ]
        num_flags = [len(params), 1, 1]
        self._flat = params[0].new_zeros(sum([*sizes, *rows, *num_flags]), requires_grad=False)
        *parts, self._flags, self._tag, self._more = torch.split(
            self._flat, [*sizes, *rows, *num_flags]
        )
        self._views = [v.view(param.shape) for v, param in zip(parts, params, strict=False)]
        self._rows = [part if len(part) else None for part in parts[len(params) :]]
        self.work: dist.Work | None = None  # under way
        self._has_all = True

    def launch(self, share: Share, tag: int, *, is_more: bool = False) -> None:
        """Start to sum the gradients over the ranks, each weighted by its share."""
        present, is_padding, weight = [], share.dummy, share.weight
        for ref, view, rows in zip(self.params, self._views, self._rows, strict=True):
            param = ref()
            grad = None if param is None else param.grad
            present.append(grad is not None)
            if rows is not None:
                _mark_rows(rows, grad)
            # A dummy's gradient may be NaN, which a weight of 0 would not remove.
            if grad is None or is_padding:
                view.zero_()
            else:
                torch.mul(grad.to_dense() if grad.is_sparse else grad, weight, out=view)
        self._has_all = all(present)
        if self._has_all:
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(present, device="cpu"))
        self._tag.fill_(tag)
        self._more.fill_(is_more)
        self.work = dist.all_reduce(self._flat, async_op=True)

    def collect(self, tag: int) -> bool:
        """Wait for the sums and make them the parameters' gradients.

        Returns whether any rank has more, on the CPU. Elsewhere to look would wait for the device.

        Raises:
            TrialError: The ranks are not at the same batch. On the CPU only.
        """
        assert self.work is not None
        self.work.wait()
        self.work = None
        on_cpu = self._flat.device.type == "cpu"
        if on_cpu and self._tag.real.item() != tag * group_size():
            raise TrialError(OUT_OF_STEP)
        # Reading flags waits for the device, so it is left out while every gradient is here.
        flags = itertools.repeat(1.0) if self._has_all else self._flags.real.tolist()
        for ref, view, rows, flag in zip(
            self.params, self._views, self._rows, flags, strict=False
        ):
            if (param := ref()) is None or not flag:
                continue
            if rows is not None:
                param.grad = _sparse(view, rows)
            elif param.grad is None or param.grad.is_sparse:
                param.grad = view.clone()
            else:
                param.grad.copy_(view)
        return on_cpu and bool(self._more.real.item())


def _mark_rows(rows: Tensor, grad: Tensor | None) -> None:
    """Which rows a sparse gradient has; a dense one has all."""
    rows.zero_()
    if grad is not None:
        rows[grad._indices()[0] if grad.is_sparse else slice(None)] = 1


def _sparse(view: Tensor, rows: Tensor) -> Tensor:
    """The sum of sparse gradients: it has the rows that any of them has, zeros too."""
    indices = rows.real.nonzero().T
    values = view[indices[0]]
    return torch.sparse_coo_tensor(
        indices, values, view.shape, is_coalesced=True, check_invariants=False
    )


def _hook_gradient(param: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `hook` each time that a backward pass has added to a parameter's gradient.

    While what it refers to leads to the parameter, neither is ever freed: Python's collector does
    not see that a parameter has the hook.
    """
    # A frozen parameter takes no hook, but keeps one, and may be unfrozen in a later epoch.
    frozen = not param.requires_grad
    param.requires_grad_(True)
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    if frozen:
        param.requires_grad_(False)
    return handle


def _chunks(params: Iterable[tuple[int, Tensor]]) -> Iterator[list[tuple[int, Tensor]]]:
    """Split in order into lists of one dtype and device and of bounded size."""
    for _, alike in itertools.groupby(params, key=lambda one: (one[1].dtype, one[1].device)):
        chunk: list[tuple[int, Tensor]] = []
        num_bytes, limit = 0, _FIRST_BUCKET_BYTES
        for index, param in alike:
            chunk.append((index, param))
            num_bytes += param.nbytes
            if num_bytes >= limit:
                yield chunk
                chunk, num_bytes, limit = [], 0, _BUCKET_BYTES
        if chunk:
            yield chunk
