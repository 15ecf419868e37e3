"""Objectives with other losses: means over samples, weighted means, and what is no mean at all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.behaviour.parts import (
    EPOCHS,
    OBJECTIVES,
    note,
    note_evaluation,
    note_weighted,
    perceptron,
    pixelwise,
    prepared,
    step,
    usual,
)

# -- losses that are means over samples -----------------------------------------------------------


def trains(
    loss_of: Callable[..., Tensor],
    *make: Any,
    data: str = "train",
    evaluates: bool = False,
) -> Any:
    """The plain loop with another loss of a model and a batch, another model or optimizer."""

    def objective(trial: Any) -> None:
        model, optimizer = prepared(trial, *make)
        for _ in trial.epochs(EPOCHS):
            for batch in trial.batches(data, batch_size=10 if data != "train_triples" else 7):
                loss = loss_of(model, *batch)
                step(optimizer, loss)
                note(trial, loss)
            if evaluates:
                note_evaluation(trial, model)

    return objective


def cross_entropy(model: Any, images: Tensor, labels: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(model(images), labels, **more)


def sum_over_len(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels, reduction="sum") / len(labels)


def ctc(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    """The rows of an image as six moments of speech."""
    log_probs = model(images.squeeze(1)).log_softmax(-1).transpose(0, 1)
    targets = 1 + (labels[:, None] + torch.arange(3)) % 3
    return F.ctc_loss(log_probs, targets, torch.full_like(labels, 6), labels + 1)


def gradient_penalty(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    images.requires_grad_(True)
    outputs = model(images)
    (slope,) = torch.autograd.grad(outputs.sum(), images, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    return F.cross_entropy(outputs, labels) + penalty


def vae(model: Any, images: Tensor, noise: Tensor, _: Tensor) -> Tensor:
    mean, log_var = model["encode"](images).chunk(2, dim=1)
    code = mean + noise.flatten(1)[:, :4] * torch.exp(log_var / 2)
    error = F.mse_loss(model["decode"](code), images.flatten(1), reduction="sum")
    divergence = -0.5 * torch.sum(1 + log_var - mean.square() - log_var.exp())
    return (error + divergence) / len(images)


def autoencoder() -> nn.Module:
    return nn.ModuleDict({"encode": perceptron(36, 8), "decode": perceptron(4, 36)})


def triplet(model: Any, anchor: Tensor, view: Tensor, other: Tensor) -> Tensor:
    return F.triplet_margin_loss(model(anchor), model(view), model(other), margin=5.0)


OBJECTIVES |= {
    "label_smoothing": trains(functools.partial(cross_entropy, label_smoothing=0.1)),
    "sum_over_len": trains(sum_over_len),
    "ctc": trains(ctc, lambda: nn.Linear(6, 4).double()),
    "gradient_penalty": trains(gradient_penalty, perceptron),
    "vae": trains(vae, autoencoder, data="train_triples"),
    "triplet": trains(triplet, data="train_triples"),
}


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


# -- losses that are means over something else ----------------------------------------------------

CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 0.5], dtype=torch.float64)


@usual
def class_weights(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            loss = F.cross_entropy(model(images), labels, weight=CLASS_WEIGHTS)
            weight = CLASS_WEIGHTS[labels].sum()
            step(optimizer, trial.weighted(loss, weight))
            note_weighted(trial, loss, weight)
        note_evaluation(trial, model)


@usual
def loss_module(trial: Any) -> None:
    model, optimizer = prepared(trial)
    criterion = trial.prepare(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1))
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            loss = criterion(model(images), labels)
            weight = criterion.weight[labels].sum()
            step(optimizer, trial.weighted(loss, weight))
            note_weighted(trial, loss, weight)
        note_evaluation(trial, model)


def weighs(
    loss_of: Callable[..., tuple[Tensor, Tensor]],
    make_model: Any,
    *,
    data: str = "train",
    drop_last: bool = False,
    accumulates: int = 1,
) -> Any:
    """`loss_of` gives a mean and the sum of the weights in it; a rank may have none."""

    def objective(trial: Any) -> None:
        model, optimizer = prepared(trial, make_model)
        for _ in trial.epochs(EPOCHS):
            batches = trial.batches(data, batch_size=10, drop_last=drop_last)
            for k, batch in enumerate(batches, 1):
                loss, weight = loss_of(model, *batch)
                (trial.weighted(loss, weight) / accumulates).backward()
                if k % accumulates == 0 or k == len(batches):
                    optimizer.step()
                    optimizer.zero_grad()
                note_weighted(trial, loss, weight)

    return objective


def sample_weights(model: Any, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    weights = images.square().mean((1, 2, 3))
    losses = F.cross_entropy(model(images), labels, reduction="none")
    return (weights * losses).sum() / weights.sum(), weights.sum()


def some_pixels(model: Any, images: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    mask = images > 2  # less than one pixel of an image
    return F.mse_loss(model(images)[mask], images[mask]), mask.sum()  # NaN where there is none


def masked_tokens(model: Any, tokens: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    mask = targets != 0
    losses = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")
    return (losses * mask).sum() / mask.sum(), mask.sum()  # 0 / 0, and so are its gradients


def clamped_tokens(model: Any, tokens: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """The last batch of an epoch may have no tokens at all."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    losses = F.cross_entropy(
        model(inputs).transpose(1, 2), targets, ignore_index=0, reduction="sum"
    )
    return losses / (targets != 0).sum().clamp(min=1), (targets != 0).sum()


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


OBJECTIVES |= {
    "some_pixels": weighs(some_pixels, pixelwise, drop_last=True),
    "masked_tokens": weighs(masked_tokens, Transformer, data="train_text", drop_last=True),
    "clamped_tokens": weighs(clamped_tokens, Transformer, data="train_text"),
    "accumulates_tokens": weighs(clamped_tokens, Transformer, data="train_text", accumulates=2),
}


@usual
def two_tasks_are_weighted(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            classes = F.cross_entropy(model(images), labels, weight=CLASS_WEIGHTS)
            others, others_weight = sample_weights(model, images, labels)
            weight = CLASS_WEIGHTS[labels].sum()
            both = trial.weighted(classes, weight) + trial.weighted(others, others_weight)
            step(optimizer, both)
            note_weighted(trial, classes, weight)
            note_weighted(trial, others, others_weight)


def trains_linearly(trial: Any, *, loss_of: Callable[..., Tensor], data: str = "train") -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()
    model, optimizer = trial.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in trial.epochs(EPOCHS):
        for batch in trial.batches(data, batch_size=10 if data == "train" else 7):
            loss = loss_of(model, *batch)
            step(optimizer, loss)
            note(trial, loss)


# -- losses in which samples depend on each other, and it is not said ----------------------------


def nt_xent(model: Any, anchor: Tensor, view: Tensor, _: Tensor) -> Tensor:
    codes = F.normalize(torch.cat([model(anchor), model(view)]), dim=1)
    similar = (codes @ codes.T / 0.5).fill_diagonal_(-torch.inf)
    return F.cross_entropy(similar, torch.arange(len(codes)).roll(len(anchor)))


def clip(model: Any, anchor: Tensor, view: Tensor, _: Tensor) -> Tensor:
    left, right = F.normalize(model(anchor), dim=1), F.normalize(model(view), dim=1)
    similar, same = left @ right.T / 0.1, torch.arange(len(left))
    return (F.cross_entropy(similar, same) + F.cross_entropy(similar.T, same)) / 2


def spread(model: Any, anchor: Tensor, view: Tensor, _: Tensor) -> Tensor:
    left, right = model(anchor), model(view)
    return F.mse_loss(left, right) + F.relu(1 - left.std(0, unbiased=False)).mean()


def cox(model: Any, images: Tensor, _: Tensor) -> Tensor:
    risk = model(images)[:, 0][images[:, 0, 0, 0].argsort(descending=True)]
    return (risk.logcumsumexp(0) - risk).mean()


def all_pairs(model: Any, images: Tensor, _: Tensor) -> Tensor:
    scores, truth = model(images)[:, 0], images[:, 0, 0, 0]
    order = torch.sign(truth[:, None] - truth)
    return F.softplus(-order * (scores[:, None] - scores)).mean()


def dice(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    chances, truth = model(images).softmax(1), F.one_hot(labels, 3)
    return 1 - ((2 * chances * truth).sum(0) / (chances + truth).sum(0)).mean()


# -- losses that are means over something else, and it is not said -------------------------------


def sum_over_samples(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels, reduction="sum")


def weighted_classes(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels, weight=CLASS_WEIGHTS)


def ignored_labels(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels, ignore_index=0)


def masked_values(model: Any, images: Tensor, _: Tensor) -> Tensor:
    targets = images[:, 0, 0, :3]
    return F.mse_loss(model(images)[targets > 0], targets[targets > 0])


COUPLED = {
    nt_xent: "train_triples",
    clip: "train_triples",
    spread: "train_triples",
    cox: "train",
    all_pairs: "train",
    dice: "train",
    sum_over_samples: "train",
    weighted_classes: "train",
    ignored_labels: "train",
    masked_values: "train",
}


# -- losses of torch that are means over samples --------------------------------------------------


def signs(like: Tensor, labels: Tensor) -> Tensor:
    return ((labels > 0) * 2 - 1).to(like)


def hot(like: Tensor, labels: Tensor) -> Tensor:
    return F.one_hot(labels, 3).to(like)


def soft(like: Tensor, labels: Tensor) -> Tensor:
    return 0.7 * hot(like, labels) + 0.1


def ctc(outputs: Tensor, labels: Tensor) -> Tensor:
    log_probs = outputs.float().expand(6, -1, -1).log_softmax(-1)
    ones = torch.ones_like(labels)
    return F.ctc_loss(log_probs, labels.clamp(min=1)[:, None], 6 * ones, ones)


def multilabel_margin(outputs: Tensor, labels: Tensor) -> Tensor:
    targets = torch.stack([labels, 0 * labels - 1, 0 * labels - 1], dim=1)
    return F.multilabel_margin_loss(outputs.float(), targets)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l1": lambda x, y: F.l1_loss(x, hot(x, y)),
    "mse": lambda x, y: F.mse_loss(x.float(), hot(x, y).float()),  # torch 2.4 has no other on CPUs
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, hot(x, y)),
    "huber": lambda x, y: F.huber_loss(x, hot(x, y), delta=0.5),
    "cross_entropy": F.cross_entropy,
    "label_smoothing": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "soft_labels": lambda x, y: F.cross_entropy(x, soft(x, y)),
    "nll": lambda x, y: F.nll_loss(x.log_softmax(1), y),
    "bce": lambda x, y: F.binary_cross_entropy(x.sigmoid(), hot(x, y)),
    "bce_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, hot(x, y)),
    "kl_div": lambda x, y: F.kl_div(x.log_softmax(1), soft(x, y)),
    "kl_div_of_batch": lambda x, y: F.kl_div(x.log_softmax(1), soft(x, y), reduction="batchmean"),
    "poisson_nll": lambda x, y: F.poisson_nll_loss(x, hot(x, y)),
    "gaussian_nll": lambda x, y: F.gaussian_nll_loss(x, hot(x, y), x.exp()),
    "hinge_embedding": lambda x, y: F.hinge_embedding_loss(x[:, 0], signs(x, y)),
    "margin_ranking": lambda x, y: F.margin_ranking_loss(x[:, 0], x[:, 1], signs(x, y), 0.1),
    "multi_margin": lambda x, y: F.multi_margin_loss(x.float(), y),
    "multilabel_margin": multilabel_margin,
    "multilabel_soft_margin": lambda x, y: F.multilabel_soft_margin_loss(x, hot(x, y)),
    "soft_margin": lambda x, y: F.soft_margin_loss(x[:, 0], signs(x, y)),
    "cosine_embedding": lambda x, y: F.cosine_embedding_loss(x, hot(x, y), signs(x, y)),
    "triplet_margin": lambda x, y: F.triplet_margin_loss(x, hot(x, y), x.new_ones(x.shape)),
    "ctc": ctc,
}
