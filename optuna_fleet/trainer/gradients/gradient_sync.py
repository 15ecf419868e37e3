"""Exact data parallelism: gradients are the mean over the *global* batch, however it is split.

A model is not wrapped. Hooks at its parameters reduce their gradients, in buckets that overlap
with the backward pass, and the model stays the user's own object: its type, attributes,
``state_dict`` keys, copies and pickles do not depend on the number of devices. Because the hooks
see gradients, not calls of ``forward``, training through other methods (``model.encode(x)``),
parts of the model or several forward passes is synchronised too;
``DistributedDataParallel`` misses those silently.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from optuna_fleet.exceptions import FleetConfigError, TrialError
from optuna_fleet.trainer.gradients import batchnorm, module_hooks
from optuna_fleet.trainer.gradients.shares import BatchShares, Share
from optuna_fleet.trainer.groups import check_agreement, group_size, wire_device

_BUCKET_BYTES = 25 * 2**20
_FIRST_BUCKET_BYTES = 2**20  # small, so that communication starts early in the backward pass
_TAGS = 3  # what is summed over hundreds of ranks must be exact in half precision


def make_data_parallel(module: torch.nn.Module, shares: BatchShares) -> torch.nn.Module:
    """Train `module` data-parallel over the default group; call it on all ranks alike.

    Parameters and buffers are made equal to those of rank 0, BatchNorm is synchronised, and from
    now on each backward pass leaves in ``grad`` the mean over the global batch (the loss of a rank
    being the mean over its shard, or what `BatchShares.weigh` returned). Optimizers may exist
    already. Only ``backward`` communicates, and BatchNorm in training mode. Parameters may be
    frozen and unfrozen at any time, but parameters added later are not reduced.

    Returns:
        `module` itself; untouched if the group has one rank.

    Raises:
        TrialError: If the ranks' models differ in structure.
    """
    if group_size() == 1:
        return module
    check_same(module)
    _broadcast([*module.parameters(), *module.buffers()])
    attach(module, shares)
    return module


def check_initialised(module: torch.nn.Module) -> None:
    """Check that no tensor of a module is still to be made.

    Raises:
        FleetConfigError: A lazy one has not seen its first batch.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if torch.nn.parameter.is_lazy(tensor):
            raise FleetConfigError(
                f"The tensor {name!r} of {type(module).__name__} is lazy, but must be "
                f"initialised: run one batch through the model before `trial.prepare`."
            )


def check_same(module: torch.nn.Module) -> None:
    """Compare the structure of a model over the ranks.

    Raises:
        TrialError: It differs.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    check_agreement(
        ((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors),
        f"The model {type(module).__name__}",
    )


def attach(module: torch.nn.Module, shares: BatchShares) -> None:
    """Let a model that is alike on all ranks train data-parallel, until `BatchShares.end`.

    In a group of one it trains as if nothing had been done.
    """
    batchnorm.begin(shares)
    module_hooks.watch(module.modules())
    _Reducer(module, shares)


OUT_OF_STEP = (
    "The ranks of the trial are not at the same batch: one has left out a `backward` that others "
    "have done, as in `if not loss.isfinite(): continue`, where a rank sees the loss of its own "
    "samples only. What decides must be alike on all ranks: decide on `trial.mean(loss.item(), "
    "weight=trial.shard_size)`."
)


class _Bucket:
    """Gradients that travel together: their places in one flat buffer, one flag for each, a tag.

    A flag counts the ranks that have this gradient: where none has, ``grad`` stays None, as it
    would in one process, and the optimizer skips the parameter. The tag tells the steps apart.
    There is room for bytes that travel along: of each, one rank has what is not 0.
    """

    def __init__(self, params: list[Tensor], num_bytes: int = 0) -> None:
        sizes = [param.numel() for param in params]
        size = sum(sizes) + len(params) + 1
        self.params = [TensorWeakRef(param) for param in params]
        self.all = torch.zeros(size + num_bytes, dtype=params[0].dtype, device=params[0].device)
        self.flat, self.room = self.all[:size], self.all[size:]
        self.extra: Tensor | None = None
        parts = torch.split(self.flat[: sum(sizes)], sizes)
        self.views = [part.view(param.shape) for part, param in zip(parts, params, strict=True)]
        self.arrived: set[int] = set()
        self.work: dist.Work | None = None

    @property
    def flags(self) -> Tensor:
        return self.flat[-len(self.params) - 1 : -1]

    def launch(self, share: Share, tag: int) -> None:
        """Start to sum the gradients over the ranks, each weighted by its share."""
        present = []
        for ref, view in zip(self.params, self.views, strict=True):
            param = ref()
            grad = None if param is None else param.grad
            present.append(grad is not None)
            # A dummy's gradient may be NaN, which a weight of 0 would not remove.
            if grad is None or share.dummy:
                view.zero_()
            else:
                view.copy_(grad.to_dense() if grad.is_sparse else grad)
        self.flat[: -len(self.params) - 1].mul_(share.weight)
        if all(present):
            self.flags.fill_(1)
        else:
            self.flags.copy_(torch.tensor(present, device="cpu"))
        self.flat[-1] = tag
        num_bytes = 0
        if self.extra is not None:
            num_bytes = len(self.extra)
            self.room[:num_bytes] = self.extra
        # As much as on all ranks, whatever room those of an earlier group have had.
        self.work = dist.all_reduce(self.all[: len(self.flat) + num_bytes], async_op=True)

    def collect(self, tag: int) -> None:
        """Wait for the sums and make them the parameters' gradients.

        Raises:
            TrialError: The ranks are not at the same batch. On the CPU only: elsewhere to look at
                the tag would wait for the device.
        """
        assert self.work is not None
        self.work.wait()
        self.work = None
        if self.flat.device.type == "cpu" and self.flat[-1].real != tag * group_size():
            raise TrialError(OUT_OF_STEP)
        params = [ref() for ref in self.params]
        # Reading flags waits for the device, so it is left out while every gradient is here.
        missing = any(param is not None and param.grad is None for param in params)
        flags = self.flags.real.tolist() if missing else itertools.repeat(1.0)
        for param, view, flag in zip(params, self.views, flags, strict=False):
            if param is not None and flag:
                _set_grad(param, view)

    def take_extra(self) -> Tensor | None:
        """What has travelled along."""
        extra, self.extra = self.extra, None
        return None if extra is None else self.room[: len(extra)].real.to(torch.uint8)

    def abandon(self) -> None:
        """Forget a pass; an exception or a nested backward came between."""
        if self.work is not None:
            self.work.wait()
        self.work = None
        self.arrived.clear()


class _Reducer:
    """Reduces the gradients of one module; kept alive by the hooks at its parameters.

    It refers to the parameters weakly, so that there is no cycle and a finished trial's memory is
    free at once.
    """

    def __init__(self, module: torch.nn.Module, shares: BatchShares) -> None:
        params = list(module.parameters())
        self._shares = shares
        self._share = Share()
        self._tag = 0
        self._params = [TensorWeakRef(param) for param in params]
        self._trained: tuple[bool, ...] = ()
        self._num_bytes = 0  # that can travel along
        self._buckets: list[_Bucket] = []
        self._places: dict[int, tuple[int, int]] = {}
        self._num_launched = 0
        self._task: int | None = None  # the backward pass under way
        for index, param in enumerate(params):
            if param.is_floating_point() or param.is_complex():
                hook = torch.no_grad()(partial(self._arrive, index))
                shares.hooks.append(hook_gradient(param, hook))

    def _arrive(self, index: int, _: Tensor) -> None:
        if group_size() == 1:  # the model has outlived its group
            return
        # A nested backward (reentrant checkpointing) and one after a backward that failed are
        # passes of their own. Reducing a reduced gradient again is harmless: weights add up to 1.
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._begin(task)
        bucket_index, slot = self._places[index]
        self._buckets[bucket_index].arrived.add(slot)
        # In order, because the ranks must agree on the order of collectives.
        for bucket in self._buckets[self._num_launched :]:
            if len(bucket.arrived) < len(bucket.params):
                break
            bucket.launch(self._share, self._tag)
            self._num_launched += 1

    def _begin(self, task: int) -> None:
        for bucket in self._buckets:
            bucket.abandon()
        extra = self._shares.at_gradients()
        num_bytes = self._num_bytes if extra is None else max(self._num_bytes, len(extra))
        self._shares.begin("the gradients")
        self._share, self._tag = self._shares.settle(), self._shares.step % _TAGS
        params = [ref() for ref in self._params]
        trained = tuple(param is not None and param.requires_grad for param in params)
        if (trained, num_bytes) != (self._trained, self._num_bytes):
            self._trained, self._num_bytes = trained, num_bytes
            self._make_buckets(params)
        self._buckets[0].extra = extra
        self._num_launched = 0
        self._task = task
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(self._finish, task))

    def _make_buckets(self, params: list[Tensor | None]) -> None:
        # Backward reaches the last layers first.
        indices = [index for index, trained in enumerate(self._trained) if trained][::-1]
        chosen = [param for index in indices if (param := params[index]) is not None]
        chunks = enumerate(_chunks(chosen))
        self._buckets = [_Bucket(c, 0 if place else self._num_bytes) for place, c in chunks]
        places = (
            (number, slot)
            for number, bucket in enumerate(self._buckets)
            for slot in range(len(bucket.params))
        )
        self._places = dict(zip(indices, places, strict=True))

    @torch.no_grad()
    def _finish(self, task: int) -> None:
        if task != self._task:
            return
        for bucket in self._buckets[self._num_launched :]:
            bucket.launch(self._share, self._tag)
        for bucket in self._buckets:
            bucket.collect(self._tag)
            bucket.arrived.clear()
        if (added := self._buckets[0].take_extra()) is not None:
            self._shares.at_reduced(added)
        self._shares.reduced()
        self._task = None


def hook_gradient(param: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
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


def _set_grad(param: Tensor, view: Tensor) -> None:
    if param.grad is None:
        param.grad = view.clone()
    elif param.grad.is_sparse:
        param.grad = view.to_sparse(param.grad.sparse_dim())
    else:
        param.grad.copy_(view)


def _chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Split in order into lists of one dtype and device and of bounded size."""
    for _, alike in itertools.groupby(tensors, key=lambda tensor: (tensor.dtype, tensor.device)):
        chunk: list[Tensor] = []
        num_bytes, limit = 0, _FIRST_BUCKET_BYTES
        for tensor in alike:
            chunk.append(tensor)
            num_bytes += tensor.numel() * tensor.element_size()
            if num_bytes >= limit:
                yield chunk
                chunk, num_bytes, limit = [], 0, _BUCKET_BYTES
        if chunk:
            yield chunk


@torch.no_grad()
def _broadcast(tensors: Iterable[Tensor]) -> None:
    """Give every rank the leader's values, in few messages."""
    for chunk in _chunks(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in chunk]).to(wire_device())
        # As bytes: not all types of numbers can travel.
        dist.broadcast(flat.view(torch.uint8), src=0)  # rank 0 of the trial's group
        parts = torch.split(flat, [tensor.numel() for tensor in chunk])
        for tensor, part in zip(chunk, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
