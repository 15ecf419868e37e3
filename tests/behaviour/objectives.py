"""Usual objectives, written as users write them; each notes all losses it sees."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

from tests.behaviour.losses import cross_entropy, trains
from tests.behaviour.parts import (
    EPOCHS,
    OBJECTIVES,
    convnet,
    note,
    note_evaluation,
    perceptron,
    prepared,
    sgd,
    step,
    train_on,
    usual,
    with_sizes,
)
from tests.behaviour.small import evaluate, num_wrong

UNLIKE: dict[str, Callable[[Any], Any]] = {}
"""These have batches at hand that devices share unlike, the last of a pass and another one."""


def unlike(objective: Callable[[Any], Any]) -> Callable[[Any], Any]:
    UNLIKE[objective.__name__] = objective
    return objective


@usual
def plain(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            loss = F.cross_entropy(model(images), labels)
            step(optimizer, loss)
            note(trial, loss)
        note_evaluation(trial, model)


# -- optimizers and schedules ---------------------------------------------------------------------

OBJECTIVES |= {
    name: trains(cross_entropy, convnet, make, evaluates=True)
    for name, make in {
        "adam": functools.partial(torch.optim.Adam, lr=0.01),
    }.items()
}


@usual
def lbfgs(trial: Any) -> None:
    make = functools.partial(torch.optim.LBFGS, max_iter=2, line_search_fn="strong_wolfe")
    model, optimizer = prepared(trial, perceptron, make)

    def closure(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        note(trial, loss)
        return trial.mean(loss, weight=trial.shard_size)

    for _ in trial.epochs(EPOCHS):
        for batch in trial.batches("train", batch_size=10):
            optimizer.step(functools.partial(closure, *batch))


@usual
def sparse_adam(trial: Any) -> None:
    embed, rows = prepared(
        trial,
        lambda: nn.EmbeddingBag(10, 8, sparse=True, dtype=torch.float64),
        functools.partial(torch.optim.SparseAdam, lr=0.05),
    )
    head, others = prepared(trial, lambda: nn.Linear(8, 3).double())
    for _ in trial.epochs(EPOCHS):
        for tokens, lengths in trial.batches("train_text", batch_size=10):
            loss = F.cross_entropy(head(embed(tokens)), lengths % 3)
            rows.zero_grad()
            others.zero_grad()
            loss.backward()
            rows.step()
            others.step()
            note(trial, loss)


@usual
def plateau(trial: Any) -> None:
    model, optimizer = prepared(trial)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
    trial.prepare(scheduler)
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            loss = train_on(trial, model, optimizer, images, labels)
        scheduler.step(loss)
        note_evaluation(trial, model)


@usual
def clips(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            optimizer.step()
            note(trial, loss)
            trial.state["seen"].append(norm.item())


@usual
def grad_scaler(trial: Any) -> None:
    model, optimizer = prepared(trial)
    scaler = trial.prepare(torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4))
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            scaler.step(optimizer)
            scaler.update()
            note(trial, loss)
            trial.state["seen"].append(scaler.get_scale())


@usual
def autocast(trial: Any) -> None:
    model, optimizer = prepared(trial, lambda: convnet().float())
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(images.float()), labels)
            step(optimizer, loss)
            note(trial, loss)


# -- models ---------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 10, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).tanh())


class Fading(nn.Module):
    """With buffers in no `state_dict`: one is changed in place, one is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron()
        self.register_buffer("scale", torch.ones(3).double(), persistent=False)
        self.register_buffer("shift", torch.zeros(()).double(), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.scale *= 0.95
            self.shift = self.shift + 0.1
        return self.body(images + self.shift) * self.scale


def next_tokens(model: Any, tokens: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


OBJECTIVES |= {
    "compiled": trains(cross_entropy, lambda: torch.compile(convnet(), backend="eager")),
    "buffers_of_no_state": trains(cross_entropy, Fading, evaluates=True),
    "tied_weights": trains(next_tokens, Tied, data="train_text"),
}


@usual
def folds(trial: Any) -> None:
    """One model after the other, each evaluated on what the other is trained on."""
    for fold, other in [("train", "val"), ("val", "train")]:
        model, optimizer = prepared(trial)
        for _ in trial.epochs(2):
            for images, labels in trial.batches(fold, batch_size=10):
                train_on(trial, model, optimizer, images, labels)
        model.eval()
        with torch.no_grad():
            wrong = sum(int(num_wrong(model(x), y)) for x, y in trial.batches(other, 9))
        trial.state["seen"].append(trial.sum(wrong))


@usual
def prunes_its_weights(trial: Any) -> None:
    model, optimizer = prepared(trial, perceptron)
    for num_epochs in (1, 2):
        for _ in trial.epochs(num_epochs):
            for images, labels in trial.batches("train", batch_size=10):
                train_on(trial, model, optimizer, images, labels)
        nn.utils.prune.l1_unstructured(model[1], "weight", amount=0.3)


# -- averages of the weights ----------------------------------------------------------------------


@usual
def swa(trial: Any) -> None:
    model, optimizer = prepared(trial)
    average = trial.prepare(swa_utils.AveragedModel(model))
    for epoch in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            train_on(trial, model, optimizer, images, labels)
        if epoch >= 1:
            average.update_parameters(model)
    swa_utils.update_bn(trial.batches("train", batch_size=10), average)
    note_evaluation(trial, average)


@usual
def ema_by_hand(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            train_on(trial, model, optimizer, images, labels)
            now = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            average = trial.state.setdefault("average", now)
            for name in now:
                average[name] = 0.9 * average[name] + 0.1 * now[name]
        averaged = convnet()
        averaged.load_state_dict(average)
        note_evaluation(trial, averaged)


# -- loops ----------------------------------------------------------------------------------------


@usual
def accumulates(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        batches = trial.batches("train", batch_size=10)
        for k, (images, labels) in enumerate(batches, 1):
            loss = F.cross_entropy(model(images), labels)
            (loss / 3).backward()
            note(trial, loss)
            if k % 3 == 0 or k == len(batches):
                optimizer.step()
                optimizer.zero_grad()


@usual
def accumulates_over_the_end_of_an_epoch(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        for k, (images, labels) in enumerate(trial.batches("train", batch_size=10), 1):
            loss = F.cross_entropy(model(images), labels)
            (loss / 2).backward()
            note(trial, loss)
            if k % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()


@unlike
def sums_losses_of_batches(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        losses = []
        batches = trial.batches("train", batch_size=10)
        for k, (images, labels) in enumerate(batches, 1):
            losses.append(F.cross_entropy(model(images), labels))
            note(trial, losses[-1])
            if k % 3 == 0 or k == len(batches):
                step(optimizer, torch.stack(losses).mean())
                losses = []


@unlike
def fetches_three_ahead(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        waiting: deque[Any] = deque()
        for batch in trial.batches("train", batch_size=10):
            waiting.append(batch)
            if len(waiting) > 3:
                train_on(trial, model, optimizer, *waiting.popleft())
        while waiting:
            train_on(trial, model, optimizer, *waiting.popleft())
        note_evaluation(trial, model)


def keeps_batches(order: Callable[[list[Any]], Iterable[Any]]) -> Any:
    def objective(trial: Any) -> None:
        model, optimizer = prepared(trial)
        for _ in trial.epochs(EPOCHS):
            kept = list(trial.batches("train", batch_size=10))
            for images, labels in order(kept):
                train_on(trial, model, optimizer, images, labels)
            note_evaluation(trial, model)

    return objective


UNLIKE |= {
    "keeps_batches": keeps_batches(lambda batches: batches),
}


@unlike
def zips_unlike_sizes(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        tens = with_sizes(trial, trial.batches("train", batch_size=10))
        sevens = with_sizes(trial, trial.batches("train_triples", batch_size=7))
        for ((images, labels), size), ((more, again, _), other) in zip(tens, sevens, strict=True):
            first = F.cross_entropy(model(images), labels)
            second = F.mse_loss(model(more), model(again))
            step(optimizer, first + 0.5 * second)
            note(trial, first, size)
            note(trial, second, other)
        note_evaluation(trial, model)


@unlike
def zips_and_weighs(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        tens = with_sizes(trial, trial.batches("train", batch_size=10))
        sevens = with_sizes(trial, trial.batches("train_triples", batch_size=7))
        for ((images, labels), size), ((more, again, _), other) in zip(tens, sevens, strict=True):
            first = F.cross_entropy(model(images), labels)
            second = F.mse_loss(model(more), model(again))
            one = trial.weighted(first, size, fetched_ahead=True)
            two = trial.weighted(second, other, fetched_ahead=True)
            step(optimizer, one + 0.5 * two)
            note(trial, first, size)
            note(trial, second, other)
        note_evaluation(trial, model)


@usual
def stops_early(trial: Any) -> None:
    model, optimizer = prepared(trial)
    best = trial.state.setdefault("best", {"right": -1, "bad_epochs": 0})
    for _ in trial.epochs(20):
        for images, labels in trial.batches("train", batch_size=10):
            train_on(trial, model, optimizer, images, labels)
        right = 20 - evaluate(trial, model, num_wrong)
        trial.state["seen"].append(right)
        model.train()
        if right > best["right"]:
            best.update(right=right, bad_epochs=0)
        else:
            best["bad_epochs"] += 1
        if best["bad_epochs"] == 2:
            break


@usual
def breaks_off(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        for k, (images, labels) in enumerate(trial.batches("train", batch_size=10)):
            if k == 3:
                break
            train_on(trial, model, optimizer, images, labels)
        note_evaluation(trial, model)


@usual
def sharpness_aware(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            ascent = [0.05 * p.grad / norm for p in model.parameters()]
            with torch.no_grad():
                for parameter, way in zip(model.parameters(), ascent, strict=True):
                    parameter += way
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter, way in zip(model.parameters(), ascent, strict=True):
                    parameter -= way
            optimizer.step()
            note(trial, loss)
        note_evaluation(trial, model)


@usual
def mean_teacher(trial: Any) -> None:
    model, optimizer = prepared(trial)
    teacher = trial.prepare(copy.deepcopy(model).requires_grad_(False))
    for _ in trial.epochs(EPOCHS):
        for image, view, _ in trial.batches("train_triples", batch_size=7):
            with torch.no_grad():
                targets = teacher(view).softmax(1)
            outputs = model(image)
            loss = F.mse_loss(outputs.softmax(1), targets) + 0.1 * outputs[:, 0].square().mean()
            step(optimizer, loss)
            note(trial, loss)
            with torch.no_grad():
                for mine, its in zip(teacher.parameters(), model.parameters(), strict=True):
                    mine.lerp_(its, 0.1)
        note_evaluation(trial, teacher)


@usual
def descends_by_hand(trial: Any) -> None:
    model = trial.prepare(convnet())
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            loss = F.cross_entropy(model(images), labels)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.05 * parameter.grad
            note(trial, loss)


@usual
def grows_its_batches(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for epoch in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=5 * 2**epoch):
            train_on(trial, model, optimizer, images, labels)
        note_evaluation(trial, model)


@usual
def unfreezes_into_a_new_group(trial: Any) -> None:
    model = convnet()
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.05, momentum=0.9)
    model, optimizer = trial.prepare(model, optimizer)
    for epoch in trial.epochs(EPOCHS):
        if epoch == 1:
            optimizer.add_param_group({"params": [*model[:2].parameters()], "lr": 0.01})
        for images, labels in trial.batches("train", batch_size=10):
            train_on(trial, model, optimizer, images, labels)


# -- batches that are changed before the model sees them, long after they came --------------------


def fetches_ahead_and_normalises(trial: Any, *, from_epoch: int = 0) -> None:
    model, optimizer = prepared(trial)
    for epoch in trial.epochs(EPOCHS):
        if epoch < from_epoch:
            for images, labels in trial.batches("train", batch_size=10):
                train_on(trial, model, optimizer, images, labels)
            continue
        batches = iter(trial.batches("train", batch_size=10))
        ahead = next(batches, None)
        while ahead is not None:
            (images, labels), ahead = ahead, next(batches, None)
            train_on(trial, model, optimizer, (images - 0.5) / 0.25, labels)


UNLIKE |= {
    "fetches_ahead_and_normalises": fetches_ahead_and_normalises,
}


def sums_in_each_step(trial: Any, **bounds: int) -> None:
    model = convnet()
    model, optimizer = trial.prepare(model, sgd(model.parameters()), **bounds)
    for epoch in trial.epochs(EPOCHS):
        model.train()
        for images, labels in trial.batches("train", batch_size=10):
            train_on(trial, model, optimizer, images, labels)
        if epoch > 1:
            model.eval()
            with torch.no_grad():
                for images, labels in trial.batches("val", batch_size=9):
                    loss = F.cross_entropy(model(images), labels, reduction="sum")
                    trial.state["seen"].append(trial.sum(loss.item()))


def bounded(
    trial: Any,
    batch_size: int = 10,
    epochs: int = 20,
    later: dict[str, int] | None = None,
    **bounds: int,
) -> float:
    """What is prepared `later` has bounds of its own, which don't undo the first ones."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = trial.prepare(model, optimizer, **bounds)
    trial.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer), **later or {})
    for _ in trial.epochs(epochs):
        for images, labels in trial.batches("train", batch_size=batch_size):
            train_on(trial, model, optimizer, images, labels)
    return 0.0
