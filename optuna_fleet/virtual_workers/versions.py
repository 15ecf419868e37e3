"""The weights of a stage: one version and any optimizer if its pipeline is flushed, else several.

Then each minibatch has the version that it started with. That is made out of place and never
changes, so autograd's graph of a minibatch keeps its own: weights that were changed in place would
make backward passes fail, or wrong without a word.

The weights are the first ones plus a sum of updates, each from weights of its own (HetPipe,
section 5), so an update must not depend on the weights it is added to, nor on what others add.
That of SGD does not, nor does it with momentum, of which every virtual worker has its own; at a
flush they come to an `Agreement`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optuna_fleet.exceptions import FleetConfigError
from optuna_fleet.virtual_workers.parameter_server import ServerClient
from optuna_fleet.virtual_workers.stage_messages import Snapshot, Tensors, added
from optuna_fleet.virtual_workers.whole import parameters_of
from optuna_fleet.virtual_workers.wsp import Tag

# After the name of a parameter or a buffer, which begins with that of its layer.
_MOMENTUM, _BUFFER = " momentum", " buffer"


class Weights(ABC):
    """The weights of one stage of one virtual worker; as it is where there are no servers."""

    @property
    def clock(self) -> int:
        """Of the newest snapshot that is there."""
        return 0

    def want(self, clock: int, *, exactly: bool) -> None:
        """Ask for a snapshot, unless it is there or was asked for."""
        assert clock <= self.clock

    def receive(self, snapshot: Snapshot) -> None:
        """A piece of a snapshot that was asked for is there."""
        raise AssertionError("a snapshot came, but there are no parameter servers")

    @abstractmethod
    def has(self, tag: Tag) -> bool:
        """Whether this version can be made now."""

    @abstractmethod
    def at(self, tag: Tag) -> Tensors:
        """A version, as leaves for autograd; versions are asked for in order."""

    @abstractmethod
    def finish(self, number: int, weights: Tensors, gradients: Tensors, loss: Tensor) -> None:
        """The backward pass of a minibatch is done, at these weights; in order."""


class VersionedWeights(Weights):
    """``w_p = snapshot(clock) + own updates from there on, up to `local```: pulls rebase.

    Kept are the newest version, updates that no minibatch has seen yet (with the versions of
    minibatches in flight: N_m copies), and with servers, to rebase, sums of the wave that the
    newest version ends in and of D + 2 waves.

    Args:
        initial: w_0; is copied.
        rule: Makes updates.
        wave_size: Minibatches of a wave.
        client: Of the parameter servers; None for a virtual worker that is alone.
    """

    def __init__(
        self, initial: Tensors, rule: SgdRule, wave_size: int, client: ServerClient | None
    ) -> None:
        self._initial = initial
        self._rule = rule
        self._wave_size = wave_size
        self._client = client
        self._tag = Tag(0, 0)
        self._newest = {name: w.detach().clone() for name, w in initial.items()}
        self._done = 0
        self._has_settled = False
        self._updates: dict[int, Tensors] = {}
        self._begun: dict[str, Tensor] = {}
        self._waves: dict[int, dict[str, Tensor]] = {}
        self._snapshots: dict[int, Tensors] = {}

    @property
    def clock(self) -> int:
        """Of the newest snapshot that is there."""
        return max(self._snapshots, default=self._tag.clock)

    def want(self, clock: int, *, exactly: bool) -> None:
        """Ask for a snapshot, unless it is there or was asked for."""
        if self._client is not None and clock > self.clock:
            self._client.pull(clock, exactly=exactly)

    def receive(self, snapshot: Snapshot) -> None:
        """A piece of a snapshot that was asked for is there."""
        if self._client is None:
            super().receive(snapshot)
        elif (weights := self._client.receive(snapshot)) is not None:
            self._snapshots[snapshot.clock] = weights

    def has(self, tag: Tag) -> bool:
        """Whether this version can be made now."""
        return tag.local <= self._done and (
            tag.clock == self._tag.clock or tag.clock in self._snapshots
        )

    @torch.no_grad()
    def at(self, tag: Tag) -> Tensors:
        """A version, as leaves for autograd; versions are asked for in order."""
        if tag < self._tag or tag.clock < self._tag.clock:
            raise AssertionError(f"Weights {tag} after {self._tag}: minibatches are mixed up.")
        if tag.clock > self._tag.clock:
            self._rebase(tag)
        for number in range(self._tag.local + 1, tag.local + 1):
            self._add(number)
        self._tag = tag
        self._forget()
        leaves = {name: w.detach().requires_grad_() for name, w in self._newest.items()}
        for name, leaf in leaves.items():
            for hook in (self._initial[name]._backward_hooks or {}).values():
                leaf.register_hook(hook)  # type: ignore[no-untyped-call]
        return leaves

    @torch.no_grad()
    def finish(self, number: int, weights: Tensors, gradients: Tensors, loss: Tensor) -> None:
        """The backward pass of a minibatch is done, at these weights; in order."""
        if number != self._done + 1:
            raise AssertionError(f"The update of minibatch {number} came after {self._done}.")
        update = self._rule(weights, gradients)
        self._done = number
        self._updates[number] = update
        if self._client is None:
            return
        wave = (number - 1) // self._wave_size
        self._waves[wave] = added(self._waves.get(wave, {}), update)
        if number % self._wave_size == 0:
            self._client.push(wave, self._waves[wave])

    def settle(self, least_clock: int, rest: Tensors) -> bool:
        """Have all virtual workers agree on weights with all updates, also of a wave's beginning.

        All minibatches are done, of each virtual worker as many, and no more will come. To be
        called until it is true: `latest` has the weights then.

        Args:
            least_clock: That the last minibatch of a whole wave would wait for.
            rest: What else the virtual workers add up, by names that the servers' pieces have.
        """
        assert self._client is not None
        last = self._done // self._wave_size
        if not self._has_settled:
            self.want(least_clock, exactly=False)
            if self.clock < least_clock:
                return False
            self._client.push(last, {**self._waves.get(last, {}), **rest})
            self.want(last + 1, exactly=True)
            self._has_settled = True
        return self.clock > last

    def latest(self) -> Tensors:
        """What a virtual worker that is alone has come to, or all have that have settled."""
        if self._has_settled:
            return self._snapshots[self.clock]
        return self.at(Tag(self._done, self._tag.clock))

    def _add(self, number: int) -> None:
        update = self._updates[number]
        self._newest = added(self._newest, update)
        if self._client is not None:
            is_first = number % self._wave_size == 1 or self._wave_size == 1
            self._begun = added({} if is_first else self._begun, update)

    def _rebase(self, tag: Tag) -> None:
        """Own updates that the snapshot lacks are added to it; it never overwrites them."""
        newest = dict(self._snapshots[tag.clock])
        local = max(self._tag.local, tag.clock * self._wave_size)
        for wave in range(tag.clock, local // self._wave_size):
            newest = added(newest, self._waves[wave])
        if local % self._wave_size:
            newest = added(newest, self._begun)
        self._newest = newest
        self._tag = Tag(local, tag.clock)

    def _forget(self) -> None:
        local, clock = self._tag
        self._updates = {n: u for n, u in self._updates.items() if n > local}
        self._waves = {c: sums for c, sums in self._waves.items() if c >= clock}
        self._snapshots = {c: w for c, w in self._snapshots.items() if c > clock}


class FlushedWeights(Weights):
    """The parameters themselves; gradients add up in ``.grad`` as ``backward()`` would have them.

    Args:
        parameters: Of the stage, by name.
        optimizer: Of these alone; steps when a wave's last backward pass is done. One that looks
            at all gradients of a model together would see a part.
        wave_size: Microbatches of a step, here.
        before_step: Called with the parameters before each step, with all gradients there.
        note: Takes the loss and the gradients of each microbatch, instead, and has all there then.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        wave_size: int,
        before_step: Callable[[Mapping[str, nn.Parameter]], object],
        note: Callable[[Tensor, Tensors], object] | None = None,
    ) -> None:
        self._before_step = before_step
        self._note = note or self._add
        self._parameters = parameters
        self._optimizer = optimizer
        self._wave_size = wave_size
        self._stepped = 0

    def has(self, tag: Tag) -> bool:
        """Whether the optimizer made all steps before, and none after."""
        return tag.local == self._stepped

    def at(self, tag: Tag) -> Tensors:
        """The parameters."""
        if not self.has(tag):
            raise AssertionError(f"Weights {tag} after {self._stepped} microbatches of steps.")
        return self._parameters

    @torch.no_grad()
    def finish(self, number: int, weights: Tensors, gradients: Tensors, loss: Tensor) -> None:
        """Add the gradients of a microbatch; the optimizer steps after a wave's last."""
        self._note(loss, gradients)
        if number % self._wave_size == 0:
            self._before_step(self._parameters)
            self._optimizer.step()
            for parameter in self._parameters.values():  # also what the optimizer does not have
                parameter.grad = None
            self._stepped = number

    def _add(self, _: Tensor, gradients: Tensors) -> None:
        for name, gradient in gradients.items():
            parameter = self._parameters[name]
            before = parameter.grad
            if gradient.is_sparse:  # else all parts' were added up at last, in another order
                gradient = gradient.coalesce()
            parameter.grad = gradient if before is None else before + gradient


class SgdRule:
    """The updates of a ``torch.optim.SGD``, whose options may change from minibatch to minibatch.

    Args:
        optimizer: Never steps; its state has the momenta.
        parameters: Of which names are known; those that the optimizer does not have stay.
        share: Of this virtual worker in what they all add up to.

    Raises:
        FleetConfigError: The optimizer is another one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[tuple[str, nn.Parameter]],
        share: float = 1.0,
    ) -> None:
        if type(optimizer) is not torch.optim.SGD:
            raise FleetConfigError(
                f"The optimizer is {type(optimizer).__name__}, but virtual workers that do not "
                "wait for each other sum up their updates, which is only right for "
                "torch.optim.SGD: others scale an update by what they saw before. Take SGD, or "
                "train with flushes."
            )
        self._optimizer = optimizer
        self._share = share
        self._parameters = dict(parameters)
        self._foreseen: deque[list[dict[str, Any]]] = deque()

    def foresee(self) -> None:
        """The next minibatch begins: its update has the options of now, whenever it is made."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # for schedulers
        self._foreseen.append([dict(group) for group in self._optimizer.param_groups])

    @torch.no_grad()
    def __call__(self, weights: Tensors, gradients: Tensors) -> dict[str, Tensor]:
        """As ``torch.optim.SGD.step`` does; momenta are in the optimizer's state."""
        groups = self._foreseen.popleft() if self._foreseen else self._optimizer.param_groups
        group_of = {id(p): group for group in groups for p in group["params"]}
        return {
            name: self._update(name, weights[name], gradient, group)
            for name, gradient in gradients.items()
            if (group := group_of.get(id(self._parameters[name])))
        }

    def _update(
        self, name: str, weight: Tensor, gradient: Tensor, group: Mapping[str, Any]
    ) -> Tensor:
        step = -gradient if group["maximize"] else gradient
        if group["weight_decay"]:
            step = step + group["weight_decay"] * weight
        if momentum := group["momentum"]:
            state = self._optimizer.state[self._parameters[name]]
            before = state.get("momentum_buffer")
            kept = step if before is None else momentum * before + (1 - group["dampening"]) * step
            state["momentum_buffer"] = kept
            step = step + momentum * kept if group["nesterov"] else kept
        moved: Tensor = -self._share * group["lr"] * step
        return moved


class Agreement:
    """What a stage gives to a sum over virtual workers at a flush, and takes from it.

    Momenta of SGD are linear in the gradients: their mean is that of one virtual worker which
    trains on whole batches. Buffers that passes change, as BatchNorm's statistics, go as far as
    the mean of what virtual workers have changed; others stay what they are, to the bit.

    Args:
        share: Of this virtual worker in a mean over all.
    """

    def __init__(self, part: nn.Module, optimizer: torch.optim.Optimizer, share: float) -> None:
        self._part = part
        self._trained = parameters_of(part)
        self._state: Mapping[Any, dict[str, Tensor]] = optimizer.state
        self._share = share
        self._before = {name: buffer.clone() for name, buffer in _buffers(part).items()}

    @torch.no_grad()
    def rest(self) -> dict[str, Tensor]:
        """To be summed up over the virtual workers."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._trained.items():
            momentum = self._state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                found[name + _MOMENTUM] = self._share * momentum
        for name, buffer in _buffers(self._part).items():
            before = self._before.get(name)
            if before is None or before.shape != buffer.shape:
                continue  # the pass has made it
            moved = torch.where(buffer == before, 0.0, buffer - before)  # also of infinite ones
            found[name + _BUFFER] = self._share * moved
        return found

    @torch.no_grad()
    def take(self, agreed: Tensors) -> None:
        """Weights, and sums of `rest`."""
        for name, parameter in self._trained.items():
            if name in agreed:
                parameter.copy_(agreed[name])
            if name + _MOMENTUM in agreed:
                self._state[parameter]["momentum_buffer"] = agreed[name + _MOMENTUM].clone()
        for name, buffer in _buffers(self._part).items():
            if name + _BUFFER in agreed:
                buffer.copy_(self._before[name] + agreed[name + _BUFFER])
                self._before[name] = buffer.clone()


def _buffers(part: nn.Module) -> dict[str, Tensor]:
    return {name: b for name, b in part.named_buffers() if b.is_floating_point()}
