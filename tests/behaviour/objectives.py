"""Objectives as users write them, by how they end on other devices; each notes what it sees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.optim import swa_utils

from tests.behaviour.parts import (
    EPOCHS,
    ahead,
    convnet,
    each_batch,
    each_loss,
    fits,
    linear,
    note,
    note_evaluation,
    note_weighted,
    note_weights,
    perceptron,
    prepared,
    sgd,
    step,
    train_on,
    with_sizes,
)
from tests.behaviour.small import evaluate, num_wrong, small_model

Objective = Callable[[Any], Any]

OBJECTIVES: dict[str, Objective] = {}
"""They are the same on any devices, after any move."""
ONCE_WRONG: dict[str, Objective] = {}
"""These too, which they were not once, without a word: ranks use modules unlike."""
UNLIKE: dict[str, Objective] = {}
"""These have batches at hand that devices share unlike, the last of a pass and another one."""


def entered_in(table: dict[str, Objective]) -> Callable[[Objective], Objective]:
    def enter(objective: Objective) -> Objective:
        table[objective.__name__] = objective
        return objective

    return enter


usual, once_wrong, unlike = map(entered_in, (OBJECTIVES, ONCE_WRONG, UNLIKE))

# -- optimizers and schedules ---------------------------------------------------------------------


@usual
@each_batch(
    perceptron, functools.partial(torch.optim.LBFGS, max_iter=2, line_search_fn="strong_wolfe")
)
def lbfgs(trial: Any, model: Any, optimizer: Any, images: Tensor, labels: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        note(trial, loss)
        return trial.mean(loss, weight=trial.shard_size)

    optimizer.step(closure)


@usual
def grad_scaler(trial: Any) -> None:
    """With a clipped norm."""
    model, optimizer = prepared(trial)
    scaler = trial.prepare(torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4))
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            scaler.step(optimizer)
            scaler.update()
            note(trial, loss)
            trial.state["seen"] += [norm.item(), scaler.get_scale()]


@usual
@each_loss(lambda: convnet().float())
def autocast(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(model(images.float()), labels)


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


@usual
@each_batch(evaluates=True)
def sharpness_aware(trial: Any, model: Any, optimizer: Any, images: Any, labels: Any) -> None:
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


# -- models ---------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 10, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).tanh())


@usual
@each_loss(Tied, data="train_text")
def tied_weights(model: Any, tokens: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


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


@usual
@each_loss(Fading, evaluates=True)
def buffers_of_no_state(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


@usual
@each_loss(lambda: torch.compile(convnet(), backend="eager"))
def compiled(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


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


@usual
def gan(trial: Any) -> None:
    adam = functools.partial(torch.optim.Adam, lr=0.01, betas=(0.5, 0.9))
    generator, making = prepared(trial, lambda: perceptron(4, 36), adam)
    critic, judging = prepared(trial, lambda: perceptron(36, 1), adam)
    judge = F.binary_cross_entropy_with_logits
    for _ in trial.epochs(EPOCHS):
        for images, noise, _ in trial.batches("train_triples", batch_size=7):
            real = torch.ones(len(images), 1).double()
            made = generator(noise.flatten(1)[:, :4])
            loss = judge(critic(images), real) + judge(critic(made.detach()), 0 * real)
            step(judging, loss)
            note(trial, loss)
            loss = judge(critic(made), real)
            step(making, loss)
            note(trial, loss)


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


# -- losses that say of what they are a mean ------------------------------------------------------

CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 0.5], dtype=torch.float64)


@usual
def class_weights(trial: Any) -> None:
    """Of a loss that is prepared."""
    model, optimizer = prepared(trial)
    criterion = trial.prepare(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1))
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            loss = criterion(model(images), labels)
            weight = criterion.weight[labels].sum()
            step(optimizer, trial.weighted(loss, weight))
            note_weighted(trial, loss, weight)
        note_evaluation(trial, model)


@usual
@each_batch()
def two_tasks_are_weighted(trial: Any, model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    classes = F.cross_entropy(model(x), y, weight=CLASS_WEIGHTS)
    weight, weights = CLASS_WEIGHTS[y].sum(), x.square().mean((1, 2, 3))
    samples = (weights * F.cross_entropy(model(x), y, reduction="none")).sum() / weights.sum()
    step(optimizer, trial.weighted(classes, weight) + trial.weighted(samples, weights.sum()))
    note_weighted(trial, classes, weight)
    note_weighted(trial, samples, weights.sum())


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8, dtype=torch.float64)
        self.layer = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64
        )
        self.head = nn.Linear(8, 10, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        num_tokens, dtype = tokens.shape[1], torch.float64
        mask = nn.Transformer.generate_square_subsequent_mask(num_tokens, dtype=dtype)
        return self.head(self.layer(self.embed(tokens), src_mask=mask, is_causal=True))


@usual
@each_batch(Transformer, data="train_text", drop_last=True)
def masked_tokens(trial: Any, model: Any, optimizer: Any, tokens: Tensor, _: Tensor) -> None:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    mask = targets != 0
    losses = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")
    loss = (losses * mask).sum() / mask.sum()  # 0 / 0 on some ranks, and so are its gradients
    step(optimizer, trial.weighted(loss, mask.sum()))
    note_weighted(trial, loss, mask.sum())


@usual
def accumulates_tokens(trial: Any) -> None:
    """The last batch of an epoch may have no tokens at all."""
    model, optimizer = prepared(trial, Transformer)
    for _ in trial.epochs(EPOCHS):
        batches = trial.batches("train_text", batch_size=10)
        for k, (tokens, _) in enumerate(batches, 1):
            outputs, targets = model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:]
            loss = F.cross_entropy(outputs, targets, ignore_index=0, reduction="sum")
            weight = (targets != 0).sum()
            loss = loss / weight.clamp(min=1)
            (trial.weighted(loss, weight) / 2).backward()
            if k % 2 == 0 or k == len(batches):
                optimizer.step()
                optimizer.zero_grad()
            note_weighted(trial, loss, weight)


# -- loops ----------------------------------------------------------------------------------------


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
def grows_its_batches(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for epoch in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=5 * 2**epoch):
            train_on(trial, model, optimizer, images, labels)
        note_evaluation(trial, model)


@usual
def evaluates_within_steps(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train_odd", batch_size=10):
            # 20 samples by 8: the last shards are unlike those of training.
            wrong = evaluate(trial, model, num_wrong)
            model.train()
            train_on(trial, model, optimizer, images, labels)
            trial.state["seen"].append(wrong)


@usual
def several_batches_in_one_step(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        passes = [trial.batches("train_odd", batch_size=n, drop_last=True) for n in (10, 7)]
        for (images, labels), (more, _) in zip(*passes, strict=False):
            one, other = F.cross_entropy(model(images), labels), model(more).square().mean()
            note(trial, one, len(images))
            one, other = trial.weighted(one, len(images)), trial.weighted(other, len(more))
            step(optimizer, one + other)


@usual
def trains_on_one_within_the_other(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train_odd", batch_size=20):
            train_on(trial, model, optimizer, images, labels)
            for more, theirs in trial.batches("train_odd", batch_size=25):
                train_on(trial, model, optimizer, more, theirs)


def changes_outputs_in_place(trial: Any) -> None:
    model, optimizer = prepared(trial, small_model)
    head = trial.prepare(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)).double())
    seen = []
    for _ in trial.epochs(2):
        for images, labels in trial.batches("train_odd", batch_size=10):
            outputs = head(model(images))
            outputs /= 2
            loss = F.cross_entropy(outputs.masked_fill_(outputs < -1, -1.0), labels)
            step(optimizer, loss)
            seen.append(trial.mean(loss.item(), weight=trial.shard_size))
    trial.set_user_attr("seen", seen)


def weighs_what_it_fetched_ahead(trial: Any, *, normalises: bool = False) -> None:
    model, optimizer = prepared(trial, small_model if normalises else perceptron)
    seen = []
    for _ in trial.epochs(2):
        batches = with_sizes(trial, trial.batches("train_odd", batch_size=10))
        for (images, labels), size in ahead(batches, 2):
            loss = F.cross_entropy(model(images), labels)
            step(optimizer, trial.weighted(loss, size, fetched_ahead=True))
            seen.append(trial.mean(loss.item(), weight=size))
    trial.set_user_attr("seen", seen)


# -- batches of unlike weight at hand -------------------------------------------------------------


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
def fetches_three_ahead(trial: Any, *, from_epoch: int = 0) -> None:
    model, optimizer = prepared(trial)
    for epoch in trial.epochs(EPOCHS):
        batches = trial.batches("train", batch_size=10)
        for images, labels in ahead(batches, 3 if epoch >= from_epoch else 0):
            train_on(trial, model, optimizer, images, labels)
        note_evaluation(trial, model)


def zips(*, weighs: bool) -> Objective:
    """Reads two data sets at once, by unlike batch sizes."""

    def objective(trial: Any) -> None:
        model, optimizer = prepared(trial)
        for _ in trial.epochs(EPOCHS):
            tens = with_sizes(trial, trial.batches("train", batch_size=10))
            sevens = with_sizes(trial, trial.batches("train_triples", batch_size=7))
            for ((x, y), size), ((more, again, _), other) in zip(tens, sevens, strict=True):
                first, second = F.cross_entropy(model(x), y), F.mse_loss(model(more), model(again))
                note(trial, first, size)
                note(trial, second, other)
                if weighs:
                    first = trial.weighted(first, size, fetched_ahead=True)
                    second = trial.weighted(second, other, fetched_ahead=True)
                step(optimizer, first + 0.5 * second)
            note_evaluation(trial, model)

    return objective


UNLIKE |= {"zips_unlike_sizes": zips(weighs=False), "zips_and_weighs": zips(weighs=True)}


@unlike
def skips_steps(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        for number, (images, labels) in enumerate(trial.batches("train_odd", batch_size=10)):
            loss = F.cross_entropy(model(images), labels)
            if number % 2 == 0:  # the last is the one sample
                step(optimizer, loss)
                note(trial, loss)


def sums_in_each_step(trial: Any, **bounds: int) -> None:
    """Ranks without a sample of the validation data's last batch take no part in its sum."""
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


@once_wrong
def an_encoder_and_a_head_with_a_branch_on_the_data(trial: Any) -> None:
    encoder, head = nn.Sequential(linear(bias=False), nn.Tanh(), linear(bias=False)), Rare()

    def loss_of(x: Tensor, y: Tensor, _: Tensor) -> Tensor:
        return F.cross_entropy(head(encoder(x), x[:, 0] > 1.3), y)

    fits(trial, [encoder, head], loss_of)


@once_wrong
def two_heads_of_equal_size(trial: Any) -> None:
    """A rank without a sample of a task leaves its head out."""
    body, one, other = linear(), linear(), linear()

    def loss_of(x: Tensor, y: Tensor, number: Tensor) -> Tensor:
        hidden, is_other = body(x), number % 16 == 5
        losses = F.cross_entropy(one(hidden[~is_other]), y[~is_other], reduction="sum")
        if is_other.any():
            outputs = other(hidden[is_other])
            losses = losses + F.cross_entropy(outputs, y[is_other], reduction="sum")
        return losses / len(x)

    fits(trial, [body, one, other], loss_of)


@once_wrong
def modules_in_the_order_that_the_data_say(trial: Any) -> None:
    """Ranks use the same modules, but one first or the other."""
    first, second = linear(bias=False), linear(bias=False)

    def loss_of(x: Tensor, y: Tensor, _: Tensor) -> Tensor:
        order = (first, second) if x[0, 0] > 0 else (second, first)
        parts = [F.cross_entropy(module(x), y) for module in order]
        return parts[0] + parts[1]

    fits(trial, [first, second], loss_of)


@once_wrong
def accumulates_over_batches_of_which_some_need_a_head(trial: Any) -> None:
    body, head, rare = linear(), linear(6, 3), linear(6, 3)

    def loss_of(x: Tensor, y: Tensor, number: Tensor) -> Tensor:
        hidden, is_rare = body(x), number % 16 == 7
        loss = F.cross_entropy(head(hidden), y)
        if is_rare.any():
            loss = loss + rare(hidden[is_rare]).square().sum() / len(x)
        return loss

    fits(trial, [body, head, rare], loss_of, accumulates=3)


@once_wrong
def a_second_backward_through_a_part(trial: Any) -> None:
    """The second one reaches the head only, and on some ranks not even that."""
    body, head, rare = linear(), linear(6, 3), linear(6, 3)

    def loss_of(x: Tensor, y: Tensor, number: Tensor) -> Tensor:
        hidden, is_rare = body(x), number % 16 == 7
        F.cross_entropy(head(hidden), y).backward()
        again = head(hidden.detach()).square().mean()
        if is_rare.any():
            again = again + rare(x[is_rare]).square().sum() / len(x)
        return again

    fits(trial, [body, head, rare], loss_of)


@once_wrong
def thaws_between_forward_and_backward(trial: Any) -> None:
    first, second = linear(), linear(6, 3)

    def loss_of(x: Tensor, y: Tensor, number: Tensor) -> Tensor:
        first.requires_grad_(len(trial.state["seen"]) % 3 != 0)
        loss = F.cross_entropy(second(torch.tanh(first(x))), y)
        first.requires_grad_(True)
        return loss

    trial.state.setdefault("seen", [])
    fits(trial, [first, second], loss_of)


@once_wrong
def embeds_in_two_backwards(trial: Any) -> None:
    """Sparse gradients, of what few rows need."""
    table = nn.Embedding(101, 6, sparse=True, dtype=torch.float64)
    head = linear(6, 3)

    def loss_of(x: Tensor, y: Tensor, number: Tensor) -> Tensor:
        is_looked_up = number % 8 == 3
        for is_second in (False, True):
            hidden = x
            if is_looked_up.any():
                found = table(number[is_looked_up])
                hidden = x.index_add(0, is_looked_up.nonzero()[:, 0], found)
            loss = F.cross_entropy(head(hidden), y)
            if not is_second:
                loss.backward()
        return loss

    fits(trial, [table, head], loss_of)


# -- what can not be the same on several devices --------------------------------------------------


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


def a_buffer_follows_the_data(trial: Any) -> None:
    model = nn.Sequential(linear(), Codebook(), linear(6, 3))
    fits(trial, [model], lambda x, y, _: F.cross_entropy(model(x), y))


def remembers_each_sample(trial: Any) -> None:
    """Outputs are drawn to what is kept of the same rows from the epochs before."""
    model = linear(6, 3)
    table = trial.state.setdefault("kept", torch.zeros(101, 3).double())

    def loss_of(x: Tensor, y: Tensor, number: Tensor) -> Tensor:
        outputs = model(x)
        chances = outputs.softmax(1)
        table[number] = 0.7 * table[number] + 0.3 * chances.detach()
        pull = (table[number] - chances).square().sum(1).mean()
        return F.cross_entropy(outputs, y) + 3 * pull

    fits(trial, [model], loss_of)


def drops_or_adds_rows(trial: Any, *, data: str) -> None:
    """Which its `collate_fn` does."""
    model = linear(6, 3)
    fits(trial, [model], lambda x, y, _: F.cross_entropy(model(x), y), data=data)


def sets_gradients(trial: Any) -> None:
    """PCGrad: two tasks, whose gradients are put into `p.grad`."""
    body, one, other = linear(), linear(6, 3), linear(6, 1)
    parameters = [p for m in (body, one, other) for p in m.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    trial.prepare(body, one, other, optimizer)
    for _ in trial.epochs(EPOCHS):
        for x, y, _ in trial.batches("train_rows", 16):
            hidden = torch.relu(body(x))
            classes = F.cross_entropy(one(hidden), y)
            sums = (other(hidden)[:, 0] - x.sum(1)).square().mean()
            first, second = (_gradients(loss, parameters) for loss in (classes, sums))
            if (dot := first @ second) < 0:
                first, second = (
                    first - dot / (second @ second) * second,
                    second - dot / (first @ first) * first,
                )
            flat = (first + second).split([p.numel() for p in parameters])
            for p, grad in zip(parameters, flat, strict=True):
                p.grad = grad.view_as(p).clone()
            optimizer.step()
    note_weights(trial, body, one, other)


def _gradients(loss: Tensor, parameters: list[Any]) -> Tensor:
    grads = torch.autograd.grad(
        loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return torch.cat([grad.flatten() for grad in grads])


# -- bounds ---------------------------------------------------------------------------------------


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
