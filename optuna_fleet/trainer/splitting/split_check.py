"""Finds losses that are no means over the samples of a batch: on one device, as they are trained.

On several devices each computes the loss of its part of the batch, and the gradients are averaged
by the number of samples. That is the gradient of the whole batch only if its loss is the mean over
the samples, or goes through `FleetTrial.weighted`. Class weights, means over tokens, contrastive
losses are none. So in some of a trial's first batches the loss is computed on two parts as well
(`Worlds`), and the gradients at the model's outputs are compared.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from optuna_fleet.trainer.gradients.reducer import Reducer
from optuna_fleet.trainer.splitting.cuts import MOST_NUMBERS
from optuna_fleet.trainer.splitting.errors import MixedError
from optuna_fleet.trainer.splitting.mixing import watch_hooks, why_alone
from optuna_fleet.trainer.splitting.module_calls import ModuleCalls
from optuna_fleet.trainer.splitting.precision import Tolerance
from optuna_fleet.trainer.splitting.tracked import tracked
from optuna_fleet.trainer.splitting.worlds import Counterparts, Worlds

_STEPS = frozenset({1, 2, 4, 8, 16, 32})
_MOST_BATCHES = 5  # that are fetched ahead
_TOLERANCE = Tolerance(double=1e-6, single=2e-3, coarse=5e-2)

FOUND = (
    "Its loss is not the mean over the samples of a batch: parts of a batch give gradients that "
    "differ by {percent:.2g} % from those of the whole. So that its results do not depend on the "
    "number of devices, the trial stays on one. A weighted mean (class weights, a mean over "
    "tokens) is exact on several with `trial.weighted(loss, the_sum_of_the_weights)`, a sum with "
    "`loss / len(x)`; a loss that compares samples of a batch with each other is not."
)

FAILS = (
    "A part of a batch can't be computed on as the whole is ({error}), so several devices could "
    "not share its batches. The trial stays on one. Take numbers of samples from the tensors at "
    "hand (`len(x)`) instead of the batch size that was asked for."
)

MIXES = (
    "Its model is called with samples that depend on others of their batch (on its mean, or mixed "
    "with them), which several devices would not have at hand. So that its results do not depend "
    "on the number of devices, the trial stays on one. BatchNorm in the model is exact on several."
)

TOO_LARGE = (
    "There is too little memory to look into its loss on parts of a batch. If that is not the "
    "mean over the samples of a batch (but over tokens, say, or weighted by class), results "
    "depend on the number of devices, unless it goes through `trial.weighted(loss, "
    "the_sum_of_the_weights)`."
)


class SplitCheck:
    """Looks at some of the first training batches of a run on one device.

    Args:
        found: Called once, with what keeps the trial on one device.
        remark: Called with what it is about and a sentence for the user.
        modules: What was prepared so far; grows while the objective runs.
        reducer: Counts backward passes.
    """

    def __init__(
        self,
        found: Callable[[str], None],
        remark: Callable[[list[str], str], None],
        modules: Sequence[torch.nn.Module],
        reducer: Reducer,
    ) -> None:
        self._found = found
        self._remark = remark
        self._modules = modules
        self._reducer = reducer
        self._calls: ModuleCalls | None = None
        self._depth = 0
        self._num_batches = 0
        self._num_followed = 0
        self._is_due = False  # to look at what comes next
        self._num_passes = -1  # backward ones, when a batch was handed out last
        self._worlds: Worlds | None = None
        self._most_samples: int | None = None  # that worlds have the memory for
        self._stopped: list[Worlds] = []  # that are still to come off their thread's stack
        self._has_compared = False
        self._is_done = False
        self._looked_into = weakref.WeakSet[torch.nn.Module]()

    def hand_out(self, data: Any, size: int) -> None:
        """The objective is about to get a training batch."""
        self._num_batches += 1
        worlds = self._worlds
        is_enough = self._has_compared or self._num_followed >= _MOST_BATCHES
        if self._stopped or (worlds is not None and (worlds.is_over or is_enough)):
            self.close()
        self._is_due |= self._num_batches in _STEPS
        is_ahead = self._num_passes == self._reducer.num_passes
        self._num_passes = self._reducer.num_passes
        if self._worlds is None:
            # Of batches that are fetched together, all are followed or none: their losses may be
            # divided by the number of labels in all of them.
            if self._is_done or not self._is_due or is_ahead or size < 2:
                return
            self._is_due = False
            self._worlds = Worlds(self._compare, self._fails, self._most_samples)
            self._num_followed, self._has_compared = 0, False
            self._worlds.start()
            self._depth = 0
            self._calls = ModuleCalls(self, self._modules)
        self._num_followed += 1
        self._worlds.add_batch(data, size)

    def close(self) -> None:
        """Look no more at what is computed."""
        if self._calls is not None:
            self._calls.close()
            self._calls = None
        if (worlds := self._worlds) is not None:
            self._worlds = None
            self._stopped.append(worlds)
            if worlds.fits is not None:
                self._most_samples = worlds.fits
            if worlds.fits == 0:
                self._is_done = True
                self._remark(["a loss that is too large"], TOO_LARGE)
        self._stopped = [worlds for worlds in self._stopped if not worlds.stop()]

    # Calls of prepared modules, as a `module_calls.Listener`.

    def enter(self) -> None:
        """See `module_calls.Listener`."""
        self._depth += 1
        if self._worlds is not None:
            self._worlds.enter()

    def leave(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        """See `module_calls.Listener`."""
        self._depth -= 1
        worlds = self._worlds
        if worlds is None:
            return
        is_trained = torch.is_grad_enabled() and outputs is not None and not worlds.is_over
        if self._depth == 0 and is_trained and module not in self._looked_into:
            self._looked_into.add(module)
            watch_hooks(module, weakref.WeakMethod(self._tell))
            if (why := why_alone(module, inputs, outputs, worlds.counterparts)) is not None:
                worlds.is_over = True  # and is stopped with the step
                self._tell(why)
        worlds.leave(module, inputs, outputs)

    def size(self, number: int) -> int:
        """The number of samples of the present batch, as code that is followed should see it."""
        worlds = self._worlds
        if worlds is None or worlds.is_over or worlds.constants.size != number:
            return number
        return tracked(number, worlds.constants.sizes)  # type: ignore[no-any-return]

    # -- losses -----------------------------------------------------------------------------------

    def weigh(self, loss: Tensor, weight: Any) -> None:
        """The objective says that `loss` is a weighted mean, with this sum of weights."""
        worlds = self._worlds
        if worlds is None or worlds.is_over or (losses := worlds.counterparts(loss)) is None:
            return
        weights = worlds.counterparts(weight)
        if weights is None:
            worlds.is_over = True  # a number that nobody knows the origin of
            return
        whole, *parts = (float(one) for one in weights)
        shares = [1.0, *(part / whole if whole else math.nan for part in parts)]
        sizes = worlds.constants.sizes
        weighted = [
            one * (share * sizes[0] / size) if share else torch.zeros_like(one).detach()
            for one, share, size in zip(losses, shares, sizes, strict=True)
        ]
        worlds.know(loss, weighted)

    def _compare(self, losses: Counterparts) -> None:
        worlds = self._worlds
        assert worlds is not None
        self._has_compared = True
        distance, norm = _distance(losses, worlds)
        dtypes = {p.dtype for module in worlds.called for p in module.parameters()}
        tolerance = max(_TOLERANCE.of(dtype) for dtype in {worlds.dtype, *dtypes})
        tolerance = _TOLERANCE.coarse if worlds.is_coarse else tolerance
        if not math.isfinite(norm) or norm == 0 or distance <= tolerance * norm:
            return
        # A constant may have been taken for a number of samples: then the parts are too large.
        if (
            worlds.constants.are_guessed
            and _distance(losses, worlds, power=2)[0] <= tolerance * norm
        ):
            return
        worlds.is_over = True  # and is stopped with the step
        self._tell(FOUND.format(percent=100 * distance / norm))

    def _fails(self, error: Exception) -> None:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        self._tell(MIXES if isinstance(error, MixedError) else FAILS.format(error=first_line))

    def _tell(self, what: str) -> None:
        if not self._is_done:
            self._is_done = True
            self._found(what)


def _distance(losses: Counterparts, worlds: Worlds, *, power: int = 1) -> tuple[float, float]:
    """How far the mean gradient of the parts is from the whole's, and the norm of that."""
    params = _some_parameters(worlds.called)
    whole, *parts = (
        _gradients(loss, [*(cut.leaves[world] for cut in worlds.cuts), *params])
        for world, loss in enumerate(losses)
    )
    size, *sizes = worlds.constants.sizes
    weights = [(part / size) ** power for part in sizes]
    squares = [0.0, 0.0]
    for number, gradient in enumerate(whole):
        mean = torch.zeros_like(gradient)
        for part, weight, which in zip(parts, weights, range(2), strict=True):
            if number < len(worlds.cuts):
                cut = worlds.cuts[number]
                mean.index_add_(cut.axis, cut.rows[which], part[number] * weight)
            else:
                mean += part[number] * weight
        squares[0] += float((mean - gradient).square().sum())
        squares[1] += float(gradient.square().sum())
    return math.sqrt(squares[0]) if squares[0] >= 0 else math.nan, math.sqrt(squares[1])


def _some_parameters(modules: list[torch.nn.Module]) -> list[Tensor]:
    """Of large models the smaller ones, of which there are some in all layers."""
    params = [p for module in modules for p in module.parameters() if p.requires_grad]
    params.sort(key=Tensor.numel)
    sizes = itertools.accumulate(param.numel() for param in params)
    return [param for param, size in zip(params, sizes, strict=True) if size <= MOST_NUMBERS]


def _gradients(loss: Any, leaves: list[Tensor]) -> list[Tensor]:
    if not (isinstance(loss, Tensor) and loss.requires_grad and leaves):
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(loss.sum(), leaves, retain_graph=True, allow_unused=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, found, strict=True)
    ]
