"""What was once wrong on several devices without a word: now exact, or told, or refused.

Each kind has cases as they were met and others of that kind; the table says how each must end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.behaviour.parts import note
from tests.behaviour.words import pytestmark  # noqa: F401

EPOCHS = 3
EXACT, ONE, REFUSED = "exact", "one device", "refused"


@dataclass(frozen=True)
class Case:
    """An objective, how it may end, and what the user must read if it is not exact."""

    objective: Callable[[Any], Any]
    outcomes: Sequence[str]
    names: Sequence[str] = ()
    widths: Sequence[Any] = (2, 3)


CASES: dict[str, Case] = {}


def case(
    *outcomes: str, names: Sequence[str] = (), widths: Sequence[Any] = (2, 3)
) -> Callable[[Any], Any]:
    def enter(objective: Any) -> Any:
        CASES[objective.__name__] = Case(objective, outcomes, names, widths)
        return objective

    return enter


# -- what they share ------------------------------------------------------------------------------


def linear(inputs: int = 6, outputs: int = 6, **options: Any) -> nn.Linear:
    return nn.Linear(inputs, outputs, **options).double()


def sgd(*modules: nn.Module, lr: float = 0.3) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=lr)


def trains(
    trial: Any,
    modules: Sequence[nn.Module],
    loss_of: Callable[..., Tensor],
    *,
    data: str = "train_rows",
    batch_size: int = 16,
    drop_last: bool = False,
) -> None:
    """The plain loop around a loss of rows, classes and numbers; notes losses and weights."""
    optimizer = sgd(*modules)
    trial.prepare(*modules, optimizer)
    for _ in trial.epochs(EPOCHS):
        for batch in trial.batches(data, batch_size, drop_last=drop_last):
            loss = loss_of(*batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            note(trial, loss)
    note_weights(trial, *modules)


def note_weights(trial: Any, *modules: nn.Module) -> None:
    weights = [v.double().tolist() for m in modules for v in m.state_dict().values()]
    trial.set_user_attr("weights", weights)


def begin() -> None:
    torch.manual_seed(0)


# -- several prepared modules, some of which a rank leaves out ------------------------------------


class Rare(nn.Module):
    """A layer of its own for a few of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare = linear(bias=False), linear(bias=False)

    def forward(self, hidden: Tensor, is_rare: Tensor) -> Tensor:
        outputs = self.usual(hidden)
        if is_rare.any():
            outputs = outputs.clone()
            outputs[is_rare] = outputs[is_rare] + self.rare(hidden[is_rare])
        return outputs


@case(EXACT)
def an_encoder_and_a_head_with_a_branch_on_the_data(trial: Any) -> None:
    begin()
    encoder, head = nn.Sequential(linear(bias=False), nn.Tanh(), linear(bias=False)), Rare()
    trains(
        trial,
        [encoder, head],
        lambda x, y, _: F.cross_entropy(head(encoder(x), x[:, 0] > 1.3), y),
    )


def two_heads(num_classes: int) -> Any:
    """A rank without a sample of a task leaves its head out."""

    def objective(trial: Any) -> None:
        begin()
        body, one, other = linear(), linear(), linear(6, num_classes)

        def loss_of(x: Tensor, y: Tensor, number: Tensor) -> Tensor:
            hidden, is_other = body(x), number % 16 == 5
            losses = F.cross_entropy(one(hidden[~is_other]), y[~is_other], reduction="sum")
            if is_other.any():
                outputs = other(hidden[is_other])
                losses = losses + F.cross_entropy(outputs, y[is_other], reduction="sum")
            return losses / len(x)

        trains(trial, [body, one, other], loss_of)

    return objective


CASES["two heads of equal size"] = Case(two_heads(6), [EXACT])


@case(EXACT)
def modules_in_the_order_that_the_data_say(trial: Any) -> None:
    """Ranks use the same modules, but one first or the other."""
    begin()
    first, second = linear(bias=False), linear(bias=False)

    def loss_of(x: Tensor, y: Tensor, _: Tensor) -> Tensor:
        order = (first, second) if x[0, 0] > 0 else (second, first)
        parts = [F.cross_entropy(module(x), y) for module in order]
        return parts[0] + parts[1]

    trains(trial, [first, second], loss_of)


# -- freezing between forward and backward --------------------------------------------------------


def freezes(after: Callable[[nn.Module, nn.Module], Any]) -> Any:
    def objective(trial: Any) -> None:
        begin()
        first, second = linear(), linear(6, 3)
        optimizer = sgd(first, second)
        trial.prepare(first, second, optimizer)
        for epoch in trial.epochs(EPOCHS):
            for x, y, _ in trial.batches("train_rows", 16):
                first.requires_grad_(epoch != 1)
                second.requires_grad_(True)
                loss = F.cross_entropy(second(torch.tanh(first(x))), y)
                optimizer.zero_grad()
                after(first, second)
                loss.backward()
                optimizer.step()
                note(trial, loss)
        note_weights(trial, first, second)

    return objective


CASES |= {
    "thaws": Case(freezes(lambda a, b: a.requires_grad_(True)), [EXACT]),
}


# -- sparse gradients -----------------------------------------------------------------------------


def embeds(*, num_backwards: int, rarely: bool) -> Any:
    def objective(trial: Any) -> None:
        begin()
        table = nn.Embedding(101, 6, sparse=True, dtype=torch.float64)
        head = linear(6, 3)
        optimizer = sgd(table, head)
        trial.prepare(table, head, optimizer)
        for _ in trial.epochs(EPOCHS):
            for x, y, number in trial.batches("train_rows", 16):
                optimizer.zero_grad()
                for _ in range(num_backwards):
                    is_looked_up = number % 8 == 3 if rarely else number >= 0
                    hidden = x
                    if is_looked_up.any():
                        found = table(number[is_looked_up])
                        hidden = x.index_add(0, is_looked_up.nonzero()[:, 0], found)
                    loss = F.cross_entropy(head(hidden), y)
                    loss.backward()
                optimizer.step()
                note(trial, loss)
        note_weights(trial, table, head)

    return objective


CASES |= {
    "embeds what few rows need": Case(embeds(num_backwards=1, rarely=True), [EXACT]),
    "embeds in two backwards": Case(embeds(num_backwards=2, rarely=True), [EXACT]),
}


# -- several backwards, accumulation --------------------------------------------------------------


@case(EXACT)
def a_second_backward_through_a_part(trial: Any) -> None:
    """The second one reaches the head only, and on some ranks not even that."""
    begin()
    body, head, rare = linear(), linear(6, 3), linear(6, 3)
    optimizer = sgd(body, head, rare)
    trial.prepare(body, head, rare, optimizer)
    for _ in trial.epochs(EPOCHS):
        for x, y, number in trial.batches("train_rows", 16):
            hidden, is_rare = body(x), number % 16 == 7
            optimizer.zero_grad()
            loss = F.cross_entropy(head(hidden), y)
            loss.backward()
            again = head(hidden.detach()).square().mean()
            if is_rare.any():
                again = again + rare(x[is_rare]).square().sum() / len(x)
            again.backward()
            optimizer.step()
            note(trial, loss)
    note_weights(trial, body, head, rare)


@case(EXACT)
def accumulates_over_batches_of_which_some_need_a_head(trial: Any) -> None:
    begin()
    body, head, rare = linear(), linear(6, 3), linear(6, 3)
    optimizer = sgd(body, head, rare)
    trial.prepare(body, head, rare, optimizer)
    for _ in trial.epochs(EPOCHS):
        batches = trial.batches("train_rows", 16)
        for k, (x, y, number) in enumerate(batches, 1):
            hidden, is_rare = body(x), number % 16 == 7
            loss = F.cross_entropy(head(hidden), y)
            if is_rare.any():
                loss = loss + rare(hidden[is_rare]).square().sum() / len(x)
            (loss / 3).backward()
            note(trial, loss)
            if k % 3 == 0 or k == len(batches):
                optimizer.step()
                optimizer.zero_grad()
    note_weights(trial, body, head, rare)


# -- rows that a collate_fn drops or adds ---------------------------------------------------------


def collates(data: str) -> Any:
    def objective(trial: Any) -> None:
        begin()
        model = linear(6, 3)
        trains(trial, [model], lambda x, y, _: F.cross_entropy(model(x), y), data=data)

    return objective


CASES |= {
    "samples that are None are left out": Case(collates("train_none"), [EXACT, ONE]),
    "some samples are there twice": Case(collates("train_twice"), [EXACT, ONE]),
}


# -- buffers that follow the data -----------------------------------------------------------------


class Codebook(nn.Module):
    """As in a VQ-VAE: a moving average of what was assigned to each code."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randn(8, 6, dtype=torch.float64)
        self.register_buffer("codes", codes)
        self.register_buffer("sums", codes.clone())
        self.register_buffer("sizes", torch.ones(8).double())

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.cdist(x, self.codes).argmin(1)
        found = self.codes[chosen]
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(chosen, 8).double()
                self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.T @ x, alpha=0.1)
                self.codes.copy_(self.sums / self.sizes[:, None])
        return x + (found - x).detach()


class Widest(nn.Module):
    """The largest value seen so far, as for quantised training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()).double())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.largest.mul_(0.9).add_(0.1 * x.abs().max())
        return x / self.largest


def keeps(make: Callable[[], nn.Module]) -> Any:
    def objective(trial: Any) -> None:
        begin()
        model = nn.Sequential(linear(), make(), linear(6, 3))
        trains(trial, [model], lambda x, y, _: F.cross_entropy(model(x), y))

    return objective


CASES |= {
    f"a buffer that follows the data: {make.__name__}, {widths}": Case(
        keeps(make), [ONE], (), widths
    )
    for make, widths in (
        (Codebook, (1, 3)),
        (Codebook, (1, 1, 3)),  # the last epoch is compared as well
        (Widest, (1, 3)),
    )
}


# -- what is kept for each sample -----------------------------------------------------------------


def remembers(make: Callable[[], Any], change: Callable[[Any, Any, Any], None]) -> Any:
    """Outputs are drawn to what is kept of the same rows from the epochs before."""

    def objective(trial: Any) -> None:
        begin()
        model = linear(6, 3)
        kept = trial.state.setdefault("kept", make())

        def loss_of(x: Tensor, y: Tensor, number: Tensor) -> Tensor:
            outputs = model(x)
            chances = outputs.softmax(1)
            change(kept, number, chances.detach())
            before = torch.stack([torch.as_tensor(kept[int(n)]).double() for n in number])
            return F.cross_entropy(outputs, y) + 3 * (before - chances).square().sum(1).mean()

        trains(trial, [model], loss_of)

    return objective


def _in_table(table: Any, number: Tensor, chances: Tensor) -> None:
    table[number] = 0.7 * table[number] + 0.3 * chances


CASES |= {
    "a table per sample in trial.state": Case(
        remembers(lambda: torch.zeros(101, 3).double(), _in_table), [ONE], ["trial.state"]
    ),
}


# -- gradients by hand ----------------------------------------------------------------------------


def sets_gradients(grads_of: Callable[[list[Tensor], list[Any]], list[Tensor]]) -> Any:
    """Two tasks, whose gradients are put into `p.grad`."""

    def objective(trial: Any) -> None:
        begin()
        body, one, other = linear(), linear(6, 3), linear(6, 1)
        parameters = [p for m in (body, one, other) for p in m.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        trial.prepare(body, one, other, optimizer)
        for _ in trial.epochs(EPOCHS):
            for x, y, _ in trial.batches("train_rows", 16):
                hidden = torch.relu(body(x))
                losses = [
                    F.cross_entropy(one(hidden), y),
                    (other(hidden)[:, 0] - x.sum(1)).square().mean(),
                ]
                for p, grad in zip(parameters, grads_of(losses, parameters), strict=True):
                    p.grad = grad
                optimizer.step()
        note_weights(trial, body, one, other)

    return objective


def _flat(loss: Tensor, parameters: list[Any]) -> Tensor:
    grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    pairs = zip(parameters, grads, strict=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in pairs]
    )


def _cut(flat: Tensor, parameters: list[Any]) -> list[Tensor]:
    sizes = [p.numel() for p in parameters]
    return [part.view_as(p).clone() for part, p in zip(flat.split(sizes), parameters, strict=True)]


def projected(losses: list[Tensor], parameters: list[Any]) -> list[Tensor]:
    """PCGrad."""
    one, other = (_flat(loss, parameters) for loss in losses)
    dot = one @ other
    if dot < 0:
        one, other = one - dot / (other @ other) * other, other - dot / (one @ one) * one
    return _cut(one + other, parameters)


CASES["gradients by hand"] = Case(sets_gradients(projected), [ONE], (), (1, 3))


# -- the test ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_it_is_right_or_told(lab: Any, name: str) -> None:
    case = CASES[name]
    lab.comes_to(case.outcomes, case.objective, *case.names, widths=case.widths)
