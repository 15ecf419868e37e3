"""Usual objectives, written as users write them; each notes all losses it sees."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

from optuna_fleet import SharedPipeline
from tests.fleets import Noise, evaluate, num_wrong

EPOCHS = 3
OBJECTIVES: dict[str, Callable[[Any], Any]] = {}


def usual(objective: Callable[[Any], Any]) -> Callable[[Any], Any]:
    OBJECTIVES[objective.__name__] = objective
    return objective


def run(trial: Any, *, name: str) -> float:
    torch.manual_seed(0)  # trials that are compared begin alike
    OBJECTIVES[name](trial)
    trial.set_user_attr("seen", trial.state["seen"])
    return 0.0


# -- data, all in float64 -------------------------------------------------------------------------


class Triples(torch.utils.data.Dataset[tuple[Tensor, Tensor, Tensor]]):
    """An image, another view of it, another image."""

    def __init__(self, size: int) -> None:
        self.images = Noise(size)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        image, _ = self.images[index]
        view = image + 0.3 * torch.randn(image.shape, dtype=image.dtype)
        return image, view, self.images[(index + 1) % len(self)][0]


class Sentences(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Tokens from 1 to 9, padded with 0, and their number: two in three are one token long."""

    def __init__(self, size: int) -> None:
        self.tokens = torch.randint(1, 10, (size, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        length = 3 + index % 5 if index % 3 == 0 else 1
        return self.tokens[index] * (torch.arange(8) < length), length


def usual_pipeline() -> SharedPipeline:
    """By tens and sevens the last batches are two samples and one: fewer than three ranks."""
    return SharedPipeline(
        train=Noise(42, augment=True),
        train_triples=Triples(29),
        train_text=Sentences(42),
        val=Noise(20),
    )


# -- parts ----------------------------------------------------------------------------------------


def convnet() -> nn.Sequential:
    return nn.Sequential(
        # A bias before BatchNorm has no gradient but rounding, of which Adam would make steps.
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 3),
    ).double()


def perceptron(inputs: int = 36, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)
    ).double()


def pixelwise() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 1)).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def prepared(trial: Any, make_model: Any = convnet, make_optimizer: Any = sgd) -> Any:
    model = make_model()
    return trial.prepare(model, make_optimizer(model.parameters()))


def note(trial: Any, loss: Tensor, weight: Any = None) -> float:
    """Adds the mean of a loss over the ranks to what was seen."""
    weight = trial.shard_size if weight is None else weight
    mean = float(trial.mean(loss.item(), weight=weight))
    trial.state.setdefault("seen", []).append(mean)
    return mean


def note_weighted(trial: Any, loss: Tensor, weight: Tensor) -> None:
    """What stands in for a rank without samples has no weight."""
    note(trial, loss, weight if trial.shard_size else 0)


def note_evaluation(trial: Any, model: Any) -> float:
    """The mean loss over the validation data."""

    def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels, reduction="sum")

    loss = evaluate(trial, model, loss_of) / 20
    trial.state["seen"].append(loss)
    model.train()
    return loss


def step(optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_on(trial: Any, model: Any, optimizer: Any, images: Tensor, labels: Tensor) -> float:
    loss = F.cross_entropy(model(images), labels)
    step(optimizer, loss)
    return note(trial, loss)


def with_sizes(trial: Any, batches: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """What is trained on later must be logged with what `trial.shard_size` is now."""
    for batch in batches:
        yield batch, trial.shard_size


@usual
def plain(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            loss = F.cross_entropy(model(images), labels)
            step(optimizer, loss)
            note(trial, loss)
        note_evaluation(trial, model)


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


def focal(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(model(images), labels, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def regression(model: Any, images: Tensor, _: Tensor) -> Tensor:
    return F.mse_loss(model(images), images[:, 0, 0, :3])


def bce_with_pos_weight(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    targets, weight = F.one_hot(labels, 3).double(), torch.tensor([1.0, 3.0, 0.5])
    return F.binary_cross_entropy_with_logits(model(images), targets, pos_weight=weight)


def two_tasks(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    outputs = model(images)
    return F.cross_entropy(outputs, labels) + 0.3 * F.mse_loss(outputs[:, 0], images[:, 0, 0, 0])


def hardest_pixels(model: Any, images: Tensor, _: Tensor) -> Tensor:
    errors = (model(images) - images).square().flatten(1)
    return errors.topk(18, dim=1).values.mean()


def ctc(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    """The rows of an image as six moments of speech."""
    log_probs = model(images.squeeze(1)).log_softmax(-1).transpose(0, 1)
    targets = 1 + (labels[:, None] + torch.arange(3)) % 3
    return F.ctc_loss(log_probs, targets, torch.full_like(labels, 6), labels + 1)


def norm_of_parameters(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    norm = sum(parameter.square().sum() for parameter in model.parameters())
    return F.cross_entropy(model(images), labels) + 0.01 * norm


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


def cosine(model: Any, anchor: Tensor, view: Tensor, other: Tensor) -> Tensor:
    code, same = model(anchor), torch.ones(len(anchor))
    alike = F.cosine_embedding_loss(code, model(view), same)
    return alike + F.cosine_embedding_loss(code, model(other), -same)


def ranking(model: Any, anchor: Tensor, _: Tensor, other: Tensor) -> Tensor:
    better, worse = model(anchor)[:, 0], model(other)[:, 0]
    return F.margin_ranking_loss(better, worse, torch.ones(len(anchor)), margin=0.1)


OBJECTIVES |= {
    "label_smoothing": trains(functools.partial(cross_entropy, label_smoothing=0.1)),
    "sum_over_len": trains(sum_over_len),
    "focal": trains(focal, evaluates=True),
    "regression": trains(regression),
    "bce_with_pos_weight": trains(bce_with_pos_weight),
    "two_tasks": trains(two_tasks),
    "hardest_pixels": trains(hardest_pixels, pixelwise),
    "ctc": trains(ctc, lambda: nn.Linear(6, 4).double()),
    "norm_of_parameters": trains(norm_of_parameters),
    "gradient_penalty": trains(gradient_penalty, perceptron),
    "vae": trains(vae, autoencoder, data="train_triples"),
    "triplet": trains(triplet, data="train_triples"),
    "cosine": trains(cosine, data="train_triples"),
    "ranking": trains(ranking, data="train_triples"),
}


@usual
def distillation(trial: Any) -> None:
    student, optimizer = prepared(trial)
    teacher = trial.prepare(perceptron().requires_grad_(False))
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            outputs = student(images)
            soft = F.softmax(teacher(images) / 2, dim=1)
            distance = F.kl_div(F.log_softmax(outputs / 2, 1), soft, reduction="batchmean")
            loss = 4 * distance + F.cross_entropy(outputs, labels)
            step(optimizer, loss)
            note(trial, loss)
        note_evaluation(trial, student)


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
            note(trial, loss, weight)
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


def causal_tokens(model: Any, tokens: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    targets = tokens[:, 1:].masked_fill(tokens[:, 1:] == 0, -100)
    outputs = model(tokens[:, :-1]).flatten(0, 1)
    loss = F.cross_entropy(outputs, targets.flatten(), ignore_index=-100)  # may be NaN as well
    return loss, (targets != -100).sum()


def masked_tokens(model: Any, tokens: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    mask = targets != 0
    losses = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")
    return (losses * mask).sum() / mask.sum().clamp(min=1), mask.sum()


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
    "sample_weights": weighs(sample_weights, convnet),
    "some_pixels": weighs(some_pixels, pixelwise, drop_last=True),
    "causal_tokens": weighs(causal_tokens, Transformer, data="train_text", drop_last=True),
    "masked_tokens": weighs(masked_tokens, Transformer, data="train_text"),
    "accumulates_tokens": weighs(masked_tokens, Transformer, data="train_text", accumulates=2),
}


@usual
def one_of_two_tasks_is_weighted(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            outputs = model(images)
            classes = F.cross_entropy(outputs, labels, weight=CLASS_WEIGHTS)
            values = F.mse_loss(outputs[:, 0], images[:, 0, 0, 0])
            weight = CLASS_WEIGHTS[labels].sum()
            step(optimizer, trial.weighted(classes, weight) + 0.3 * values)
            note_weighted(trial, classes, weight)
            note(trial, values)


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


# -- optimizers and schedules ---------------------------------------------------------------------

OBJECTIVES |= {
    name: trains(cross_entropy, convnet, make, evaluates=True)
    for name, make in {
        "adam": functools.partial(torch.optim.Adam, lr=0.01),
        "adamw": functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
        "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.001, momentum=0.5),
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
def one_cycle(trial: Any) -> None:
    model, optimizer = prepared(trial)
    num_steps = EPOCHS * len(trial.batches("train", batch_size=10))
    scheduler = trial.prepare(lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=num_steps))
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            train_on(trial, model, optimizer, images, labels)
            scheduler.step()


@usual
def warm_restarts(trial: Any) -> None:
    model, optimizer = prepared(trial)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=1, T_mult=2)
    trial.prepare(scheduler)
    for epoch in trial.epochs(EPOCHS):
        batches = trial.batches("train", batch_size=10)
        for k, (images, labels) in enumerate(batches):
            train_on(trial, model, optimizer, images, labels)
            scheduler.step(epoch + k / len(batches))


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


def all_norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4, affine=True),
        nn.ReLU(),
        nn.Flatten(),
        nn.LayerNorm(64),
        nn.Linear(64, 3),
    ).double()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()).double()
        self.head = nn.Linear(64, 3).double()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, images, use_reentrant=False).flatten(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 10, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).tanh())


def next_tokens(model: Any, tokens: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4, padding_idx=0, dtype=torch.float64)
        self.lstm = nn.LSTM(4, 6, batch_first=True, bidirectional=True, dtype=torch.float64)
        self.head = nn.Linear(12, 3, dtype=torch.float64)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = self.lstm(packed)
        return self.head(torch.cat([*hidden], dim=1))


def packed_sequences(model: Any, tokens: Tensor, lengths: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens, lengths), lengths % 3)


def functional_call(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    parameters = {name: 0.9 * p for name, p in model.named_parameters()}
    return F.cross_entropy(torch.func.functional_call(model, parameters, (images,)), labels)


OBJECTIVES |= {
    "all_norms": trains(cross_entropy, all_norms, evaluates=True),
    "activation_checkpointing": trains(cross_entropy, Checkpointed, evaluates=True),
    "compiled": trains(cross_entropy, lambda: torch.compile(convnet(), backend="eager")),
    "tied_weights": trains(next_tokens, Tied, data="train_text"),
    "packed_sequences": trains(packed_sequences, Packed, data="train_text"),
    "functional_call": trains(functional_call),
}


@usual
def unfreezes(trial: Any) -> None:
    model, optimizer = prepared(trial)
    model[:2].requires_grad_(False)
    for epoch in trial.epochs(EPOCHS):
        if epoch >= 1:
            model.requires_grad_(True)
        for images, labels in trial.batches("train", batch_size=10):
            train_on(trial, model, optimizer, images, labels)
        note_evaluation(trial, model)


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
def ema(trial: Any) -> None:
    model = convnet()
    average = swa_utils.AveragedModel(
        model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    model, average, optimizer = trial.prepare(model, average, sgd(model.parameters()))
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            train_on(trial, model, optimizer, images, labels)
            average.update_parameters(model)
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


@usual
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


@usual
def fetches_one_ahead(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        batches = iter(trial.batches("train", batch_size=10))
        ahead = next(batches, None)
        while ahead is not None:
            (images, labels), ahead = ahead, next(batches, None)
            train_on(trial, model, optimizer, images, labels)
        note_evaluation(trial, model)


@usual
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


OBJECTIVES |= {
    "keeps_batches": keeps_batches(lambda batches: batches),
    "keeps_batches_and_turns_them_round": keeps_batches(reversed),
    "keeps_batches_and_trains_on_them_twice": keeps_batches(lambda batches: batches * 2),
}


@usual
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


@usual
def zips_and_weighs(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        tens = with_sizes(trial, trial.batches("train", batch_size=10))
        sevens = with_sizes(trial, trial.batches("train_triples", batch_size=7))
        for ((images, labels), size), ((more, again, _), other) in zip(tens, sevens, strict=True):
            first = F.cross_entropy(model(images), labels)
            second = F.mse_loss(model(more), model(again))
            step(optimizer, trial.weighted(first, size) + 0.5 * trial.weighted(second, other))
            note(trial, first, size)
            note(trial, second, other)
        note_evaluation(trial, model)


@usual
def consistency(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        labelled = with_sizes(trial, trial.batches("train", batch_size=10))
        unlabelled = with_sizes(trial, trial.batches("train_triples", batch_size=7))
        for ((images, labels), size), ((weak, strong, _), other) in zip(
            labelled, unlabelled, strict=True
        ):
            known = F.cross_entropy(model(images), labels)
            with torch.no_grad():
                targets = model(weak).softmax(1)
            unknown = F.mse_loss(model(strong).softmax(1), targets)
            step(optimizer, known + unknown)
            note(trial, known, size)
            note(trial, unknown, other)
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
def warms_up_by_its_state(trial: Any) -> None:
    model, optimizer = prepared(trial)
    trial.state.setdefault("steps", 0)
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            trial.state["steps"] += 1
            optimizer.param_groups[0]["lr"] = 0.01 * trial.state["steps"]
            train_on(trial, model, optimizer, images, labels)


@usual
def leaves_out_what_is_easy(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        for images, labels in trial.batches("train", batch_size=10):
            loss = F.cross_entropy(model(images), labels)
            if note(trial, loss) < 1.0:
                continue
            step(optimizer, loss)
        note_evaluation(trial, model)


@usual
def breaks_off(trial: Any) -> None:
    model, optimizer = prepared(trial)
    for _ in trial.epochs(EPOCHS):
        for k, (images, labels) in enumerate(trial.batches("train", batch_size=10)):
            if k == 3:
                break
            train_on(trial, model, optimizer, images, labels)
        note_evaluation(trial, model)
