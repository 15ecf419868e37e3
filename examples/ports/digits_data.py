"""What the ports share: scanned digits, and a command line."""

from __future__ import annotations

import argparse
import functools

import optuna
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset


@functools.cache
def load_datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return the training set (1437 digits of 64 pixels) and the held-out set (360)."""
    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels, labels, test_size=360, random_state=0, stratify=labels)
    train_x, val_x, train_y, val_y = (torch.from_numpy(part) for part in split)
    return (
        TensorDataset(train_x.float() / 16, train_y),
        TensorDataset(val_x.float() / 16, val_y),
    )


def get_loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Return a loader of each; that of the training set shuffles."""
    train, val = load_datasets()
    return DataLoader(train, batch_size, shuffle=True), DataLoader(val, batch_size)


def parse_arguments(doc: str, epochs: int | None = None) -> argparse.Namespace:
    """Return the command line: `trials`, `fleet`, `devices`, `storage`; `epochs` if given."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20)
    if epochs is not None:
        parser.add_argument("--epochs", type=int, default=epochs, help="of each trial")
    parser.add_argument("--fleet", action="store_true", help="run the trials on all devices")
    parser.add_argument("--devices", type=int, help="default: all GPUs, else all CPU cores")
    parser.add_argument("--storage", help="Optuna storage URL; default: in memory")
    return parser.parse_args()


def print_summary(study: optuna.Study) -> None:
    """Print how many trials ended how, and the best."""
    states = [trial.state.name.lower() for trial in study.trials]
    print(", ".join(f"{states.count(state)} {state}" for state in sorted(set(states))))
    for best in study.best_trials:
        print(f"Trial {best.number}: {best.values} with {best.params}")
