"""Losses for the tables of the pre-flight check: some depend on each other's samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.behaviour.objectives import CLASS_WEIGHTS
from tests.behaviour.parts import EPOCHS, note, step


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
