"""A search over transformers some of which do not fit on one device.

python examples/large_model.py                   # CPU slots that are said to have 10 MB each
python examples/large_model.py --memory-mb 0     # GPUs, with the memory that they have

Characters of Python's standard library are to be continued. A model is given to `trial.pipeline`,
which asks for as many devices as its layers need: small models train on one, large ones in stages
on several, also of two types, if there are not enough of one. The objective is the same for all.
CPU slots count as of two types here, two of each. About two minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import optuna
import torch
import torch.nn.functional as F
from torch import nn

from optuna_fleet import FleetExecutor, LocalCluster, SharedPipeline
from optuna_fleet.visualization import plot_timeline

NUM_CHARACTERS = 128
LENGTH = 48


class Text(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of a text, and the characters that come next at each place."""

    def __init__(self, text: str) -> None:
        codes = [min(ord(character), NUM_CHARACTERS - 1) for character in text]
        self.codes = torch.tensor(codes)

    def __len__(self) -> int:
        return (len(self.codes) - 1) // LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = index * LENGTH
        return self.codes[first : first + LENGTH], self.codes[first + 1 : first + LENGTH + 1]


class Embedding(nn.Module):
    """The first layer: from characters to vectors, which know their places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(NUM_CHARACTERS, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return self.characters(codes) + self.places


class Block(nn.Module):
    """A layer of a transformer that looks back."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend = nn.Linear(width, 3 * width)
        self.gather = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        of_heads = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.attend(self.norms[0](x)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(*of_heads, is_causal=True)
        x = x + self.dropout(self.gather(seen.transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.think(self.norms[1](x)))


def build_model(trial: optuna.Trial) -> nn.Sequential:
    """A transformer as its layers in their order: cuts are between these."""
    width = trial.suggest_categorical("width", [32, 64, 128])
    depth = trial.suggest_int("depth", 2, 8, step=2)
    dropout = trial.suggest_float("dropout", 0.0, 0.2)
    blocks = [Block(width, num_heads=4, dropout=dropout) for _ in range(depth)]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, NUM_CHARACTERS))
    return nn.Sequential(Embedding(width), *blocks, head)


def loss_of(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def objective(trial: Any, num_epochs: int, memory_bytes: float | None) -> float:
    """Train one transformer and return its loss on text that it has not seen."""
    model = build_model(trial)
    optimizer = torch.optim.AdamW(
        model.parameters(), trial.suggest_float("lr", 1e-3, 1e-2, log=True)
    )
    pipeline = trial.pipeline(
        model, optimizer, loss_of, max_grad_norm=1.0, memory_bytes=memory_bytes
    )
    for epoch in trial.epochs(num_epochs):
        for codes, following in trial.batches("train", batch_size=8):
            pipeline.step(codes, following)
        loss = pipeline.evaluate(trial.batches("val", batch_size=32))
        trial.set_user_attr("stages", pipeline.num_stages)
        trial.report(loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return trial.best_value


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--devices", type=int, help="default: all GPUs, or 4 CPU slots of 2 types")
    parser.add_argument("--memory-mb", type=float, default=10.0, help="of a device, or 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storage", help="Optuna storage URL; default: in memory")
    parser.add_argument("--picture", help="where to draw the timeline")
    return parser.parse_args(argv)


def make_fleet(data: SharedPipeline, num_devices: int | None) -> FleetExecutor:
    """All GPUs, or as many devices as are asked for, or CPU slots of two types."""
    if num_devices is None and not torch.cuda.device_count():
        two_types = LocalCluster(nodes=2, kinds=("CPU slot", "other CPU slot"))
        return FleetExecutor(data, devices=2, cluster=two_types)
    return FleetExecutor(data, devices=num_devices)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    data = SharedPipeline(
        train=Text(inspect.getsource(argparse)[:16_000]),
        val=Text(inspect.getsource(inspect)[:4_000]),
        seed=arguments.seed,
    )
    study = optuna.create_study(
        sampler=optuna.samplers.RandomSampler(seed=arguments.seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
        storage=arguments.storage,
    )
    memory_bytes = 1e6 * arguments.memory_mb or None
    with make_fleet(data, arguments.devices) as fleet:
        study.optimize(
            partial(objective, num_epochs=arguments.epochs, memory_bytes=memory_bytes),
            n_trials=arguments.trials,
            executor=fleet,
        )
    for trial in study.trials:
        stages = trial.user_attrs.get("stages", "?")
        print(f"Trial {trial.number}: {trial.state.name}, {stages} stages, {trial.params}")
    print(f"Best trial: {study.best_trial.number}, loss {study.best_value:.4f}")
    if arguments.picture:
        plot_timeline(study).write_html(arguments.picture)
        print(f"The timeline is drawn in {arguments.picture}.")


if __name__ == "__main__":
    main()
